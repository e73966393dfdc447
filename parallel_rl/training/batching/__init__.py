"""Rows of tokens, and how they are dealt to data ranks and cut into padded or packed micro-batches.

Nothing here knows a model or a file.
"""
