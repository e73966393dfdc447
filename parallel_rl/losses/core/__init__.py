"""The run of a loss, from the call to its share. Read `loss` first, what a loss is, then `run`, which goes through these files.

    loss                     what a loss and a reader of the model's output are
    base                     `LossFn`, a loss that can be called
    requirements, options    what a loss needs of its caller, and how it reads the vocabulary
    call, checks             the arguments of a call as one value, and what is refused in them
    run                      find the source, check on all ranks, read the model's output, compute
    source                   the origin of the model's output; `logits_source` of logits, a DTensor's or a head's, and
                             `log_probs_source` of a host's log-probs, which `log_prob_rows` puts into rows
    one_row                  several sequences in one row of logits, packed or as a prefix tree
    local_batch              the data of this rank, in the order of the logits
    readers                  log-probs and entropy, of a `truncated_policy` too
    batch                    `TokenBatch`, which `compute` sees
    aggregation, token_weights, turns, measures    how a loss weighs its tokens, and its metrics under the law

    row_loss, scalar_head    bases of the losses on whole rows of logits and on scalar heads, with their readers
    component, data_view     several losses on one read of the model's output
    counted                  statistics of the whole step, before its first forward

What a loss computes is in the files beside this folder; how token statistics are computed is in `parallel_rl.vocab`.
"""
