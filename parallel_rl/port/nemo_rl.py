"""A config of NeMo-RL (its source of August 2026) in our keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from parallel_rl.config.strict import configure
from parallel_rl.losses.clipped_pg_config import ClippedPGLossConfig
from parallel_rl.losses.distillation import DistillationLossConfig
from parallel_rl.losses.preference import DPOLossConfig
from parallel_rl.port import nemo_rl_keys
from parallel_rl.port.ported import OF_DIFFERENT_REWARDS, Ported, Reader, Tree, layout_of

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


def from_nemo_rl(config: Mapping[str, object]) -> Ported:
    """See `options_of`.

    >>> loss = {"ratio_clip_max": 0.28, "force_on_policy_ratio": True}
    >>> from_nemo_rl({"loss_fn": loss}).config["rl"]["loss"]["options"]["force_on_policy_ratio"]
    True
    """
    said: dict[str, list[str]] = {"dropped": [], "differs": [], "left": [], "unknown": []}
    root = Reader("", config, said)
    ours: Tree = {}
    loss = root.below("loss_fn").section
    if "dpo" in config:
        ours["preference"] = _preference(root.below("dpo"), root)
    elif "gold_loss" in loss or not (loss or config.keys() & {"grpo", "ppo", "sft", "distillation"}):
        root.leave("loss_fn" if loss else "rm", "this port carries over RL, DPO, SFT and top-k distillation")
    elif "distillation" in config or "kl_type" in loss:
        ours["distillation"] = _distillation(root)
    elif loss or "sft" not in config:
        ours["rl"] = _rl(root)
    else:
        rows = root.below("policy").get("train_global_batch_size")
        ours["sft"] = {"loss": {"name": "nll"}, **({"batch_size": rows} if isinstance(rows, int) else {})}
    ours |= _shape(root)
    for name, known in (
        ("sft", nemo_rl_keys.RUN),
        ("rm", nemo_rl_keys.RUN),
        ("distillation", nemo_rl_keys.DISTILLATION),
    ):
        run = root.below(name)
        if run.flag("only_unmask_final"):
            run.leave("only_unmask_final", "set data.mask_history: true, which learns the last answer alone, too")
        run.close(known)
    root.close(nemo_rl_keys.ROOT)
    return Ported("NeMo-RL", ours, **{kind: tuple(lines) for kind, lines in said.items()})


def clipped_pg(loss: Reader) -> Tree:
    """Options of our clipped_pg, without those that the others leave without effect."""
    given = {name: loss.get(name) for name in _CLIPPED if name in loss.section}
    loss.close(tuple(_CLIPPED))

    def drop(names: tuple[str, ...], why: str) -> None:
        for name in names:
            if name in given and given[name] not in (_CLIPPED[name], None, False):
                loss.drop(name, why)
            given.pop(name, None)

    def on(name: str) -> bool:
        return bool(given.get(name, _CLIPPED[name]))

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
    elif given.get(f"{_TIS}type") is None and given.get(f"{_TIS}ratio") is not None:
        given[f"{_TIS}type"] = "tis"  # as releases before 0.6 have it
    if given.get(f"{_TIS}type") is None:
        drop((f"{_TIS}ratio_min",), f"without {_TIS}type")
    options = {name: value for name, value in given.items() if value != _CLIPPED[name]}
    configure(ClippedPGLossConfig, options, loss.where)
    return options


def _rl(root: Reader) -> Tree:
    loss = root.below("loss_fn")
    name = next((name for name in ("grpo", "ppo") if name in root.section), "grpo")
    run, policy = root.below(name), root.below("policy")
    options = clipped_pg(loss)
    rl: Tree = {"loss": {"name": "clipped_pg", "options": options}}
    prompts, group = run.get("num_prompts_per_step"), run.get("num_generations_per_prompt")
    if isinstance(prompts, int) and isinstance(group, int):
        rl |= {"prompts": prompts, "group_size": group}
        batch = policy.get("train_global_batch_size")
        if isinstance(batch, int) and 0 < batch < prompts * group and prompts * group % batch == 0:
            updates = prompts * group // batch
            if prompts % updates == 0:
                rl["updates"] = updates
            else:
                why = f"{updates} updates of {prompts} prompts; here each has whole prompts"
                policy.leave("train_global_batch_size", why)
    advantages = _advantages(run, name)
    if options.get("use_kl_in_reward"):
        rl |= _kl_in_reward(loss, options, advantages)
    penalty = options.get("reference_policy_kl_penalty", _CLIPPED["reference_policy_kl_penalty"])
    rl["advantages"] = advantages
    if advantages["name"] == "gae":
        rl["critic"] = _critic(root, run)
    if run.get("ppo_epochs", 1) != 1:
        run.leave("ppo_epochs", "the samples of a step are read once here")
    if run.flag("use_dynamic_sampling"):
        rl["dynamic_sampling"] = {"max_rounds": max(int(str(run.get("dynamic_sampling_max_gen_batches", 10))), 2)}
        run.differ(OF_DIFFERENT_REWARDS.format("use_dynamic_sampling"))
    shaping = run.below("reward_shaping")
    on, coefficient = shaping.flag("enabled"), shaping.get("stop_properly_penalty_coef")
    if on and coefficient is not None:
        rl["overlong"] = {"name": "stop_properly", "coefficient": coefficient}
        for key in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
            if shaping.get(key) is not None:
                shaping.drop(key, "with stop_properly_penalty_coef")
    elif on and shaping.get("overlong_buffer_length"):
        rl["overlong"] = {
            "name": "dapo", "max_length": shaping.get("max_response_length"), "bounded": False,
            "buffer": shaping.get("overlong_buffer_length"), "factor": shaping.get("overlong_buffer_penalty", 1.0),
        }  # fmt: skip
        root.differ(
            f"{shaping.where}: its penalty goes on growing beyond the longest response (bounded: false); ours stops"
        )
    shaping.close(nemo_rl_keys.SHAPING)
    for key in _NOT_HERE:
        value = run.get(key)
        if value not in (None, False, 1) and not (isinstance(value, Mapping) and not value.get("enabled")):
            run.leave(key)
    run.close(nemo_rl_keys.RUN)
    if penalty and not options.get("use_kl_in_reward"):
        options["reference_policy_kl_penalty"] = penalty  # the default of both, to be seen and changed
        root.differ(
            f"loss_fn.reference_policy_kl_penalty = {penalty}: it pulls back to the reference, of which a copy is kept; the "
            "loss policy of our recipes has no KL by default"
        )
    return rl


def _kl_in_reward(loss: Reader, options: Tree, advantages: Tree) -> Tree:
    """Options of the section rl; the coefficient joins the estimator's."""
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


