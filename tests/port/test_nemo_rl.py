"""Configs of NeMo-RL in our keys."""

from __future__ import annotations

import copy

import pytest

from parallel_rl.advantages.base import AdvantageEstimator
from parallel_rl.config.strict import configure
from parallel_rl.losses.choice import LossConfig
from parallel_rl.port.options import options_of
from parallel_rl.training.config.algorithms import DistillationConfig, RLConfig
from parallel_rl.training.config.sections import BatchConfig, ParallelConfig, SamplingConfig

TIS = "truncated_importance_sampling_"
NEMO = {
    "grpo": {
        "num_prompts_per_step": 32, "num_generations_per_prompt": 16, "normalize_rewards": True,
        "use_leave_one_out_baseline": True, "async_grpo": {"enabled": True}, "bacth_multiplier": 2,
    },
    "loss_fn": {
        "reference_policy_kl_penalty": 0.0, "use_on_policy_kl_approximation": True, "ratio_clip_max": 0.28,
        "truncated_importance_sampling_ratio": 2.0, "token_level_loss": True, "ratio_clip_c": None,
    },
    "policy": {
        "model_name": "m", "train_global_batch_size": 128, "train_micro_batch_size": 4,
        "megatron_cfg": {
            "enabled": True, "tensor_model_parallel_size": 2, "context_parallel_size": 4, "sequence_parallel": True,
        },
        "generation": {"temperature": 0.9, "top_k": None, "top_p": 1.0},
    },
}  # fmt: skip


def test_nemo_rl() -> None:
    ported = options_of(NEMO)
    assert ported.config["rl"] == {
        "loss": {"name": "clipped_pg", "options": {"reference_policy_kl_penalty": 0.0, "ratio_clip_max": 0.28}},
        "prompts": 32, "group_size": 16, "updates": 4,
        "advantages": {"name": "grpo", "normalize": "leave_one_out", "baseline": "leave_one_out"},
    }  # fmt: skip
    assert ported.config["parallel"] == {"tensor": 2, "context": 4, "sequence_parallel": True}
    assert ported.config["sampling"] == {"temperature": 0.9} and ported.config["batch"] == {"micro_batch_size": 4}
    said = "\n".join(ported.lines())
    assert "loss_fn.use_on_policy_kl_approximation = True has no effect without a KL in the loss" in said
    assert "truncated_importance_sampling_ratio = 2.0 has no effect without use_importance_sampling_correction" in said
    assert "left      grpo.async_grpo" in said and "unknown   grpo.bacth_multiplier = 2" in said and "(n − 1)/n" in said


@pytest.mark.parametrize(
    ("loss", "left"),
    [
        ({"force_on_policy_ratio": True, "ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0}, "force_on_policy_ratio"),
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "disable_ppo_ratio"),
        ({"use_cispo": True, "ratio_clip_c": 3.0, "ratio_clip_max": 5.0}, "use_cispo"),
        ({"use_importance_sampling_correction": True, f"{TIS}ratio": 2.0}, f"{TIS}type"),
        ({"use_kl_in_reward": True, "kl_input_clamp_value": 5.0, "reference_policy_kl_penalty": 0.1}, "use_kl_in_reward"),
    ],
)  # fmt: skip
def test_options_without_effect_are_dropped_and_the_rest_is_a_loss(loss: dict, left: str) -> None:
    rl = options_of({"grpo": {"adv_estimator": {"name": "reinforce_plus_plus"}}, "loss_fn": loss}).config["rl"]
    assert left in rl["loss"]["options"]  # type: ignore[index]
    configure(LossConfig, rl["loss"])  # type: ignore[index]
    configure(AdvantageEstimator, rl["advantages"])  # type: ignore[index]


@pytest.mark.parametrize("kind", ["grpo", "gae", "reinforce_plus_plus", "gdpo"])
def test_estimators_are_ours(kind: str) -> None:
    run = {"adv_estimator": {"name": kind, "gae_lambda": 0.9}, "advantage_clip_low": -5.0, "advantage_clip_high": 5.0}
    loss = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1}
    rl = options_of({"ppo" if kind == "gae" else "grpo": run, "loss_fn": loss}).config["rl"]
    made = configure(AdvantageEstimator, rl["advantages"])  # type: ignore[index]
    assert (made.clip_low, made.clip_high) == (-5.0, 5.0)
    of_tokens = kind in ("gae", "reinforce_plus_plus")  # the others read no KL there, and their loss has none either
    assert rl.get("reward_kl") == ("low_var_kl" if of_tokens else None)  # type: ignore[attr-defined]
    assert made.kl_coefficient == (0.1 if of_tokens else 0)
    options = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1}
    assert rl["loss"]["options"] == (options if of_tokens else {"reference_policy_kl_penalty": 0.0})  # type: ignore[index]


