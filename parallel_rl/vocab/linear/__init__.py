"""Functions of rows of logits from hidden states and the LM head's weight, without whole logits.

The entries are `token_stats`, `row_values` for any other function of a row, and `logits` for losses that need whole ones.
"""
