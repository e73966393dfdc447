"""Sections around the loss from a NeMo-RL config: model, layout, batch, sampling, checkpoints, data."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_rl.hosts.ported import MEGATRON_SIZES, Reader, Tree, layout_of, number, room, room_sum

_DTENSOR_SIZES = {
    "tensor": "tensor_parallel_size", "context": "context_parallel_size", "expert": "expert_parallel_size",
}  # fmt: skip
_DTYPES = {name: name for name in ("bfloat16", "float32")} | {"bf16": "bfloat16", "fp32": "float32"}
_OF_DATA = {"preference": "data.pairs", "sft": "data.examples"}


def shape_of(root: Reader, objective: str) -> Tree:
    """Make the sections model, tokenizer, parallel, batch and sampling."""
    policy = root.below("policy")
    megatron, dtensor = policy.below("megatron_cfg"), policy.below("dtensor_cfg")
    by_megatron = megatron.flag("enabled", "parallel")
    ours: Tree = {}
    model: Tree = {}
    if policy.get("model_name", ours="model.hf"):
        model["hf"] = policy.get("model_name")
        policy.note("model_name", "carried", "model.hf", "a folder with the weights, which you download beforehand")
    layouts = layout_of(megatron, MEGATRON_SIZES), layout_of(dtensor, _DTENSOR_SIZES)
    layout = layouts[0] if by_megatron else layouts[1]
    dtensor.flag("enabled", "parallel")
    if not by_megatron:
        megatron.off("Megatron is off")
        layout = {name: size for name, size in layout.items() if size is True or size != 1}  # True equals 1
    if by_megatron or not dtensor.flag("enabled"):
        dtensor.off("dtensor is off" if not dtensor.flag("enabled") else "with policy.megatron_cfg.enabled")
    recomputed = _recompute(megatron, True), _recompute(dtensor, False)
    model |= recomputed[0] if by_megatron else recomputed[1]
    if megatron.flag("use_fused_linear_logprobs", "model.fused_head") and by_megatron:
        model["fused_head"] = True
    coefficient = number(megatron.get("moe_aux_loss_coeff", 0, "model.aux_loss"))
    if by_megatron and coefficient and megatron.get("moe_router_load_balancing_type") == "aux_loss":
        model["aux_loss"] = coefficient
    ours["batch"] = _batch(policy, layout, objective)
    sampling = _sampling(policy.below("generation"))
    model |= _positions(policy, layout, ours["batch"], sampling)
    if model:
        ours["model"] = model
    tokenizer = _tokenizer(policy.below("tokenizer"))
    if tokenizer:
        ours["tokenizer"] = tokenizer
    sharing = _sharing(root, megatron, layout)
    if layout or by_megatron:
        ours["parallel"] = layout | (sharing if by_megatron else {})
    if sampling:
        ours["sampling"] = sampling
    return ours


def _recompute(section: Reader, by_megatron: bool) -> Tree:
    on = section.flag("activation_checkpointing", "model.recompute")
    if not by_megatron:
        return {"recompute": {"granularity": "full"}} if on else {}
    granularity = section.get("recompute_granularity", "full", "model.recompute.granularity")
    modules = section.get("recompute_modules", ours="model.recompute.modules")
    if not on:
        for key in ("recompute_granularity", "recompute_modules"):
            section.note(key, "no_effect", why="without activation_checkpointing")
        return {}
    selective = granularity == "selective"
    recompute: Tree = {"granularity": "selective" if selective else "full"}
    if selective and modules:
        recompute["modules"] = modules
    elif modules:
        section.note("recompute_modules", "no_effect", why="without recompute_granularity: selective")
    return {"recompute": recompute}


def _batch(policy: Reader, layout: Tree, objective: str) -> Tree:
    packing = policy.below("sequence_packing")
    batch: Tree = {"packing": True} if packing.flag("enabled", "batch.packing") else {}
    rows, tokens = policy.get("train_micro_batch_size"), packing.get("train_mb_tokens", ours="batch.tokens")
    longest = policy.below("generation").get("max_new_tokens", 0)
    fits = isinstance(tokens, int) and isinstance(longest, int) and tokens > longest
    if batch and fits and "expert" not in layout:
        policy.note("train_micro_batch_size", "no_effect", why="with sequence_packing: batch.tokens fills a row")
        return batch | {"tokens": tokens}
    if batch:
        why = "data ranks under expert parallelism" if "expert" in layout else "a prompt and its longest answer"
        packing.note("train_mb_tokens", "yours", "batch.tokens", f"packed by sequences here: no room for {why}")
    else:
        packing.off("without policy.sequence_packing.enabled")
    if isinstance(rows, int):
        batch["micro_batch_size"] = 2 * rows if objective == "preference" else rows
        why = "a pair is two sequences" if objective == "preference" else ""
        policy.note("train_micro_batch_size", "carried", "batch.micro_batch_size", why)
    else:
        policy.note("train_micro_batch_size", "yours", "batch.micro_batch_size", "the config has no number for it")
    return batch


def _sampling(generation: Reader) -> Tree:
    names = ("max_new_tokens", "temperature", "top_k", "top_p")
    values = {key: generation.get(key, ours=f"sampling.{key}") for key in names}
    sampling = {key: value for key, value in values.items() if value is not None}
    if sampling.get("top_p") == 1.0:
        sampling.pop("top_p")
    if sampling.get("top_k") in (-1, 0):
        sampling.pop("top_k")
    for key in ("stop_strings", "stop_token_ids"):
        generation.note(key, "equal", why="the tokenizer's end tokens")
        if generation.get(key):
            generation.leave(key, "an answer ends on the tokenizer's end tokens alone")
    for key in names[1:]:
        val = f"val_{key}"
        same = generation.get(val) in (None, values[key])
        why = "an evaluation samples as the training does" if same else "an evaluation samples as `sampling` says"
        generation.note(val, "equal" if same else "unsupported", f"sampling.{key}", why)
    return sampling


def _positions(policy: Reader, layout: Tree, batch: object, sampling: Tree) -> Tree:
    longest, new = policy.get("max_total_sequence_length"), sampling.get("max_new_tokens", 0)
    if not isinstance(longest, int) or not isinstance(new, int):
        policy.note("max_total_sequence_length", "yours", "model.max_positions")
        return {}
    if longest <= new:
        why = "answers of max_new_tokens leave a prompt no room in it: the model's own limit holds"
        policy.note("max_total_sequence_length", "yours", "model.max_positions", why)
        return {}
    packing = isinstance(batch, Mapping) and "packing" in batch
    policy.note("max_total_sequence_length", "carried", "model.max_positions", room_sum(longest, layout, packing))
    return {"max_positions": room(longest, layout, packing)}


def _tokenizer(section: Reader) -> Tree:
    tokenizer: Tree = {}
    if section.get("name", ours="tokenizer.hf"):
        tokenizer["hf"] = section.get("name")
        section.note("name", "carried", "tokenizer.hf", "a folder, as of model.hf")
    template = section.get("chat_template", "default", "tokenizer.chat")
    variables = section.get("chat_template_kwargs", ours="tokenizer.variables")
    if template is None:
        tokenizer["chat"] = False
    elif template != "default":
        section.note("chat_template", "yours", "tokenizer.hf", "write it to the folder's chat_template.jinja")
    if isinstance(variables, Mapping) and variables and template is not None:
        tokenizer["variables"] = dict(variables)
        for key in variables:
            section.below("chat_template_kwargs").note(str(key), "carried", f"tokenizer.variables.{key}")
    return tokenizer


def ranks_of(root: Reader) -> int:
    """Count the cluster's training ranks; 0 if unknown."""
    cluster, colocated = root.below("cluster"), root.below("policy").below("generation").below("colocated")
    nodes, gpus = number(cluster.get("num_nodes", 1)) or 1, number(cluster.get("gpus_per_node")) or 0
    size = nodes * gpus
    if colocated.section.get("enabled") is False:
        resources = colocated.below("resources")
        size -= (number(resources.get("num_nodes")) or 1) * (number(resources.get("gpus_per_node")) or gpus)
    return max(int(size), 0)


