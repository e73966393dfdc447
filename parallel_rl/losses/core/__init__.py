"""The run of a loss, from the call to its share. Read `base` first: `LossFn.run` goes through these files in this order.

    requirements, options    what a loss needs of its caller, and how it reads the vocabulary
    call, checks             the arguments of a call as one value, and what is refused in them; `dtensor_call` for a DTensor
    local_batch              the data of this rank, in the order of the logits
    from_hidden_states, truncated_policy    the model's output, where it is not read from logits as they are
    batch                    `TokenBatch`, which `compute` sees
    aggregation, token_weights, turns, measures    how a loss weighs its tokens, and its metrics under the law

    row_loss, scalar_head    bases of the losses on whole rows of logits and on scalar heads
    component, data_view     several losses on one read of the model's output
    counted                  statistics of the whole step, before its first forward
    from_logprobs, log_prob_call, log_prob_rows    a call for hosts that have log-probs and no logits
    account, trained         what `explain` and a trainer ask of a loss

What a loss computes is in the files beside this folder; how token statistics are computed is in `parallel_rl.vocab`.
"""