def _advantages(run: Reader, name: str) -> Tree:
    """The estimator by its name there."""
    estimator = run.below("adv_estimator")
    kind = str(estimator.get("name", "gae" if name == "ppo" else "grpo"))
    bounds = {side: run.get(f"advantage_clip_{side}") for side in ("low", "high")}
    out: Tree = {"name": kind, **{f"clip_{side}": bound for side, bound in bounds.items() if bound is not None}}
    if kind == "grpo":
        normalize = estimator.get("normalize_rewards", run.get("normalize_rewards", True))
        others = estimator.get("use_leave_one_out_baseline", run.get("use_leave_one_out_baseline", True))
        out |= {"normalize": "leave_one_out" if normalize and others else "std" if normalize else "none"}
        out["baseline"] = "leave_one_out" if others else "mean"
        if others:
            run.differ(
                "use_leave_one_out_baseline: mean and deviation without the sample itself; ours take the group's, which makes "
                "each advantage smaller by (n − 1)/n"
            )
    elif kind == "reinforce_plus_plus" and estimator.get("minus_baseline", True):
        out["name"] = "reinforce_plus_plus_baseline"
    elif kind == "gae":
        out |= _gae(estimator)
    elif kind not in ("gdpo", "reinforce_plus_plus"):
        estimator.leave("name", "no such estimator here")
        out["name"] = "grpo"
    if kind == "gdpo" and estimator.get("reward_weights") is not None:
        out["weights"] = estimator.get("reward_weights")
    estimator.close(nemo_rl_keys.ADVANTAGES)
    return out


def _gae(estimator: Reader) -> Tree:
    """Its options; λ of the values and of the policy apart, as VAPO has them."""
    lam, values = estimator.get("gae_lambda", 0.95), estimator.get("gae_lambda_value")
    policy, by_length = estimator.get("gae_lambda_policy"), estimator.get("length_adaptive_alpha", 0.0)
    out: Tree = {"gamma": estimator.get("gae_gamma", 1.0)}
    out |= {"length_adaptive": by_length} if by_length else {"lam": lam if policy is None else policy}
    if by_length or policy is not None or values is not None:
        out["value_lam"] = lam if values is None else values
    if estimator.get("normalize_advantages", True):
        out["whiten"] = "unbiased"
        estimator.differ("gae: advantages are whitened over the step (whiten: unbiased); ours by default are not")
    return out


