"""Sections around the loss from a verl config: model, layout, batch, sampling, optimizer, checkpoints, data."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.hosts.ported import Reader, Tree, cosine, layout_of, number, optimizer, room, room_sum

_RECOMPUTE = {"granularity", "method", "num_layers", "modules"}
_NO_STEPS = "epochs × records / rl.prompts, if no number of steps is given"


def run_of(root: Reader) -> Tree:
    joint, data = root.below("actor_rollout_ref"), root.below("data")
    actor, model, trainer = joint.below("actor"), joint.below("model"), root.below("trainer")
    megatron, fsdp = actor.below("megatron"), actor.below("fsdp_config")
    by_megatron = actor.get("strategy", ours="parallel") == "megatron"
    of_megatron, context = layout_of(megatron), _context(actor, fsdp)
    if by_megatron:
        layout = of_megatron
        fsdp.off("with strategy = 'megatron'")
    else:
        layout = {"context": context} if context not in (None, 1) else {}
        megatron.off("without strategy = 'megatron'")
    ours: Tree = {}
    weights = _model(model, megatron, by_megatron)
    batch = _batch(root, layout)
    sizes = [data.get(f"max_{part}_length", ours="model.max_positions") for part in ("prompt", "response")]
    if sizes[0] is not None and all(isinstance(size, int) for size in sizes):
        weights["max_positions"] = room(sum(sizes), layout, "packing" in batch)  # type: ignore[arg-type]
        added = room_sum(sum(sizes), layout, "packing" in batch)  # type: ignore[arg-type]
        why = "a longer prompt is an error; data.too_long: drop leaves it out"
        data.note("max_prompt_length", "carried", "model.max_positions", f"{added}; {why}" if added else why)
    if weights:
        ours["model"] = weights
    tokenizer = _tokenizer(model, data, weights.get("hf"))
    if tokenizer["hf"]:
        ours["tokenizer"] = tokenizer
    sharing = _sharing(trainer, megatron, layout)
    if layout or by_megatron:
        ours["parallel"] = layout | (sharing if by_megatron else {})
    if batch:
        ours["batch"] = batch
    ours["sampling"] = _sampling(joint.below("rollout"), data)
    run = _run(trainer)
    for engine, read in ((megatron, by_megatron), (fsdp, not by_megatron)):
        seed, dtype = engine.get("seed", ours="run.seed"), engine.get("dtype", ours="run.dtype")
        if read and isinstance(seed, int):
            run["seed"] = seed
        if read and dtype in ("bfloat16", "float32"):
            run["dtype"] = dtype
        elif read and dtype is not None:
            engine.leave("dtype", "bfloat16 or float32", "run.dtype")
    if run:
        ours["run"] = run
    return ours | _evaluation(trainer, joint.below("rollout").below("val_kwargs")) | _data(data, trainer)


def _context(actor: Reader, fsdp: Reader) -> object:
    """Return the size of Ulysses' sequence parallelism; the actor's older key wins above 1."""
    key, ours = "ulysses_sequence_parallel_size", "parallel.context"
    older, size = actor.get(key, 1, ours), fsdp.get(key, 1, ours)
    if older in (None, 1):
        actor.note(key, "equal", ours, "fsdp_config has it")
        return size
    fsdp.note(key, "no_effect", ours, "the actor's own has it")
    return older


def _model(model: Reader, megatron: Reader, by_megatron: bool) -> Tree:
    tree: Tree = {}
    if model.get("path", ours="model.hf"):
        tree["hf"] = model.get("path")
        model.note("path", "carried", "model.hf", "a folder with the weights, which you download beforehand")
    section = megatron.below("override_transformer_config")
    recompute = {name: section.get(f"recompute_{name}", ours=f"model.recompute.{name}") for name in sorted(_RECOMPUTE)}
    if model.flag("enable_gradient_checkpointing", "model.recompute") and not by_megatron:
        tree["recompute"] = {"granularity": "full"}
    if by_megatron:
        model.note("enable_gradient_checkpointing", "no_effect", why="with strategy = 'megatron'")
    if recompute["granularity"] is None:
        for name in _RECOMPUTE - {"granularity"}:
            section.note(f"recompute_{name}", "no_effect", why="without recompute_granularity")
    elif by_megatron:
        others = ("method", "num_layers") if recompute["granularity"] == "full" else ("modules",)
        for name in _RECOMPUTE - {"granularity", *others}:
            section.note(
                f"recompute_{name}", "no_effect", why=f"with recompute_granularity = {recompute['granularity']!r}"
            )
        tree["recompute"] = {name: recompute[name] for name in ("granularity", *others) if recompute[name] is not None}
    if model.flag("use_fused_kernels", "model.fused_head"):
        tree["fused_head"] = True
    coefficient, kind = section.get("moe_aux_loss_coeff", 0), section.get("moe_router_load_balancing_type")
    balances = bool(by_megatron and coefficient and kind == "aux_loss")
    why = "" if balances else "if the model's own router balances by it"
    if kind == "aux_loss":
        section.note("moe_router_load_balancing_type", "equal", "model.aux_loss")
    section.note("moe_aux_loss_coeff", "carried" if balances else "yours", "model.aux_loss", why)
    return tree | ({"aux_loss": coefficient} if balances else {})


def _tokenizer(model: Reader, data: Reader, folder: object) -> Tree:
    path = model.get("tokenizer_path", ours="tokenizer.hf")
    tree: Tree = {"hf": folder if path is None else path}
    variables = data.get("apply_chat_template_kwargs", ours="tokenizer.variables")
    if isinstance(variables, Mapping) and variables:
        tree["variables"] = dict(variables)
        for key in variables:
            data.below("apply_chat_template_kwargs").note(str(key), "carried", f"tokenizer.variables.{key}")
    return tree


def _batch(root: Reader, layout: Tree) -> Tree:
    joint, data = root.below("actor_rollout_ref"), root.below("data")
    actor, packed = joint.below("actor"), joint.below("model").flag("use_remove_padding", "batch.packing")
    rows = actor.get("ppo_micro_batch_size_per_gpu", ours="batch.micro_batch_size")
    of_a_rank, ranks = actor.get("ppo_max_token_len_per_gpu", 16384, "batch.tokens"), layout.get("context", 1)
    if not actor.flag("use_dynamic_bsz", "batch.packing"):
        actor.note("ppo_max_token_len_per_gpu", "no_effect", why="without use_dynamic_bsz")
        batch: Tree = {"packing": True} if packed else {}
        if not rows:
            actor.note(
                "ppo_micro_batch_size_per_gpu",
                "yours",
                "batch.micro_batch_size",
                "verl's null takes another key's size",
            )
        return batch | ({"micro_batch_size": rows} if rows else {})
    tokens = of_a_rank * ranks if isinstance(of_a_rank, int) and isinstance(ranks, int) else of_a_rank
    sizes = [number(data.get(f"max_{part}_length")) or 0 for part in ("prompt", "response")]
    fits = not isinstance(tokens, int) or tokens >= room(int(sum(sizes)), layout, True)
    if fits and "expert" not in layout:
        actor.note("ppo_micro_batch_size_per_gpu", "no_effect", why="with use_dynamic_bsz")
        return {"packing": True, "tokens": tokens}
    why = "data ranks under expert parallelism" if "expert" in layout else "the longest prompt and answer"
    actor.note("ppo_max_token_len_per_gpu", "yours", "batch.tokens", f"packed by sequences here: no room for {why}")
    actor.note("ppo_micro_batch_size_per_gpu", "carried", "batch.micro_batch_size")
    return {"packing": True, "micro_batch_size": rows or 1}


def _sampling(rollout: Reader, data: Reader) -> Tree:
    sampling: Tree = {
        "max_new_tokens": data.get("max_response_length", 512, "sampling.max_new_tokens"),
        "temperature": rollout.get("temperature", 1.0, "sampling.temperature"),
    }
    if rollout.get("top_k", -1, "sampling.top_k") not in (None, -1, 0):
        sampling["top_k"] = rollout.get("top_k")
    if rollout.get("top_p", 1, "sampling.top_p") not in (None, 1):
        sampling["top_p"] = rollout.get("top_p")
    return sampling


def ranks_of(trainer: Reader) -> int:
    """Count the cluster's ranks; 0 if unknown."""
    return int((number(trainer.get("nnodes", 1)) or 1) * (number(trainer.get("n_gpus_per_node")) or 0))