def _sharing(root: Reader, megatron: Reader, layout: Tree) -> Tree:
    size = ranks = ranks_of(root)
    for name in ("tensor", "pipeline"):
        size //= number(layout.get(name, 1)) or 1  # type: ignore[assignment]
    sharing: Tree = {}
    for section, name in (
        (megatron.below("optimizer"), "use_distributed_optimizer"),
        (megatron.below("distributed_data_parallel_config"), "overlap_grad_reduce"),
    ):
        if section.flag(name, f"parallel.{name}") and size > 1:
            sharing[name] = True
        elif section.flag(name):
            alone = ("no_effect", "there is one data × context rank")
            kind, why = (
                alone if ranks else ("yours", "with several data × context ranks; cluster does not say how many")
            )
            section.note(name, kind, f"parallel.{name}", why)
    return sharing


def run_of(root: Reader, name: str, objective: str) -> Tree:
    """Make the sections run, evaluation and data, and the steps of the main one."""
    run, checkpoints = root.below(name), root.below("checkpointing")
    tree: Tree = {}
    for key, ours in (
        ("checkpoint_dir", "dir"),
        ("save_period", "checkpoint_every"),
        ("keep_top_k", "keep_checkpoints"),
    ):
        value = checkpoints.get(key, ours=f"run.{ours}")
        if value is not None:
            tree[ours] = value
    if "enabled" in checkpoints.section and not checkpoints.flag("enabled"):
        tree = {key: value for key, value in tree.items() if key == "dir"}
        checkpoints.note("enabled", "unsupported", why="the last step is always saved")
        for key in ("save_period", "keep_top_k", "metric_name", "higher_is_better"):
            checkpoints.note(key, "no_effect", why="without checkpointing.enabled")
    else:
        checkpoints.note("enabled", "equal", why="on")
        fate = ("carried", "the newest stay here, not the best")
        if "keep_checkpoints" not in tree:
            fate = ("yours", "all of them there, the newest two here")
        checkpoints.note("keep_top_k", fate[0], "run.keep_checkpoints", fate[1])
    if isinstance(seed := run.get("seed", ours="run.seed"), int):
        tree["seed"] = seed
    policy = root.below("policy")
    precision = policy.get("precision", ours="run.dtype")
    if precision in _DTYPES:
        tree["dtype"] = _DTYPES[str(precision)]
    elif precision is not None:
        policy.leave("precision", "bfloat16 or float32", "run.dtype")
    sections: Tree = {"run": tree} if tree else {}
    held_out = objective in ("rl", "distillation") and _evaluation(run, root.below("logger"), sections)
    source = "sft" if objective == "distillation" and "teachers" in root.section else objective
    return sections | _data(root.below("data"), source, held_out)


