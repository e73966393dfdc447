"""Whole configs of other frameworks: what decides the run comes over, and `check` takes it once the user's keys are there."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from parallel_rl.config.strict import configure
from parallel_rl.hosts.ported import Ported
from parallel_rl.port.options import options_of
from parallel_rl.training.config.train import TrainConfig

MEGATRON = {
    "enabled": True, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "sequence_parallel": True,
    "activation_checkpointing": True, "recompute_granularity": "selective", "recompute_modules": ["core_attn"],
    "optimizer": {
        "optimizer": "adam", "lr": 3e-7, "min_lr": 3e-8, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.98,
        "adam_eps": "1e-8", "clip_grad": 0.5, "use_distributed_optimizer": True, "bf16": True, "params_dtype": "float32",
    },
    "scheduler": {
        "start_weight_decay": 0.01, "end_weight_decay": 0.01, "weight_decay_incr_style": "constant",
        "lr_decay_style": "cosine", "lr_decay_iters": 500, "lr_warmup_iters": 13, "lr_warmup_init": 3e-8,
    },
    "distributed_data_parallel_config": {"overlap_grad_reduce": True},
}  # fmt: skip
TORCH = {
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": "5e-6", "weight_decay": 0.1, "betas": [0.9, 0.98]}},
    "scheduler": [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 20}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}}, {"milestones": [20]},
    ],
    "max_grad_norm": 1.0,
}  # fmt: skip
POLICY = {
    "model_name": "m", "tokenizer": {"name": "m", "chat_template_kwargs": {"enable_thinking": False}}, "precision": "bfloat16",
    "train_global_batch_size": 64, "train_micro_batch_size": 2, "max_total_sequence_length": 1024,
    "dtensor_cfg": {"enabled": False, "cpu_offload": False}, "dynamic_batching": {"enabled": False},
    "sequence_packing": {"enabled": True, "train_mb_tokens": 2048, "algorithm": "first_fit"}, "max_grad_norm": 1.0,
    "generation": {"backend": "vllm", "max_new_tokens": 512, "temperature": 1.0, "val_temperature": 0.5, "vllm_cfg": {"a": 1}},
}  # fmt: skip
AROUND = {
    "checkpointing": {"enabled": True, "checkpoint_dir": "results", "save_period": 20, "keep_top_k": 4},
    "data": {"train": {"dataset_name": "names"}, "max_input_seq_length": 512}, "cluster": {"num_nodes": 1, "gpus_per_node": 8},
    "env": {"math": {"num_workers": 8}},
}  # fmt: skip
GRPO = {
    "grpo": {
        "num_prompts_per_step": 16, "num_generations_per_prompt": 8, "max_num_steps": 1000, "max_num_epochs": 1, "seed": 7,
        "val_period": 10, "val_num_generations_per_prompt": 4, "val_at_start": True, "max_val_samples": 64,
    },
    "loss_fn": {}, "policy": {**POLICY, "megatron_cfg": MEGATRON}, **AROUND,
}  # fmt: skip
OPTIM = {
    "lr": 2e-6, "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1, "weight_decay": 0.02, "betas": [0.9, 0.99],
    "clip_grad": 0.7,     "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1, "num_cycles": 0.5, "total_training_steps": -1,
}  # fmt: skip
VERL_PPO = {
    "actor_rollout_ref": {
        "model": {"path": "m", "enable_gradient_checkpointing": True, "use_remove_padding": True},
        "actor": {
            "strategy": "fsdp", "ppo_mini_batch_size": 32, "ppo_micro_batch_size_per_gpu": 4, "optim": OPTIM, "grad_clip": 0.5,
            "ulysses_sequence_parallel_size": 2, "fsdp_config": {"seed": 42, "dtype": "bfloat16", "param_offload": False},
        },
        "rollout": {"n": 1, "temperature": 0.9, "val_kwargs": {"n": 2}}, "ref": {"strategy": "fsdp"},
    },
    "critic": {"strategy": "fsdp", "optim": {**OPTIM, "lr": 1e-5, "lr_scheduler_type": "constant"}, "cliprange_value": 0.5},
    "algorithm": {"adv_estimator": "gae"},
    "data": {
        "train_files": ["a.parquet"], "val_files": "b.parquet", "train_batch_size": 64, "max_prompt_length": 256,
        "max_response_length": 512, "prompt_key": "prompt",
    },
    "trainer": {
        "total_training_steps": 200, "save_freq": 20, "test_freq": 5, "val_before_train": True, "default_local_dir": "out",
        "max_actor_ckpt_to_keep": 3, "critic_warmup": 0, "nnodes": 1, "n_gpus_per_node": 8,
    },
}  # fmt: skip


def checked(ported: Ported, folder: Path) -> TrainConfig:
    """The run's config with a local model, and with nothing else than the report says is the user's."""
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 61,
    }
    model = {"model_type": "llama", **sizes, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(model))
    config: dict = copy.deepcopy(ported.config)
    config["model"]["hf"] = str(folder)
    yours = {row.ours for row in ported.rows if row.kind == "yours"}
    for key in ("train", "held_out", "pairs", "examples"):
        if f"data.{key}" in yours:
            config.setdefault("data", {}).setdefault(key, "file.jsonl")
    return configure(TrainConfig, config)


def test_grpo_of_nemo_rl(tmp_path: Path) -> None:
    """Its rate, warm-up, decay, clip, precision, seed, batch sizes and periods appeared nowhere."""
    ported = options_of(GRPO)
    made = checked(ported, tmp_path)
    assert made.rl is not None and made.evaluation is not None and not ported.unknown
    rates = made.rl.optimizer
    assert (made.rl.steps, made.rl.updates, rates.lr, rates.betas, rates.eps) == (1000, 2, 3e-7, (0.9, 0.98), 1e-8)
    assert (rates.weight_decay, rates.clip, rates.schedule, rates.final_fraction) == (
        0.01,
        0.5,
        "cosine",
        pytest.approx(0.1),
    )
    assert rates.warmup_steps == 26  # a tick there is a step of the run, of two updates
    run = made.run
    assert (run.dir, run.seed, run.dtype, run.checkpoint_every, run.keep_checkpoints) == (
        "results",
        7,
        "bfloat16",
        20,
        4,
    )
    assert (made.evaluation.every, made.evaluation.samples) == (10, 4)
    assert made.batch.tokens == 2048 and made.sampling.max_new_tokens == 512
    assert made.model.recompute is not None and made.model.recompute.modules == ("core_attn",)
    assert made.parallel.use_distributed_optimizer and made.parallel.overlap_grad_reduce
    assert made.model.max_positions >= 1024 and made.tokenizer.variables == {"enable_thinking": False}
    kinds = {row.key: (row.kind, row.ours) for row in ported.rows}
    assert kinds["policy.generation.val_temperature"] == ("unsupported", "sampling.temperature")
    assert kinds["policy.dtensor_cfg"] == ("no_effect", "") and kinds["env.math.num_workers"] == ("yours", "reward")
    assert kinds["grpo.max_num_epochs"] == ("yours", "rl.steps") and kinds["grpo.max_val_samples"] == (
        "yours",
        "data.held_out",
    )


def test_sequence_parallelism_without_megatron() -> None:
    """Its truth was taken for a size of 1, which is left out."""
    config = copy.deepcopy(GRPO)
    policy = {**POLICY, **TORCH, "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2, "sequence_parallel": True}}
    config["policy"] = {**policy, "megatron_cfg": {**MEGATRON, "enabled": False}}
    ported = options_of(config)
    assert ported.config["parallel"] == {"tensor": 2, "sequence_parallel": True}
    kinds = {row.key: row.kind for row in ported.rows}
    assert kinds["policy.megatron_cfg"] == "no_effect"


def test_answers_that_fill_the_whole_length() -> None:
    """A row of so many tokens has no room for a prompt and such an answer: `check` refused it."""
    config = copy.deepcopy(GRPO)
    config["policy"]["generation"]["max_new_tokens"] = 1024  # type: ignore[index]
    config["policy"]["sequence_packing"]["train_mb_tokens"] = 1024  # type: ignore[index]
    ported = options_of(config)
    assert (
        ported.config["batch"] == {"packing": True, "micro_batch_size": 2}
        and "max_positions" not in ported.config["model"]
    )  # type: ignore[operator]
    yours = {row.key for row in ported.rows if row.kind == "yours"}
    assert {"policy.sequence_packing.train_mb_tokens", "policy.max_total_sequence_length"} <= yours


@pytest.mark.parametrize(
    ("name", "objective", "rows"), [("dpo", "preference", 4), ("rm", "preference", 4), ("sft", "sft", 2)]
)
def test_the_other_objectives_of_nemo_rl(name: str, objective: str, rows: int, tmp_path: Path) -> None:
    """Their reports were empty; a micro-batch of pairs has two sequences for each."""
    run = {"max_num_steps": 150, "val_period": 10, "val_batches": 8, "seed": 3}
    policy = {**POLICY, **TORCH, "sequence_packing": {"enabled": False}, "megatron_cfg": {"enabled": False}}
    ported = options_of({name: run, "policy": policy, **AROUND})
    made = checked(ported, tmp_path)
    section = getattr(made, objective)
    assert (section.steps, section.optimizer.lr, section.optimizer.warmup_steps) == (150, 5e-6, 20)
    assert (section.optimizer.betas, section.optimizer.clip, made.run.seed) == ((0.9, 0.98), 1.0, 3)
    assert made.batch.micro_batch_size == rows and made.evaluation is None
    kinds = {row.key: row.kind for row in ported.rows}
    assert kinds[f"{name}.val_period"] == "unsupported" and not ported.unknown


def test_ppo_of_verl(tmp_path: Path) -> None:
    """The actor's optimizer did not come over at all, the critic's without betas and schedule."""
    ported = options_of(VERL_PPO)
    made = checked(ported, tmp_path)
    assert made.rl is not None and made.rl.critic is not None and made.evaluation is not None and not ported.unknown
    actor, critic = made.rl.optimizer, made.rl.critic.optimizer
    assert (actor.lr, actor.betas, actor.clip, actor.warmup_steps) == (2e-6, (0.9, 0.99), 0.5, 40)
    assert (actor.schedule, actor.final_fraction) == ("cosine", pytest.approx(0.1))
    assert (critic.lr, critic.betas, critic.weight_decay, critic.schedule) == (1e-5, (0.9, 0.99), 0.02, "constant")
    assert (critic.clip, critic.warmup_steps) == (0.7, 40)
    assert made.parallel.context == 2 and made.model.recompute is not None and made.batch.packing
    assert made.data.train == ("a.parquet",) and made.data.columns["answer"] == "reward_model.ground_truth"
    assert (made.run.keep_checkpoints, made.evaluation.every, made.evaluation.samples) == (3, 5, 2)
    assert made.model.max_positions >= 768
    plain = copy.deepcopy(VERL_PPO)
    del plain["critic"]["optim"], plain["actor_rollout_ref"]["actor"]["optim"]  # type: ignore[attr-defined, index]
    rl: dict = options_of(plain).config["rl"]  # type: ignore[assignment]
    assert rl["critic"]["optimizer"]["betas"] == rl["optimizer"]["betas"] == [0.9, 0.999]  # its own defaults, not ours


def test_experts_need_servers() -> None:
    config = copy.deepcopy(GRPO)
    config["policy"]["megatron_cfg"]["expert_model_parallel_size"] = 4  # type: ignore[index]
    ported = options_of(config)
    assert "tokens" not in ported.config["batch"]  # type: ignore[operator]
    assert {"rl.server", "rl.server.update"} <= {row.ours for row in ported.rows if row.kind == "yours"}
    config["grpo"] |= {"val_period": 0, "val_at_start": False}
    assert "rl.server.update" not in {row.ours for row in options_of(config).rows}


def test_a_batch_that_the_cluster_does_not_share_evenly() -> None:
    """`check` refused 8 prompts an update on 32 data ranks, and the report had said nothing."""
    config = copy.deepcopy(GRPO)
    config["cluster"] = {"num_nodes": 8, "gpus_per_node": 8}
    [row] = [row for row in options_of(config).rows if not row.key and row.ours == "rl.prompts"]
    assert row.kind == "yours" and row.why.startswith("8 an update do not divide among the cluster's 32 data ranks")
    config["cluster"]["num_nodes"] = 2
    assert all(row.ours != "rl.prompts" or row.key for row in options_of(config).rows)
    config["policy"]["megatron_cfg"] |= {"expert_model_parallel_size": 16, "expert_tensor_parallel_size": 2}  # type: ignore[index]
    [row] = [row for row in options_of(config).rows if not row.key and row.ours == "parallel"]
    assert row.why == "the cluster's 16 ranks are no multiple of expert_tensor × expert × pipeline = 32"
    config["policy"]["train_global_batch_size"] = "${oc.env:BS}"  # type: ignore[index]
    assert options_of(config).rows  # a size that nobody knows yet
    verl = copy.deepcopy(VERL_PPO)
    verl["trainer"]["nnodes"] = 16  # type: ignore[index]
    assert any(not row.key and row.ours == "rl.prompts" for row in options_of(verl).rows)


def test_what_a_teacher_and_a_critic_do_not_read() -> None:
    """Keys of speed that the policy leaves out were called unsupported there."""
    teacher = {
        "model_name": "t",
        "tokenizer": {"name": "t"},
        "generation": {"temperature": 2.0},
        "train_global_batch_size": 9,
    }
    teacher |= {"logprob_batch_size": 2, "precision": "float32"}
    distilled = {
        "distillation": {"topk_logits_k": 8},
        "loss_fn": {"kl_type": "forward"},
        "policy": POLICY,
        "teacher": teacher,
    }
    kinds = {row.key: row.kind for row in options_of(distilled).rows}
    assert {key for key in kinds if key.startswith("teacher.") and kinds[key] == "unsupported"} == {"teacher.precision"}
    critic = {**VERL_PPO["critic"], "forward_max_token_len_per_gpu": 4096}  # type: ignore[dict-item]
    assert {row.key: row.kind for row in options_of({**VERL_PPO, "critic": critic}).rows}[
        "critic.forward_max_token_len_per_gpu"
    ] == "no_effect"


def test_an_unknown_key_names_the_nearest_one_alone() -> None:
    """Of a release with other keys than those that were read, each such key listed all that are valid there."""
    config = copy.deepcopy(VERL_PPO)
    config["actor_rollout_ref"]["actor"]["qqqq"] = {"deep": list(range(1000))}  # type: ignore[index]
    [line] = options_of(config).unknown
    assert line.startswith("actor_rollout_ref.actor.qqqq = ") and len(line) < 200
