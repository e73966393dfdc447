"""A config of NeMo-RL (its source of August 2026) in our keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from parallel_rl.config.strict import configure
from parallel_rl.hosts.nemo_rl.keys import TABLE
from parallel_rl.hosts.nemo_rl.port_run import ranks_of, run_of, shape_of, steps_of
from parallel_rl.hosts.nemo_rl.port_sections import advantages_of, optimizer_of
from parallel_rl.hosts.ported import OF_DIFFERENT_REWARDS, Ported, Reader, Tree, ported, reader_of
from parallel_rl.losses.clipped_pg import ClippedPGLossConfig
from parallel_rl.losses.distillation import DistillationLossConfig
from parallel_rl.losses.preference import DPOLossConfig

_CLIPPED = {field.name: field.default for field in fields(ClippedPGLossConfig)}
_TIS = "truncated_importance_sampling_"
_DPO = {
    "reference_policy_kl_penalty": 0.05, "preference_loss_weight": 1.0, "sft_loss_weight": 0.0,
    "preference_average_log_probs": False, "sft_average_log_probs": False,
}  # fmt: skip
_NOT_HERE = (
    "overlong_filtering", "reward_scaling", "seq_logprob_error_threshold", "invalid_tool_call_advantage",
    "malformed_thinking_advantage", "async_grpo", "async_ppo", "batch_multiplier",
)  # fmt: skip


_OBJECTIVES = ("grpo", "ppo", "dpo", "sft", "rm", "distillation")
SECTIONS = f"NeMo-RL (policy, and loss_fn or one of {', '.join(_OBJECTIVES)})"


def recognises(config: Mapping[str, object]) -> bool:
    """Return whether a config is NeMo-RL's, by its sections."""
    objective = "policy" in config and any(name in config for name in _OBJECTIVES)
    return objective or "loss_fn" in config or {"eval", "generation"} <= config.keys()


def convert(config: Mapping[str, object]) -> Ported:
    """Convert a config of NeMo-RL, see `options_of`.

    >>> loss = {"ratio_clip_max": 0.28, "force_on_policy_ratio": True}
    >>> convert({"loss_fn": loss}).config["rl"]["loss"]["options"]["force_on_policy_ratio"]
    True
    """
    root = reader_of(config)
    name, objective = _objective(root)
    if not objective:
        return ported("NeMo-RL", config, {}, root, TABLE)
    section = {"rl": _rl, "preference": _preference, "sft": _sft, "distillation": _distillation}[objective](root, name)
    updates = section.get("updates", 1)
    section |= steps_of(root.below(name), objective)
    rates = optimizer_of(root.below("policy"), f"{objective}.optimizer", updates if isinstance(updates, int) else 1)
    ours: Tree = {objective: section | ({"optimizer": rates} if rates else {})}
    ours |= shape_of(root, objective) | run_of(root, name, objective)
    run = root.below("sft")
    run.note("only_unmask_final", "equal", "data.mask_history", "every answer is learned")
    if run.flag("only_unmask_final"):
        why = "set data.mask_history: true, which learns the last answer alone, too"
        run.leave("only_unmask_final", why, "data.mask_history")
    return ported("NeMo-RL", config, ours, root, TABLE, ranks_of(root))


def _objective(root: Reader) -> tuple[str, str]:
    """Find NeMo-RL's section that drives the run, and our main section; "" for an evaluation."""
    config, loss = root.section, root.below("loss_fn").section
    if "dpo" in config or "rm" in config:
        return ("dpo" if "dpo" in config else "rm"), "preference"
    if "eval" in config:
        return "eval", ""
    if "distillation" in config or "kl_type" in loss or "gold_loss" in loss:
        return "distillation", "distillation"
    if loss or "sft" not in config:
        return next((name for name in ("grpo", "ppo") if name in config), "grpo"), "rl"
    return "sft", "sft"