def steps_of(run: Reader, objective: str) -> Tree:
    steps = run.get("max_num_steps", ours=f"{objective}.steps")
    if isinstance(steps, int) and steps > 0:
        epochs, ours = run.get("max_num_epochs"), f"{objective}.steps"
        shorter = "the epoch is shorter" if epochs == 1 else "the epochs are shorter"
        first = f"NeMo-RL stops at max_num_steps or after {epochs} epoch{'s' * (epochs != 1)}, whichever is first"
        run.note("max_num_epochs", "yours", ours, f"{first}; lower {ours} if {shorter}")
        return {"steps": steps}
    run.note("max_num_steps", "yours", f"{objective}.steps", "no number of steps is given")
    run.note("max_num_epochs", "yours", f"{objective}.steps", "epochs × records / records a step")
    return {}


def _evaluation(run: Reader, logger: Reader, ours: Tree) -> bool:
    every = number(run.get("val_period", ours="evaluation.every")) or 0
    samples = run.get("val_num_generations_per_prompt", 1, "evaluation.samples")
    shown = logger.get("num_val_samples_to_print", 0, "evaluation.show")
    on = every > 0 or run.flag("val_at_start") or run.flag("val_at_end")
    for key in ("val_at_start", "val_at_end"):
        fate = "equal" if run.flag(key) or not on else "unsupported"
        why = "off, as here" if not on else "an evaluation is before the run and after it, too"
        run.note(key, fate, "evaluation", why)
    if on:
        ours["evaluation"] = {"every": max(int(every), 0)} | ({"samples": samples} if samples != 1 else {})
        ours["evaluation"] |= {"show": shown} if shown else {}  # type: ignore[operator]
    else:
        run.note("max_val_samples", "no_effect", why="without an evaluation")
        run.note("val_num_generations_per_prompt", "no_effect", why="without an evaluation")
        logger.note("num_val_samples_to_print", "no_effect", why="without an evaluation")
    return on


def _data(data: Reader, objective: str, held_out: bool) -> Tree:
    """Carry file paths over; named data sets are left to the user."""
    files: Tree = {}
    records = _OF_DATA.get(objective, "data.train")
    data.note("dataset_name", "yours", records, "a file of JSONL or Parquet; see docs/data.md")
    for key in data.below("default").section:
        data.below("default").note(str(key), "yours", records, "write its text into the records")
    for source, target in (("train", records), ("validation", "data.held_out")):
        if isinstance(data.section.get(source), list):
            data.note(source, "yours", target, "a file of JSONL or Parquet for each; see docs/data.md")
            continue
        section = data.below(source)
        if source == "validation" and not held_out:
            section.off("an evaluation here is of rewards, in RL and distillation, if it is on")
        path, name = section.get("data_path"), section.get("dataset_name")
        section.note("dataset_name", "yours", target, "a file of JSONL or Parquet; see docs/data.md")
        if isinstance(path, str) and "${" not in path and name != "NemoGymDataset":
            section.note("dataset_name", "no_effect", why="data_path has it")
            section.note("data_path", "carried", target, "columns with other names: data.columns")
            if source == "train" or held_out:
                files[target.removeprefix("data.")] = path
        else:
            section.note("data_path", "yours", target, "a file of JSONL or Parquet; see docs/data.md")
    return {"data": files} if files else {}
