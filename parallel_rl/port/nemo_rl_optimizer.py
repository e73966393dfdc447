"""Optimizers and schedules of a config of NeMo-RL in our keys."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.port.ported import Reader, Tree, cosine, number, optimizer


def optimizer_of(owner: Reader, ours: str, updates: int) -> Tree:
    """Make the optimizer's section of policy or value function; the schedule ticks once per run step."""
    megatron, torch = owner.below("megatron_cfg"), owner.below("optimizer")
    of_megatron, of_torch = _of_megatron(megatron, ours, updates), _of_torch(owner, ours, updates)
    if megatron.flag("enabled"):
        torch.off("with megatron_cfg.enabled")
        for key in ("optimizer", "scheduler", "max_grad_norm"):
            owner.note(key, "no_effect", why="with megatron_cfg.enabled")
        return of_megatron
    megatron.off("without megatron_cfg.enabled")
    return of_torch


def _of_megatron(megatron: Reader, ours: str, updates: int) -> Tree:
    given, plan = megatron.below("optimizer"), megatron.below("scheduler")
    betas = [number(given.get(f"adam_beta{i}", default, f"{ours}.betas")) for i, default in ((1, 0.9), (2, 0.999))]
    made = optimizer(given, ours, {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay", "clip": "clip_grad"})
    if not made:
        return {}
    warmup = number(plan.get("lr_warmup_iters", ours=f"{ours}.warmup_steps")) or 0
    style = str(plan.get("lr_decay_style", "constant", f"{ours}.schedule"))
    least = number(given.get("min_lr", ours=f"{ours}.final_fraction")) or 0.0
    if style == "cosine":
        made |= cosine(least, made["lr"])
        plan.note("lr_decay_iters", "yours", f"{ours.rpartition('.')[0]}.steps", "the cosine here ends with the run")
    else:
        given.note("min_lr", "no_effect", why="with a constant rate")
        plan.note("lr_decay_iters", "no_effect", why="with a constant rate")
        if style != "constant":
            plan.leave("lr_decay_style", "the rate is constant or a cosine here", f"{ours}.schedule")
    if warmup:
        made["warmup_steps"] = int(warmup) * updates
    first = number(plan.get("lr_warmup_init")) or 0.0
    of_first = ("no_effect", "without a warm-up") if not warmup else ("unsupported", "the warm-up begins at lr / steps")
    plan.note("lr_warmup_init", of_first[0] if first else "equal", why=of_first[1] if first else "begins at 0")
    for key in ("start_weight_decay", "end_weight_decay"):
        same = number(plan.get(key)) in (None, made.get("weight_decay", 0.0))
        why = "the weight decay itself" if same else "the weight decay is constant here"
        plan.note(key, "equal" if same else "unsupported", f"{ours}.weight_decay", why)
    return made | {"betas": betas}


def _of_torch(owner: Reader, ours: str, updates: int) -> Tree:
    section = owner.below("optimizer")
    given = section.below("kwargs")
    made = optimizer(given, ours, {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay"})
    betas = given.get("betas", ours=f"{ours}.betas")
    if not made:
        return {}
    if isinstance(betas, list):
        made["betas"] = [number(beta) for beta in betas]
    else:
        made["betas"] = [0.9, 0.999]
    name = str(section.get("name", "AdamW"))
    section.note("name", "equal" if name.endswith(("AdamW", "FusedAdam")) else "unsupported", why="AdamW")
    if "max_grad_norm" in owner.section:
        made["clip"] = number(owner.get("max_grad_norm", ours=f"{ours}.clip")) or None
    return made | _torch_schedule(owner, ours, made["lr"], updates)


def _torch_schedule(owner: Reader, ours: str, rate: object, updates: int) -> Tree:
    """Read a list of torch's schedules: a linear warm-up, then a constant rate or a cosine."""
    plan = owner.get("scheduler")
    parts = [part for part in (plan if isinstance(plan, list) else [plan]) if isinstance(part, Mapping)]
    names = [str(part.get("name", "")).rpartition(".")[2] for part in parts if "name" in part]
    made: Tree = {}
    for part, name in zip((part for part in parts if "name" in part), names, strict=True):
        options = part.get("kwargs")
        options = options if isinstance(options, Mapping) else {}
        if name == "LinearLR":
            made["warmup_steps"] = int(number(options.get("total_iters")) or 0) * updates
        elif name == "CosineAnnealingLR":
            made |= cosine(number(options.get("eta_min")) or 0.0, rate)
    if plan is None or not parts:
        owner.note("scheduler", "equal", f"{ours}.schedule", "a constant rate")
    elif set(names) <= {"LinearLR", "ConstantLR", "CosineAnnealingLR"}:
        target = f"{ours}.warmup_steps" if "warmup_steps" in made else ours
        owner.note("scheduler", "carried", target, "the warm-up begins at lr / warmup_steps")
    else:
        owner.leave("scheduler", "a warm-up, then a constant rate or a cosine", f"{ours}.schedule")
    return made
