"""Classes with the names, arguments and numbers of other projects: `lightrft`, `nemo_rl`, `openrlhf`, `trinity`.

Each is a thin face on this package's losses and `functional`, and docs/compat.md says of which release. Called as its origin
documents it, it gives the origin's number: means over what one process holds, oddities included; where the origin gives NaN or
crashes, an empty row or an empty batch counts as 0. Given the counts of the whole optimizer step (`global_valid_seqs`,
`global_valid_toks`, see `count_valid`) and process groups as keywords, it returns this rank's share, and shares, their
gradients and metrics add up to what one process with the whole step would get; `nemo_rl` keeps its origin's own contract
instead. The library's own losses have the right mathematics; each docstring here says where its origin departs from it; (Q12)
and the like number the known faults of the origins.
"""
