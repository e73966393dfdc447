"""Advantages, optimizers and schedules of a config of NeMo-RL in our keys."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.hosts.ported import Reader, Tree, cosine, number, optimizer


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
        estimator.leave("name", "gdpo needs several rewards a sample, and this trainer has one", f"{ours}.name")
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


def optimizer_of(owner: Reader, ours: str, updates: int) -> Tree:
    """Make the optimizer's section of policy or value function; the schedule ticks once per run step."""
    megatron, torch = owner.below("megatron_cfg"), owner.below("optimizer")
    of_megatron, of_torch = _of_megatron(megatron, ours, updates), _of_torch(owner, ours, updates)
    if megatron.flag("enabled"):
        torch.off("megatron_cfg.optimizer is used instead")
        for key, theirs in (
            ("optimizer", "optimizer"),
            ("scheduler", "scheduler"),
            ("max_grad_norm", "optimizer.clip_grad"),
        ):
            owner.note(key, "no_effect", why=f"megatron_cfg.{theirs} is used instead")
        return of_megatron
    megatron.off("Megatron is off")
    return of_torch


def _of_megatron(megatron: Reader, ours: str, updates: int) -> Tree:
    section, plan = megatron.below("optimizer"), megatron.below("scheduler")
    betas = [number(section.get(f"adam_beta{i}", default, f"{ours}.betas")) for i, default in ((1, 0.9), (2, 0.999))]
    optimized = optimizer(
        section, ours, {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay", "clip": "clip_grad"}
    )
    if not optimized:
        return {}
    warmup = number(plan.get("lr_warmup_iters", ours=f"{ours}.warmup_steps")) or 0
    style = str(plan.get("lr_decay_style", "constant", f"{ours}.schedule"))
    least = number(section.get("min_lr", ours=f"{ours}.final_fraction")) or 0.0
    if style == "cosine":
        optimized |= cosine(least, optimized["lr"])
        plan.note("lr_decay_iters", "yours", f"{ours.rpartition('.')[0]}.steps", "the cosine here ends with the run")
    else:
        section.note("min_lr", "no_effect", why="with a constant rate")
        plan.note("lr_decay_iters", "no_effect", why="with a constant rate")
        if style != "constant":
            plan.leave("lr_decay_style", "the rate is constant or a cosine here", f"{ours}.schedule")
    if warmup:
        optimized["warmup_steps"] = int(warmup) * updates
    first = number(plan.get("lr_warmup_init")) or 0.0
    of_first = ("no_effect", "without a warm-up") if not warmup else ("unsupported", "the warm-up begins at lr / steps")
    plan.note("lr_warmup_init", of_first[0] if first else "equal", why=of_first[1] if first else "begins at 0")
    for key in ("start_weight_decay", "end_weight_decay"):
        same = number(plan.get(key)) in (None, optimized.get("weight_decay", 0.0))
        why = "the weight decay itself" if same else "the weight decay is constant here"
        plan.note(key, "equal" if same else "unsupported", f"{ours}.weight_decay", why)
    return optimized | {"betas": betas}


def _of_torch(owner: Reader, ours: str, updates: int) -> Tree:
    section = owner.below("optimizer")
    options = section.below("kwargs")
    optimized = optimizer(options, ours, {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay"})
    betas = options.get("betas", ours=f"{ours}.betas")
    if not optimized:
        return {}
    if isinstance(betas, list):
        optimized["betas"] = [number(beta) for beta in betas]
    else:
        optimized["betas"] = [0.9, 0.999]
    name = str(section.get("name", "AdamW"))
    section.note("name", "equal" if name.endswith(("AdamW", "FusedAdam")) else "unsupported", why="AdamW")
    if "max_grad_norm" in owner.section:
        optimized["clip"] = number(owner.get("max_grad_norm", ours=f"{ours}.clip")) or None
    return optimized | _torch_schedule(owner, ours, optimized["lr"], updates)


def _torch_schedule(owner: Reader, ours: str, rate: object, updates: int) -> Tree:
    """Read a list of torch's schedules: a linear warm-up, then a constant rate or a cosine."""
    plan = owner.get("scheduler")
    parts = [part for part in (plan if isinstance(plan, list) else [plan]) if isinstance(part, Mapping)]
    names = [str(part.get("name", "")).rpartition(".")[2] for part in parts if "name" in part]
    schedule: Tree = {}
    for part, name in zip((part for part in parts if "name" in part), names, strict=True):
        options = part.get("kwargs")
        options = options if isinstance(options, Mapping) else {}
        if name == "LinearLR":
            schedule["warmup_steps"] = int(number(options.get("total_iters")) or 0) * updates
        elif name == "CosineAnnealingLR":
            schedule |= cosine(number(options.get("eta_min")) or 0.0, rate)
    if plan is None or not parts:
        owner.note("scheduler", "equal", f"{ours}.schedule", "a constant rate")
    elif set(names) <= {"LinearLR", "ConstantLR", "CosineAnnealingLR"}:
        target = f"{ours}.warmup_steps" if "warmup_steps" in schedule else ours
        owner.note("scheduler", "carried", target, "the warm-up begins at lr / warmup_steps")
    else:
        owner.leave("scheduler", "a warm-up, then a constant rate or a cosine", f"{ours}.schedule")
    return schedule
