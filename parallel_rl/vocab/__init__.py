"""Mathematics on vocab-parallel logits, each function with its collectives and gradient.

    shards                   `VocabShard`: this rank's columns, and how they are read
    stats                    log-prob, entropy and log-sum-exp of every token
    truncation, truncated_stats    the same under top-k, top-p or the sampler's kept sets; `threshold` finds what is kept
    topk, buckets, divergence      chosen columns, and divergences of two distributions
    sampling                 the same samples on any layout
    linear/                  token statistics and other values of a row from hidden states and LM head, without whole logits
    backends/                the two passes over a shard, in PyTorch and in Triton

Losses, masks and sequence layouts do not belong here.
"""
