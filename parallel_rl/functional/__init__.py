"""Pointwise mathematics of losses on log-probs, one formula per function.

    ratio          likelihood ratios, PPO's clipped surrogate, CISPO
    surrogate      base of the policy-gradient terms; `surrogates` has them by name: PPO, REINFORCE, SAPO, TOPR, GMPO, ...;
                   `dppo`, `rec` and `covariance` hold larger ones
    kl             KL estimators by value and gradient
    importance     weights against the mismatch of sampler and trainer, and their truncations
    preference     DPO and its relatives, SimPO, ORPO, KTO, reward models
    distillation   divergences of a teacher and a student

A function takes tensors of one shape and returns one number per element (or pair, or response). Reductions, masks, counts,
process groups and state belong to `parallel_rl.losses`.
"""