def _critic(root: Reader, run: Reader) -> Tree:
    """The value function of gae."""
    value, loss = root.below("value"), root.below("value_loss_fn")
    of_megatron = value.below("megatron_cfg")
    rate = of_megatron.below("optimizer").get("lr") if of_megatron.flag("enabled") else None
    rate = value.below("optimizer").below("kwargs").get("lr", 1e-5) if rate is None else rate
    given = {"scale": loss.get("scale"), "cliprange": loss.get("cliprange") or None}  # 0 is off there
    options = {key: x for key, x in given.items() if x is not None}
    loss.close()
    value.close(nemo_rl_keys.POLICY)
    of_megatron.close(nemo_rl_keys.MEGATRON)
    critic: Tree = {"loss": {"name": "value", "options": options}, "optimizer": {"lr": rate}}
    warmup = run.get("policy_training_start_step", 0)
    return critic | ({"warmup_steps": warmup} if warmup else {})


def _preference(dpo: Reader, root: Reader) -> Tree:
    given = {name: dpo.get(name, default) for name, default in _DPO.items()}
    dpo.close(nemo_rl_keys.RUN)
    if given["sft_average_log_probs"] and not given["sft_loss_weight"]:
        dpo.drop("sft_average_log_probs", "with sft_loss_weight = 0")
        given["sft_average_log_probs"] = False
    if given["reference_policy_kl_penalty"] == 0:
        dpo.drop("preference_loss_weight", "with reference_policy_kl_penalty = 0: the term is log 2")
        given |= {"preference_loss_weight": 0.0, "reference_policy_kl_penalty": _DPO["reference_policy_kl_penalty"]}
    options = {name: value for name, value in given.items() if value != _DPO[name]}
    configure(DPOLossConfig, options, dpo.where)
    section: Tree = {"loss": {"name": "dpo", "options": options}}
    pairs = root.below("policy").get("train_global_batch_size")
    return section | ({"pairs": pairs} if isinstance(pairs, int) else {})


def _distillation(root: Reader) -> Tree:
    """Top-k distillation, of completions that the student draws itself."""
    loss, run = root.below("loss_fn"), root.below("distillation")
    names = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
    given = {name: loss.get(name) for name in names if name in loss.section}
    loss.close(names)
    if given.get("kl_type", "mixed") != "mixed" and given.pop("mixed_kl_weight", None) is not None:
        loss.drop("mixed_kl_weight", f"with kl_type = {given['kl_type']!r}")
    configure(DistillationLossConfig, given, loss.where)
    sizes = {"top_k": run.get("topk_logits_k"), "batch_size": root.below("policy").get("train_global_batch_size")}
    if run.get("num_generations_per_prompt", 1) != 1:
        run.leave("num_generations_per_prompt", "each prompt is completed once here")
    section: Tree = {"rows": "policy", **{name: size for name, size in sizes.items() if isinstance(size, int)}}
    return section | {"loss": {"name": "distillation", "options": given}}


def _shape(root: Reader) -> Tree:
    """Model, layout, batch and sampling."""
    policy = root.below("policy")
    megatron, generation = policy.below("megatron_cfg"), policy.below("generation")
    ours: Tree = {}
    if policy.get("model_name"):
        ours["model"] = {"hf": policy.get("model_name")}
    if megatron.flag("enabled"):
        ours["parallel"] = layout_of(megatron)
    packing = policy.below("sequence_packing")
    batch: Tree = {"packing": True} if packing.flag("enabled") else {}
    if batch and isinstance(packing.get("train_mb_tokens"), int):
        batch["tokens"] = packing.get("train_mb_tokens")
    rows = policy.get("train_micro_batch_size")
    ours["batch"] = batch | ({"micro_batch_size": rows} if isinstance(rows, int) and not batch else {})
    asked = ("max_new_tokens", "temperature", "top_k", "top_p")
    sampling = {key: generation.get(key) for key in asked if generation.get(key) is not None}
    if sampling.get("top_p") == 1.0:
        sampling.pop("top_p")
    for key in ("stop_strings", "stop_token_ids"):
        if generation.get(key):
            generation.leave(key, "an answer ends on the tokenizer's end tokens alone")
    if sampling:
        ours["sampling"] = sampling
    for section, known in (
        (policy, nemo_rl_keys.POLICY), (megatron, nemo_rl_keys.MEGATRON), (generation, nemo_rl_keys.GENERATION),
        (packing, nemo_rl_keys.PACKING),
    ):  # fmt: skip
        section.close(known)
    return ours
