"""The two passes over a vocabulary shard, in PyTorch and in Triton, which agree to rounding.

`passes` is the only entry, `choice` picks the implementation. Collectives, autograd and input checks do not belong here.
"""
