"""Pointwise mathematics on log-probs: no groups, no reduction, no state."""