def clipped_pg(loss: Reader) -> Tree:
    """Make the options of our clipped_pg, without those that others disable."""
    read = {name: loss.get(name, ours=f"rl.loss.options.{name}") for name in _CLIPPED}
    present = {name: value for name, value in read.items() if name in loss.section}

    def drop(names: tuple[str, ...], why: str) -> None:
        for name in names:
            if name in present and present[name] not in (_CLIPPED[name], None, False):
                loss.drop(name, why)
            elif name in present:
                loss.note(name, "no_effect", why=why)
            present.pop(name, None)

    def on(name: str) -> bool:
        return bool(present.get(name, _CLIPPED[name]))

    if on("force_on_policy_ratio"):
        drop(("disable_ppo_ratio",), "with force_on_policy_ratio")
    if on("force_on_policy_ratio") or on("disable_ppo_ratio"):
        drop(("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "use_cispo"), "without a ratio of two policies")
    if on("use_cispo"):
        drop(("ratio_clip_c",), "with use_cispo")
    if not on("reference_policy_kl_penalty") or on("use_kl_in_reward"):
        why = "without a KL in the loss"
        drop(("use_on_policy_kl_approximation", "kl_input_clamp_value", "kl_output_clamp_value"), why)
    if not on("reference_policy_kl_penalty"):
        drop(("use_kl_in_reward", "reference_policy_kl_type"), "with reference_policy_kl_penalty = 0")
    if not on("use_importance_sampling_correction"):
        drop(
            tuple(_TIS + name for name in ("type", "ratio", "ratio_min")), "without use_importance_sampling_correction"
        )
    elif present.get(f"{_TIS}type") is None and present.get(f"{_TIS}ratio") is not None:
        present[f"{_TIS}type"] = "tis"  # releases before 0.6
    if present.get(f"{_TIS}type") is None:
        drop((f"{_TIS}ratio_min",), f"without {_TIS}type")
    options = {name: value for name, value in present.items() if value != _CLIPPED[name]}
    configure(ClippedPGLossConfig, options, loss.where)
    return options


def _rl(root: Reader, name: str) -> Tree:
    loss = root.below("loss_fn")
    run, policy = root.below(name), root.below("policy")
    options = clipped_pg(loss)
    rl: Tree = {"loss": {"name": "clipped_pg", "options": options}}
    prompts = run.get("num_prompts_per_step", ours="rl.prompts")
    group = run.get("num_generations_per_prompt", ours="rl.group_size")
    if isinstance(prompts, int) and isinstance(group, int):
        rl |= {"prompts": prompts, "group_size": group}
        batch = policy.get("train_global_batch_size", ours="rl.updates")
        if isinstance(batch, int) and batch > 0 and batch != prompts * group:
            updates, rest = divmod(prompts * group, batch)
            if updates and not rest and prompts % updates == 0:
                rl["updates"] = updates
            else:
                why = f"{prompts} × {group} samples a step; each of rl.updates has equally many whole prompts"
                policy.leave("train_global_batch_size", why, "rl.updates")
    advantages = advantages_of(run, name)
    if options.get("use_kl_in_reward"):
        rl |= _kl_in_reward(loss, options, advantages)
    penalty = options.get("reference_policy_kl_penalty", _CLIPPED["reference_policy_kl_penalty"])
    rl["advantages"] = advantages
    if advantages["name"] == "gae":
        updates_a_step = rl.get("updates", 1)
        rl["critic"] = _critic(root, run, updates_a_step if isinstance(updates_a_step, int) else 1)
    run.note("ppo_epochs", "equal", why="one")
    if run.get("ppo_epochs", 1) != 1:
        run.leave("ppo_epochs", "the samples of a step are read once here")
    rounds = run.get("dynamic_sampling_max_gen_batches", 10, "rl.dynamic_sampling.max_rounds")
    if run.flag("use_dynamic_sampling", "rl.dynamic_sampling"):
        rl["dynamic_sampling"] = {"max_rounds": max(int(str(rounds)), 2)}
        run.differ(OF_DIFFERENT_REWARDS.format("use_dynamic_sampling"))
    else:
        run.note("dynamic_sampling_max_gen_batches", "no_effect", why="without use_dynamic_sampling")
    rl |= _overlong(run.below("reward_shaping"))
    for key in _NOT_HERE:
        value = run.get(key)
        if value not in (None, False, 1) and not (isinstance(value, Mapping) and not value.get("enabled")):
            run.leave(key)
    if penalty and not options.get("use_kl_in_reward"):
        options["reference_policy_kl_penalty"] = penalty  # both defaults, written for the user to change
        root.differ(
            f"loss_fn.reference_policy_kl_penalty = {penalty}: a KL to the reference, and a copy of it in memory; the "
            "loss policy of our recipes has no KL by default"
        )
    return rl


def _overlong(shaping: Reader) -> Tree:
    names = {
        "buffer": "overlong_buffer_length",
        "max_length": "max_response_length",
        "factor": "overlong_buffer_penalty",
    }
    options = {name: shaping.get(key, ours=f"rl.overlong.{name}") for name, key in names.items()}
    on = shaping.flag("enabled", "rl.overlong")
    coefficient = shaping.get("stop_properly_penalty_coef", ours="rl.overlong.coefficient")
    if not on or (coefficient is None and not options["buffer"]):
        shaping.off("without reward_shaping.enabled")
        return {}
    if coefficient is not None:
        for key in names.values():
            if shaping.get(key) is not None:
                shaping.drop(key, "with stop_properly_penalty_coef")
        return {"overlong": {"name": "stop_properly", "coefficient": coefficient}}
    shaping.differ(
        f"{shaping.where}: its penalty keeps growing beyond the longest response (bounded: false); ours stops"
    )
    options["factor"] = 1.0 if options["factor"] is None else options["factor"]
    return {"overlong": {"name": "dapo", "bounded": False, **options}}


def _kl_in_reward(loss: Reader, options: Tree, advantages: Tree) -> Tree:
    """Make the options of the section rl; the coefficient joins the estimator's."""
    kind = options.get("reference_policy_kl_type", _CLIPPED["reference_policy_kl_type"])
    if advantages["name"] in ("grpo", "gdpo"):
        loss.drop("use_kl_in_reward", f"with {advantages['name']}, which reads no KL there: the run has none at all")
        options["reference_policy_kl_penalty"] = 0.0
        for key in ("use_kl_in_reward", "reference_policy_kl_type"):
            options.pop(key, None)
        return {}
    advantages["kl_coefficient"] = options.get("reference_policy_kl_penalty", _CLIPPED["reference_policy_kl_penalty"])
    ours = "low_var_kl; ours of k3 are not" if kind == "k3" else f"ours of {kind} are not"
    loss.differ(f"loss_fn.use_kl_in_reward: log-ratios are clamped into ±20 and estimates into ±10: {ours}")
    if advantages["name"] != "gae":
        advantages["kl_form"] = "token"
        loss.differ(
            "loss_fn.use_kl_in_reward: each token pays for its own KL (kl_form token); ours for all that follow, too"
        )
    return {"reward_kl": "low_var_kl" if kind == "k3" else kind}


def _critic(root: Reader, run: Reader, updates: int) -> Tree:
    value, loss = root.below("value"), root.below("value_loss_fn")
    values = {
        "scale": loss.get("scale", ours="rl.critic.loss.options.scale"),
        "cliprange": loss.get("cliprange", ours="rl.critic.loss.options.cliprange") or None,  # 0 is off in NeMo-RL
    }
    options = {key: x for key, x in values.items() if x is not None}
    rates = optimizer_of(value, "rl.critic.optimizer", updates)
    if value.get("model_name") not in (None, root.below("policy").get("model_name")):
        value.leave("model_name", "a critic starts as a copy of the policy's trunk")
    critic: Tree = {"loss": {"name": "value", "options": options}, "optimizer": rates or {"lr": 1e-5}}
    warmup = run.get("policy_training_start_step", 0, "rl.critic.warmup_steps")
    return critic | ({"warmup_steps": warmup} if warmup else {})


def _sft(root: Reader, name: str) -> Tree:
    rows = root.below("policy").get("train_global_batch_size", ours="sft.batch_size")
    return {"loss": {"name": "nll"}, **({"batch_size": rows} if isinstance(rows, int) else {})}


def _preference(root: Reader, name: str) -> Tree:
    """Make the section of DPO, or of a reward model of pairs (Bradley-Terry)."""
    pairs = root.below("policy").get("train_global_batch_size", ours="preference.pairs")
    sizes: Tree = {"pairs": pairs} if isinstance(pairs, int) else {}
    if name == "rm":
        return {"loss": {"name": "preference"}, **sizes}
    dpo = root.below("dpo")
    values = {key: dpo.get(key, default, f"preference.loss.options.{key}") for key, default in _DPO.items()}
    if values["sft_average_log_probs"] and not values["sft_loss_weight"]:
        dpo.drop("sft_average_log_probs", "with sft_loss_weight = 0")
        values["sft_average_log_probs"] = False
    if values["reference_policy_kl_penalty"] == 0:
        dpo.drop("preference_loss_weight", "with reference_policy_kl_penalty = 0: the term is log 2")
        values |= {"preference_loss_weight": 0.0, "reference_policy_kl_penalty": _DPO["reference_policy_kl_penalty"]}
    options = {name: value for name, value in values.items() if value != _DPO[name]}
    configure(DPOLossConfig, options, dpo.where)
    return {"loss": {"name": "dpo", "options": options}, **sizes}


def _distillation(root: Reader, name: str) -> Tree:
    """Make a top-k distillation on completions of the student."""
    loss, run = root.below("loss_fn"), root.below("distillation")
    between_tokenizers = "gold_loss" in loss.section
    if between_tokenizers:
        root.leave(
            "loss_fn", "a loss between tokenizers; set one of this trainer, and a teacher of the student's tokenizer"
        )
    names = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
    read = {key: loss.get(key, ours=f"distillation.loss.options.{key}") for key in names}
    options = {key: value for key, value in read.items() if key in loss.section}
    if options.get("kl_type", "mixed") != "mixed" and options.pop("mixed_kl_weight", None) is not None:
        loss.drop("mixed_kl_weight", f"with kl_type = {options['kl_type']!r}")
    configure(DistillationLossConfig, options, loss.where)
    rows = root.below("policy").get("train_global_batch_size", ours="distillation.batch_size")
    sizes = {"top_k": run.get("topk_logits_k", ours="distillation.top_k"), "batch_size": rows}
    run.note("num_generations_per_prompt", "equal", why="one")
    if run.get("num_generations_per_prompt", 1) != 1:
        run.leave("num_generations_per_prompt", "each prompt is completed once here")
    run.note("num_prompts_per_step", "equal", "distillation.batch_size", "as policy.train_global_batch_size")
    if run.get("num_prompts_per_step", rows) != rows:
        why = "a step is one update here, on batch_size prompts: there are more of them"
        run.note("num_prompts_per_step", "yours", "distillation.steps", why)
    teacher = root.below("teacher").get("model_name", ours="distillation.teacher")
    section: Tree = {
        **({} if between_tokenizers else {"rows": "policy"}),
        **{key: size for key, size in sizes.items() if isinstance(size, int)},
    }
    section |= {"teacher": teacher} if isinstance(teacher, str) else {}
    if between_tokenizers:
        return section | ({"loss": {"name": "distillation"}} if "top_k" in section else {})
    return section | {"loss": {"name": "distillation", "options": options}}
