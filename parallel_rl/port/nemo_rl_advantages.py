"""Advantages of a config of NeMo-RL in our keys."""

from __future__ import annotations

from parallel_rl.port.ported import Reader, Tree


def advantages_of(run: Reader, name: str) -> Tree:
    """Make the estimator with NeMo-RL's name."""
    estimator = run.below("adv_estimator")
    ours = "rl.advantages"
    kind = str(estimator.get("name", "gae" if name == "ppo" else "grpo", f"{ours}.name"))
    bounds = {side: run.get(f"advantage_clip_{side}", ours=f"{ours}.clip_{side}") for side in ("low", "high")}
    out: Tree = {"name": kind, **{f"clip_{side}": bound for side, bound in bounds.items() if bound is not None}}
    unread = f"with adv_estimator.name = {kind!r}"
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        for section in (run, estimator):
            section.note(key, "no_effect", why=unread)
    estimator.note("minus_baseline", "no_effect", why=unread)
    estimator.note("reward_weights", "no_effect", why=unread)
    if kind == "grpo":
        values = {}
        for key, target in (("normalize_rewards", "normalize"), ("use_leave_one_out_baseline", "baseline")):
            read, unused = (estimator, run) if key in estimator.section else (run, estimator)
            values[key] = read.get(key, True, f"{ours}.{target}")
            unused.note(key, "no_effect", why="adv_estimator has it")
        normalize, others = values["normalize_rewards"], values["use_leave_one_out_baseline"]
        out |= {"normalize": "leave_one_out" if normalize and others else "std" if normalize else "none"}
        out["baseline"] = "leave_one_out" if others else "mean"
        if others:
            run.differ(
                "use_leave_one_out_baseline: mean and deviation without the sample itself; ours take the group's, which makes "
                "each advantage smaller by (n − 1)/n"
            )
    elif kind == "reinforce_plus_plus" and estimator.get("minus_baseline", True, f"{ours}.name"):
        out["name"] = "reinforce_plus_plus_baseline"
    elif kind == "gae":
        out |= _gae(estimator)
    elif kind == "gdpo":
        estimator.leave(
            "name", "a sample has one reward in this trainer, of which gdpo reads the parts", f"{ours}.name"
        )
        out["name"] = "grpo"
    elif kind != "reinforce_plus_plus":
        estimator.leave("name", "no such estimator here")
        out["name"] = "grpo"
    return out


def _gae(estimator: Reader) -> Tree:
    """Make gae's options, with separate λ of values and policy as in VAPO."""
    ours = "rl.advantages"
    lam, values = (
        estimator.get("gae_lambda", 0.95, f"{ours}.lam"),
        estimator.get("gae_lambda_value", ours=f"{ours}.value_lam"),
    )
    policy = estimator.get("gae_lambda_policy", ours=f"{ours}.lam")
    by_length = estimator.get("length_adaptive_alpha", 0.0, f"{ours}.length_adaptive")
    out: Tree = {"gamma": estimator.get("gae_gamma", 1.0, f"{ours}.gamma")}
    out |= {"length_adaptive": by_length} if by_length else {"lam": lam if policy is None else policy}
    if by_length or policy is not None or values is not None:
        out["value_lam"] = lam if values is None else values
    if policy is not None and values is not None:
        estimator.note("gae_lambda", "no_effect", why="with gae_lambda_policy and gae_lambda_value")
    if estimator.get("normalize_advantages", True, f"{ours}.whiten"):
        out["whiten"] = "unbiased"
        estimator.differ("gae: advantages are whitened over the step (whiten: unbiased); ours by default are not")
    return out
