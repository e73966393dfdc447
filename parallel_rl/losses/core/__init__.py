"""How a loss runs, from the call to the local loss. Read `loss`, then `run`, then the files in the order of a call.

A call (`base`, `call`) has a `source` of the model's output: `logits_source` or `log_probs_source`. `checks` refuses bad data,
`local_batch` holds the data in the order of the logits, `readers` reads the output into `batch`, which `compute` sees.
Base classes of other losses: `row_loss`, and `component` for several losses on one read. That of a scalar head is in
`parallel_rl.losses.value`.
"""
