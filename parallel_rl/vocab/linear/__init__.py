"""Functions of rows of logits from hidden states and the LM head's weight, without whole logits.

The entries are `token_stats`, and `row_values` for any other function of a row. `whole_logits` is for losses that need them.
"""