def _sharing(trainer: Reader, megatron: Reader, layout: Tree) -> Tree:
    """Turn on the distributed optimizer if there is more than one data × context rank."""
    name, ranks = "use_distributed_optimizer", ranks_of(trainer)
    size = ranks
    for key in ("tensor", "pipeline"):
        part = layout.get(key, 1)
        size //= part if isinstance(part, int) else 1
    if megatron.flag(name, f"parallel.{name}") and size > 1:
        return {name: True}
    if megatron.flag(name):
        alone = ("no_effect", "there is one data × context rank")
        kind, why = alone if ranks else ("yours", "with several data × context ranks; trainer does not say how many")
        megatron.note(name, kind, f"parallel.{name}", why)
    return {}


def steps_of(trainer: Reader) -> Tree:
    steps = trainer.get("total_training_steps", ours="rl.steps")
    trainer.note("total_epochs", "no_effect" if isinstance(steps, int) else "yours", "rl.steps", _NO_STEPS)
    if not isinstance(steps, int):
        trainer.note("total_training_steps", "yours", "rl.steps", "none is given")
    return {"steps": steps} if isinstance(steps, int) else {}


def optimizer_of(owner: Reader, ours: str, updates: int, steps: object, rate: float = 1e-6) -> Tree:
    """Make the optimizer's section of actor or critic; the schedule ticks once per run step."""
    section = owner.below("optim")
    by_megatron = owner.get("strategy") == "megatron"
    section.note("optimizer", "equal", why="AdamW")
    if not str(section.get("optimizer", "adam")).lower().startswith("adam"):
        section.leave("optimizer", "AdamW")
    numbers: Tree = {"lr": rate, "weight_decay": 0.01, "clip": 1.0, "betas": [0.9, 0.999]}
    numbers |= optimizer(section, ours, {"lr": "lr", "weight_decay": "weight_decay", "clip": "clip_grad", "eps": "eps"})
    if "grad_clip" in owner.section and not by_megatron:
        numbers |= {"clip": number(owner.get("grad_clip", ours=f"{ours}.clip")) or None}
        section.note("clip_grad", "no_effect", why="grad_clip has it")
    elif by_megatron:
        default = "" if "clip_grad" in section.section else ", here its default 1.0"
        owner.note("grad_clip", "no_effect", why=f"the Megatron actor reads optim.clip_grad{default}")
    betas = section.get("betas", ours=f"{ours}.betas")
    if isinstance(betas, list):
        numbers["betas"] = [number(beta) for beta in betas]
    return numbers | _warmup(section, ours, updates, steps) | _decay(section, ours, numbers["lr"])


