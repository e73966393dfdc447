"""Implementations of the two passes over a vocabulary shard; each agrees with the others to rounding."""
