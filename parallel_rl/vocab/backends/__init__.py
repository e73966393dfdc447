"""Implementations of the two passes over a vocabulary shard, in PyTorch and in Triton; each agrees with the others to rounding.

`passes` is the only entry, `choice` picks the implementation. Collectives, autograd and checks of input do not belong here.
"""
