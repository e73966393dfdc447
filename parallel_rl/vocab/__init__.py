"""Mathematics on vocab-parallel logits, each function with its collectives and gradient.

Losses, masks and sequence layouts do not belong here.
"""