def _warmup(section: Reader, ours: str, updates: int, steps: object) -> Tree:
    warmup, share = number(section.get("lr_warmup_steps")), number(section.get("lr_warmup_steps_ratio")) or 0.0
    first = number(section.get("lr_warmup_init")) or 0.0
    section.note("lr_warmup_init", "unsupported" if first else "equal", why="the warm-up begins at lr / steps")
    by_steps, by_share = "lr_warmup_steps", "lr_warmup_steps_ratio"
    if warmup is not None and warmup > 0:
        section.note(by_steps, "carried", f"{ours}.warmup_steps")
        section.note(by_share, "no_effect", why="with lr_warmup_steps")
        return {"warmup_steps": int(warmup) * updates}
    section.note(by_steps, "equal", f"{ours}.warmup_steps", "lr_warmup_steps_ratio has it")
    if not share:
        section.note(by_share, "equal", f"{ours}.warmup_steps", "no warm-up")
    elif isinstance(steps, int):
        section.note(by_share, "carried", f"{ours}.warmup_steps")
        return {"warmup_steps": int(share * steps) * updates}
    else:
        section.leave(by_share, "this fraction of rl.steps × rl.updates", f"{ours}.warmup_steps")
    return {}


def _decay(section: Reader, ours: str, rate: object) -> Tree:
    names = ("lr_scheduler_type", "lr_decay_style", "warmup_style")
    style = next((str(section.get(name)) for name in names if section.get(name) is not None), "constant")
    floors = number(section.get("min_lr_ratio")) or 0.0, number(section.get("min_lr")) or 0.0
    for name in names:
        section.note(name, "equal", f"{ours}.schedule", "constant" if section.get(name) else "not given")
        if section.get(name) == "cosine":
            section.note(name, "carried", f"{ours}.schedule", "it ends with the run")
        elif section.get(name) not in (None, "constant"):
            section.leave(name, "the rate is constant or a cosine here", f"{ours}.schedule")
    for name in ("min_lr_ratio", "min_lr", "num_cycles", "lr_decay_steps"):
        section.note(name, "no_effect", why="with a constant rate")
    if style != "cosine":
        return {}
    for name in ("min_lr_ratio", "min_lr"):
        section.note(name, "carried", f"{ours}.final_fraction")
    section.note(
        "num_cycles", "equal" if section.get("num_cycles") in (None, 0.5) else "unsupported", why="half a cosine"
    )
    section.note("lr_decay_steps", "yours", "rl.steps", "the cosine here ends with the run")
    return cosine(floors[0] * rate if floors[0] and isinstance(rate, int | float) else floors[1], rate)


