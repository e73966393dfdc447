"""Mathematics on vocab-parallel logits, each function with its collectives and its gradient.

Here: what reads a shard of logits (statistics, truncation, chosen columns, divergences, draws), `VocabShard`, which says how it
is read, and `linear/`, the same from hidden states and the LM head. Not here: losses, masks of a batch and the layout of a
sequence; only `token_logprobs`, which makes a batch's log-probs for a later loss, knows them.
"""
