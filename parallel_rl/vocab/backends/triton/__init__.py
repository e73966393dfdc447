"""The passes over a vocabulary shard as Triton kernels. Importing this package imports no Triton; `operators` does."""
