"""Classes with the names, arguments and numbers of other projects: `lightrft`, `nemo_rl`, `openrlhf`, `trinity`.

They wrap this package's losses and `functional`; docs/compat.md names the releases. Called as the origin documents, they give
its numbers. With counts of the whole optimizer step (`count_valid`) and process groups as keywords they return the local
loss: losses, gradients and metrics then add up to those of one process. `nemo_rl` keeps its origin's contract instead.
(Q12) etc. number the origins' known faults.
"""
