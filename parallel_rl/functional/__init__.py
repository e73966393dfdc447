"""Pointwise mathematics of losses on log-probs, one formula per function.

A function takes tensors of one shape and returns one number per element (or pair, or response). Reductions, masks, counts,
process groups and state belong to `parallel_rl.losses`.
"""
