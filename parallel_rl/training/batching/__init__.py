"""Rows of tokens: their distribution over data ranks, and padded or packed micro-batches of them.

Nothing here depends on a model or a file.
"""
