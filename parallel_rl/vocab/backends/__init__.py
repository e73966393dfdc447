"""The two passes over a vocabulary shard, in PyTorch and in Triton, which agree to rounding; `passes` is the entry."""