def _run(trainer: Reader) -> Tree:
    tree: Tree = {}
    folder, every = (
        trainer.get("default_local_dir", ours="run.dir"),
        trainer.get("save_freq", ours="run.checkpoint_every"),
    )
    keep, resume = trainer.get("max_actor_ckpt_to_keep"), trainer.get("resume_mode", "auto", "run.resume")
    if isinstance(folder, str):
        tree["dir"] = folder
    if isinstance(every, int) and every > 0:
        tree["checkpoint_every"] = every
    trainer.note("max_actor_ckpt_to_keep", "yours", "run.keep_checkpoints", "all of them there, the newest two here")
    if isinstance(keep, int):
        tree["keep_checkpoints"] = keep
        trainer.note("max_actor_ckpt_to_keep", "carried", "run.keep_checkpoints")
    if resume == "disable":
        tree["resume"] = "never"
    elif resume not in (None, "auto"):
        trainer.leave("resume_mode", "a folder of weights to begin with", "run.init_from")
    if resume != "resume_path":
        trainer.note("resume_from_path", "no_effect", why="without resume_mode = 'resume_path'")
    return tree


def _evaluation(trainer: Reader, sampled: Reader) -> Tree:
    every = number(trainer.get("test_freq", ours="evaluation.every")) or 0
    samples, shown = (
        sampled.get("n", 1, "evaluation.samples"),
        trainer.get("log_val_generations", ours="evaluation.show"),
    )
    before = trainer.flag("val_before_train")
    on = every > 0 or before or trainer.flag("val_only")
    trainer.note(
        "val_before_train", "equal" if before or not on else "unsupported", "evaluation", "before the run and after"
    )
    for key in ("temperature", "top_k", "top_p", "do_sample"):
        sampled.note(key, "unsupported", "sampling", "an evaluation samples as the training does")
    if not on:
        sampled.off("without an evaluation")
        trainer.note("log_val_generations", "no_effect", why="without an evaluation")
        return {}
    tree: Tree = {"every": max(int(every), 0)} | ({"samples": samples} if samples != 1 else {})
    return {"evaluation": tree | ({"show": shown} if shown else {})}


def _data(data: Reader, trainer: Reader) -> Tree:
    on = (number(trainer.get("test_freq")) or 0) > 0 or trainer.flag("val_before_train")
    files: Tree = {}
    for key, target in (("train_files", "train"), ("val_files", "held_out")):
        value = data.get(key, ours=f"data.{target}")
        if value and (target == "train" or on):
            files[target] = value
        elif value:
            data.note(key, "no_effect", why="without an evaluation")
    prompt = data.get("prompt_key", "prompt", "data.columns.prompt")
    if files:
        files["columns"] = {"prompt": prompt, "answer": "reward_model.ground_truth"}
    return {"data": files} if files else {}
