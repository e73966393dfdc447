"""Token statistics from hidden states and the LM head's weight, without whole logits.

`lm_head` is the callers' input, `params` one call, `rows` its rows and their order, `plan` its chunks for a budget, `gemm`
the three products, `forward` and `backward` the passes, `autograd` their place in the graph, `token_stats` the entry.
`row_values` is the entry for any other function of a row of logits, with a second head from `teacher`. `logits` computes
whole logits for losses that need them. Losses do not belong here; the mathematics of a row is in `backends/`.
"""
