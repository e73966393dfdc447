"""How a loss runs, from the call to the local loss. Read `loss` first, then `run`, which calls the files below.

    loss                     what a loss and a reader of the model's output are
    base                     `LossFn`, a loss that can be called
    requirements, options    what a loss needs of its caller, and how it reads the vocabulary
    call, checks             the arguments of a call as one value, and what is refused in them
    run                      find the source, check on all ranks, read the model's output, compute
    source                   where the model's output comes from: `logits_source` (logits, a DTensor, an LM head) or
                             `log_probs_source` (a host's log-probs, made rows by `log_prob_rows`)
    one_row                  several sequences in one row of logits, packed or as a prefix tree
    local_batch              the data of this rank, in the order of the logits
    readers                  log-probs and entropy, of a truncated policy too
    batch                    `TokenBatch`, which `compute` sees
    aggregation, token_weights, turns, measures    how a loss weighs its tokens, and its metrics under the law

    row_loss, scalar_head    base classes of losses on whole rows of logits and on scalar heads
    component, data_view     several losses on one read of the model's output
    counted                  statistics of the whole step, before its first forward

The losses themselves are in the folder above, the token statistics in `parallel_rl.vocab`.
"""
