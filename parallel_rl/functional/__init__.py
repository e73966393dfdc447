"""Pointwise mathematics of losses on log-probs, one formula a function.

    ratio          likelihood ratios, PPO's clipped surrogate, CISPO
    surrogate      what a policy-gradient term is; `surrogates` has them by name: PPO, REINFORCE, SAPO, TOPR, GMPO, ...; `dppo`,
                   `rec` and `covariance` hold larger ones
    kl             KL estimators by value and gradient
    importance     weights against the mismatch of sampler and trainer, and their truncations
    preference     DPO and its relatives, SimPO, ORPO, KTO
    reward, value, supervised, distillation    terms of these losses

A function here takes tensors of one shape and returns a number an element (or a pair, or a response). Reduction over tokens and
ranks, masks, counts and process groups do not belong here, nor does state: that is `parallel_rl.losses`.
"""