def test_what_else_a_run_of_nemo_rl_holds() -> None:
    shaping = {"enabled": True, "overlong_buffer_length": 64, "max_response_length": 512}
    run = {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 1, "reward_shaping": shaping}
    ported = options_of(
        {"grpo": {**run, "adv_estimator": {"name": "raft"}}, "loss_fn": {"reference_policy_kl_penalty": 0}}
    )
    rl: dict = ported.config["rl"]  # type: ignore[assignment]
    assert rl["dynamic_sampling"] == {"max_rounds": 2}  # one round draws none anew
    assert ported.differs[0].startswith("use_dynamic_sampling keeps prompts whose rewards differ")
    overlong = {"name": "dapo", "max_length": 512, "bounded": False, "buffer": 64, "factor": 1.0}
    assert rl["overlong"] == overlong and "keeps growing beyond" in ported.differs[1]
    assert rl["advantages"] == {"name": "grpo"} and ported.left == (
        "grpo.adv_estimator.name = 'raft': no such estimator here",
    )
    configure(RLConfig, {**rl, "steps": 1, "optimizer": {"lr": 1e-3}, "prompts": 8, "group_size": 4})
    stops = {"reward_shaping": {**shaping, "stop_properly_penalty_coef": 0.5}}  # NeMo-RL then reads nothing else of it
    ported = options_of({"grpo": stops, "loss_fn": {}})
    assert ported.config["rl"]["overlong"] == {"name": "stop_properly", "coefficient": 0.5}  # type: ignore[index]
    assert [line.split()[0] for line in ported.dropped] == [
        "grpo.reward_shaping.overlong_buffer_length", "grpo.reward_shaping.max_response_length",
    ]  # fmt: skip
    ported = options_of({"policy": {"train_global_batch_size": 32}, "sft": {"only_unmask_final": True}})
    assert ported.config["sft"] == {"loss": {"name": "nll"}, "batch_size": 32}
    assert ported.left[0].startswith("sft.only_unmask_final = True: set data.mask_history: true")


def test_dpo_and_distillation() -> None:
    ported = options_of({"policy": {}, "dpo": {"reference_policy_kl_penalty": 0, "sft_loss_weight": 1.0}})
    assert ported.config["preference"]["loss"]["options"] == {"preference_loss_weight": 0.0, "sft_loss_weight": 1.0}  # type: ignore[index]
    ported = options_of({"distillation": {}, "loss_fn": {"kl_type": "reverse", "mixed_kl_weight": 0.5}})
    assert ported.config["distillation"]["loss"]["options"] == {"kl_type": "reverse"}  # type: ignore[index]
    assert ported.dropped == ("loss_fn.mixed_kl_weight = 0.5 has no effect with kl_type = 'reverse'",)
    assert options_of({"distillation": {}, "loss_fn": {"gold_loss": True}}).left


def test_unknown_keys_of_nemo_rl_in_any_section() -> None:
    """A misspelt size of a layout left the model whole, silently; what the release has is not called unknown."""
    policy = {
        "precision": "bfloat16", "tokenizer": {"name": "m"}, "dtensor_cfg": {"enabled": False}, "max_grad_norm": 1.0,
        "optimizer": None, "scheduler": [], "dynamic_batching": {"enabled": False}, "hf_config_overrides": {},
        "generation": {"backend": "vllm", "vllm_cfg": {}, "colocated": {}, "stop_strings": None, "val_top_p": 1.0},
        "megatron_cfg": {"enabled": True, "optimizer": {}, "scheduler": {}, "moe_permute_fusion": False, "peft": {}},
        "sequence_packing": {"enabled": True, "algorithm": "modified_first_fit_decreasing", "train_mb_tokens": 2048},
    }  # fmt: skip
    run = {"reward_shaping": {"enabled": False}, "adv_estimator": {"name": "grpo", "minus_baseline": True}, "seed": 1}
    outer = {
        name: {} for name in ("checkpointing", "logger", "cluster", "data", "env", "data_plane", "reward_penalties")
    }
    known = {**outer, "grpo": run, "loss_fn": {"use_cispo": False}, "policy": policy}
    assert options_of(known).unknown == ()
    for *path, key in (
        ("nonsense",), ("policy", "precison"), ("policy", "megatron_cfg", "tensor_model_parallel_sise"),
        ("policy", "generation", "temprature"), ("policy", "sequence_packing", "enable"), ("loss_fn", "ratio_clip_minn"),
        ("grpo", "reward_shaping", "enabeld"), ("grpo", "adv_estimator", "nam"),
    ):  # fmt: skip
        config = copy.deepcopy(known)
        section: dict = config
        for name in path:
            section = section[name]
        section[key] = 3
        [line] = options_of(config).unknown
        assert line.startswith(f"{'.'.join((*path, key))} = 3 (") and ("did you mean" in line or not path)
    for kind, section in (
        ("sft", {"sed": 1}),
        ("dpo", {"sed": 1}),
        ("distillation", {"sed": 1}),
        ("value", {"precison": 1}),
    ):
        name, given = ("ppo", {"ppo": {}, "loss_fn": {}}) if kind == "value" else (kind, {})
        [line] = options_of({"policy": {}, name: {}, **given, kind: section}).unknown
        assert line.startswith(f"{kind}.{next(iter(section))} = 1 (did you mean")


