"""Reports of ports: nothing is left out, and each key is named once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from parallel_rl.cli import main
from parallel_rl.hosts.port_report import KINDS
from parallel_rl.port.options import options_of
from tests.port.test_nemo_rl import NEMO
from tests.port.test_port import NEMO_PPO, VERL, VERL_PPO


def leaves(tree: object, path: str = "") -> list[str]:
    if not isinstance(tree, dict) or not tree:
        return [path]
    return [leaf for key, item in tree.items() for leaf in leaves(item, f"{path}.{key}" if path else key)]


@pytest.mark.parametrize("config", [NEMO, NEMO_PPO, VERL, VERL_PPO])
def test_every_key_is_named_once(config: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    report = tmp_path / "report.jsonl"
    assert main(["port", str(tmp_path / "run.yaml"), "--report", str(report)]) == 0
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert {*rows[0]} == {"key", "value", "kind", "ours", "why"} and {row["kind"] for row in rows} <= {*KINDS}
    for leaf in leaves(config):
        [row] = [row for row in rows if f"{leaf}.".startswith(f"{row['key']}.")]
        assert row["why"] or row["ours"]
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"{len(leaves(config))} keys: ")
    for row in rows:
        assert any(f" {row['key']}" in line for line in said)


def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(NEMO))
    assert main(["port", str(tmp_path / "run.yaml"), "--report", str(tmp_path / "none" / "r")]) == 2
    assert "--report" in capsys.readouterr().err


def test_a_carried_key_stands_in_ours() -> None:
    """ "carried" is said of a key whose value our config has, and of no other."""
    for config in (NEMO, NEMO_PPO, VERL, VERL_PPO):
        ported = options_of(config)
        for row in ported.rows:
            at: object = ported.config
            for name in row.ours.split(".") if row.kind == "carried" else ():
                assert isinstance(at, dict) and name in at, row
                at = at[name]


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (
            {
                "actor_rollout_ref": {
                    "model": {"path": None, "tokenizer_path": None}, "rollout": {"n": None},
                    "actor": {"loss_scale_factor": 1000, "optim": {"optimizer_impl": "bitsandbytes.optim"}},
                },
                "data": {"train_files": None, "train_batch_size": None, "shuffle": False},
                "critic": {"enable": False}, "algorithm": {"adv_estimator": "gae"}, "trainer": {"default_local_dir": None},
            },
            {
                "actor_rollout_ref.model.path": "yours", "actor_rollout_ref.model.tokenizer_path": "yours",
                "actor_rollout_ref.rollout.n": "yours", "data.train_files": "yours", "data.train_batch_size": "yours",
                "trainer.default_local_dir": "yours", "actor_rollout_ref.actor.loss_scale_factor": "no_effect",
                "actor_rollout_ref.actor.optim.optimizer_impl": "unsupported", "data.shuffle": "unsupported",
                "critic.enable": "unsupported",
            },
        ),
        (
            {
                "policy": {
                    "model_name": None, "tokenizer": {"name": None}, "train_global_batch_size": 96,
                    "train_micro_batch_size": None,
                },
                "grpo": {"num_prompts_per_step": 16, "num_generations_per_prompt": 8}, "loss_fn": {},
                "checkpointing": {"enabled": False, "metric_name": "val:x", "higher_is_better": True},
                "data": {"shuffle": False}, "logger": {"tensorboard_enabled": False},
            },
            {
                "policy.model_name": "yours", "policy.tokenizer.name": "yours", "policy.train_global_batch_size": "yours",
                "policy.train_micro_batch_size": "yours", "checkpointing.metric_name": "no_effect",
                "checkpointing.higher_is_better": "no_effect", "data.shuffle": "unsupported",
                "logger.tensorboard_enabled": "yours",
            },
        ),
        (
            {
                "policy": {"train_global_batch_size": 512}, "checkpointing": {"enabled": True, "keep_top_k": None},
                "grpo": {"num_prompts_per_step": 16, "num_generations_per_prompt": 8}, "loss_fn": {},
            },
            {"policy.train_global_batch_size": "yours", "checkpointing.keep_top_k": "yours"},
        ),
        ({"policy": {}, "checkpointing": {"enabled": True}, "grpo": {}, "loss_fn": {}}, {"checkpointing.enabled": "equal"}),
    ],
    ids=["verl", "NeMo-RL", "a batch above the step", "one key of a section"],
)  # fmt: skip
def test_a_value_that_ours_has_not_is_not_equal(config: dict, kinds: dict[str, str]) -> None:
    rows = {row.key: row.kind for row in options_of(config).rows}
    assert {key: rows.get(key) for key in kinds} == kinds


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {
                "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": 9, "max_num_epochs": 1},
                "loss_fn": {},
                "policy": {
                    "max_total_sequence_length": 511, "dtensor_cfg": {"enabled": False}, "max_grad_norm": 1.0,
                    "megatron_cfg": {
                        "enabled": True, "tensor_model_parallel_size": 2, "context_parallel_size": 2,
                        "optimizer": {"lr": 1e-6, "use_distributed_optimizer": True},
                    },
                    "sequence_packing": {"enabled": True, "train_mb_tokens": 2048},
                },
                "data": {"dataset_name": "d", "prompt_file": "p.txt", "max_input_seq_length": 512},
            },
            {
                "grpo.max_num_epochs": "rl.steps: NeMo-RL stops at max_num_steps or after 1 epoch, whichever is first; "
                "lower rl.steps if the epoch is shorter",
                "policy.max_total_sequence_length": "model.max_positions: 511 + 1 up to a multiple of 4 + 8 for the padding "
                "of a packed row",
                "policy.dtensor_cfg.enabled": ": dtensor is off",
                "policy.max_grad_norm": ": megatron_cfg.optimizer.clip_grad is used instead",
                "policy.megatron_cfg.optimizer.use_distributed_optimizer": "parallel.use_distributed_optimizer: with several "
                "data × context ranks; cluster does not say how many",
                "data.dataset_name": "data.train: a file of JSONL or Parquet; see docs/data.md",
                "data.prompt_file": "data.map: a function of yours writes the prompt into each record",
                "data.max_input_seq_length": "data.too_long: drop leaves longer records out",
            },
        ),
        (
            {
                "dpo": {}, "data": {"dataset_name": "d"}, "policy": {
                    "megatron_cfg": {"enabled": True, "optimizer": {"use_distributed_optimizer": True}},
                }, "cluster": {"gpus_per_node": 1},
            },
            {
                "data.dataset_name": "data.pairs: a file of JSONL or Parquet; see docs/data.md",
                "policy.megatron_cfg.optimizer.use_distributed_optimizer": "parallel.use_distributed_optimizer: there is one "
                "data × context rank",
            },
        ),
        (
            {
                "actor_rollout_ref": {
                    "actor": {"strategy": "megatron", "grad_clip": 1.0, "megatron": {"use_distributed_optimizer": True}},
                    "model": {"use_remove_padding": True},
                },
                "data": {
                    "max_prompt_length": 512, "max_response_length": 1024, "filter_overlong_prompts": True,
                    "truncation": "left",
                },
                "algorithm": {"adv_estimator": "grpo"},
            },
            {
                "actor_rollout_ref.actor.grad_clip": ": the Megatron actor reads optim.clip_grad, here its default 1.0",
                "actor_rollout_ref.actor.megatron.use_distributed_optimizer": "parallel.use_distributed_optimizer: with "
                "several data × context ranks; trainer does not say how many",
                "data.max_prompt_length": "model.max_positions: 1536 + 1 for the padding of a packed row; a longer prompt is "
                "an error; data.too_long: drop leaves it out",
                "data.filter_overlong_prompts": "data.too_long: drop leaves longer prompts out",
                "data.truncation": "data.too_long: truncate cuts a longer prompt at its left",
            },
        ),
    ],
    ids=["NeMo-RL", "pairs of NeMo-RL", "verl"],
)  # fmt: skip
def test_a_line_says_what_to_set(config: dict, said: dict[str, str]) -> None:
    rows = {row.key: f"{row.ours}: {row.why}" for row in options_of(config).rows}
    assert {key: rows.get(key) for key in said} == said


@pytest.mark.parametrize("group", [1, 5])
def test_a_group_of_one_is_named_if_there_is_one(group: int) -> None:
    config = {"actor_rollout_ref": {"rollout": {"n": group}}, "algorithm": {"adv_estimator": "grpo"}}
    said = [text for text in options_of(config).differs if "a group of one" in text]
    assert len(said) == (group == 1)
