"""Classes with the names, arguments and numbers of other projects: `lightrft`, `nemo_rl`, `openrlhf`, `trinity`.

They wrap this package's losses and `functional`; docs/compat.md names the releases. Called as the origin documents, they give
its number: means over what one process holds, oddities included; only where the origin gives NaN or crashes does an empty row
or batch count as 0. With the counts of the whole optimizer step (`global_valid_seqs`, `global_valid_toks`, see `count_valid`)
and process groups as keywords they return this rank's share: shares, gradients and metrics add up to the numbers of one
process with the whole step. `nemo_rl` keeps its origin's contract instead. The library's own losses have the right
mathematics; the docstrings say where an origin departs from it, and (Q12) etc. number the known faults of the origins.
"""