@pytest.mark.parametrize("penalty", [None, 0.01, 0.05])
def test_a_kl_of_nemo_rl_is_written_down(penalty: float | None) -> None:
    """Its default is a KL; the text called ours none, and the config, whose loss has the same one, did not show it."""
    given = {} if penalty is None else {"reference_policy_kl_penalty": penalty}
    ported = options_of({"grpo": {}, "loss_fn": given})
    assert ported.config["rl"]["loss"]["options"] == {"reference_policy_kl_penalty": penalty or 0.01}  # type: ignore[index]
    [line] = [line for line in ported.differs if "penalty" in line]
    assert f"reference_policy_kl_penalty = {penalty or 0.01}: a KL to the reference" in line


def test_what_is_sampled_and_where_it_runs() -> None:
    """Responses were cut at our default of 8 tokens, and experts stayed whole on every rank, both without a word."""
    sizes = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}
    packing = {"enabled": True, "train_mb_tokens": 4096}
    policy = {
        "generation": {"max_new_tokens": 512, "stop_strings": ["</s>"]},
        "megatron_cfg": {"enabled": True, **sizes},
    }
    ported = options_of({"grpo": {}, "policy": {**policy, "sequence_packing": packing}})
    assert ported.left == (
        "policy.generation.stop_strings = ['</s>']: an answer ends on the tokenizer's end tokens alone",
    )
    ours = ported.config
    assert configure(SamplingConfig, ours["sampling"]).max_new_tokens == 512  # type: ignore[arg-type]
    assert ours["parallel"] == {"tensor": 2, "expert": 4, "expert_tensor": 1}
    assert ours["batch"] == {"packing": True}  # a run refuses tokens with experts
    packed = {"generation": {"max_new_tokens": 512}, "sequence_packing": packing}
    batch = options_of({"grpo": {}, "policy": packed}).config["batch"]
    assert configure(BatchConfig, batch).tokens == 4096  # type: ignore[arg-type]
    dense = {**sizes, "expert_model_parallel_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": True}
    ported = options_of({"grpo": {}, "policy": {"megatron_cfg": {"enabled": True, **dense}}})
    assert configure(ParallelConfig, ported.config["parallel"]) == ParallelConfig()  # type: ignore[arg-type]
    assert ported.dropped == ("policy.megatron_cfg.sequence_parallel = True has no effect on one tensor rank",)


def test_updates_on_parts_of_prompts() -> None:
    """The section that came out was one that the trainer refuses."""
    run = {"num_prompts_per_step": 8, "num_generations_per_prompt": 16}
    ported = options_of({"grpo": run, "policy": {"train_global_batch_size": 8}})
    assert "updates" not in ported.config["rl"]  # type: ignore[operator]
    assert ported.left == (
        "policy.train_global_batch_size = 8: 8 × 16 samples a step; each of rl.updates has equally many whole prompts",
    )


def test_distillation_is_of_the_students_own_completions() -> None:
    """It came out as one of demonstrations, and without the top-k that its loss reads."""
    run = {"topk_logits_k": 64, "num_prompts_per_step": 128, "num_generations_per_prompt": 2}
    ported = options_of({"distillation": run, "loss_fn": {}, "policy": {"train_global_batch_size": 32}})
    section: dict = ported.config["distillation"]  # type: ignore[assignment]
    own = {"steps": 1, "optimizer": {"lr": 1e-3}, "teacher": "t"}
    made = configure(DistillationConfig, {**section, **own})
    assert (made.rows, made.top_k, made.batch_size) == ("policy", 64, 32)
    assert ported.left == ("distillation.num_generations_per_prompt = 2: each prompt is completed once here",)
