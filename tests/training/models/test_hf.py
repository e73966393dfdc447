"""A run from a Hugging Face folder: the same rows on every layout, resumed after a kill, and a folder back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from parallel_rl.testing.pool import run_world
from tests.megatron.hf.golden import write_folder
from tests.training.helpers import DATA, assert_near, cut, logged_rows, run, run_command, train_rows

pytest.importorskip("safetensors")

STEPS = 2


def arguments(folder: Path, hf: Path, **overrides: object) -> list[str]:
    given: dict[str, object] = {
        "run__dir": folder,
        "run__checkpoint_every": 1,
        "parallel": {},
        "model": {"hf": str(hf)},
        "data": {"rollouts": str(DATA / "arithmetic_rollouts.jsonl")},
        "warmup": "null",
        "evaluation": "null",
        "batch__micro_batch_size": 8,
        "rl__steps": STEPS,
        "rl__prompts": 4,
        "rl__group_size": 4,
        "rl__updates": 1,
        "rl__optimizer": {"lr": 1e-3},
        "run__loggers": [],
    }
    return run("grpo_arithmetic.yaml", **{**given, **overrides})


def export(rank: int, given: list[str], checkpoint: str, out: str) -> tuple[list[str], bool]:
    """Exports a checkpoint; returns what lies there, and whether its logits have the bits of the checkpoint's model."""
    from parallel_rl.megatron.hf import load_hf
    from parallel_rl.training.checkpointing.checkpoint import load_weights
    from parallel_rl.training.checkpointing.export import export_checkpoint
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.models.engine import build_frozen
    from tests.megatron.hf.cases import whole_logits

    config = load_config(given[0], given[1:])
    export_checkpoint(Path(checkpoint), Path(out), config)
    model = build_frozen(config, config.model.vocabulary(config.tokenizer.build().vocabulary))
    load_weights(Path(checkpoint), model, lambda path, metadata: None, scalar_head=config.scalar_head)
    loaded = load_hf(out, sequence_parallel=config.parallel.sequence_parallel, scalar_head=config.scalar_head)
    same = torch.equal(whole_logits([model]), whole_logits(loaded))
    return sorted(path.name for path in Path(out).iterdir()), same


@pytest.mark.slow
def test_a_run_from_a_folder(tmp_path: Path) -> None:
    """Two steps are the same on one process, on tensor ranks and after a kill; the folder given back has their bits."""
    hf = write_folder("qwen3", tmp_path / "qwen3", eos_token_id=[2, 7])
    one, two = (
        arguments(tmp_path / "one", hf),
        arguments(tmp_path / "two", hf, parallel={"tensor": 2, "sequence_parallel": True}),
    )
    [rows] = run_world(1, train_rows, one)
    assert len(rows) == STEPS and rows[0]["grad_norm"] > 0
    for other in run_world(2, train_rows, two):
        assert_near(other, rows, rel=1e-6, abs=1e-6)
    cut(tmp_path / "two", tmp_path / "killed", 1)
    resumed = run_world(2, train_rows, [*two, f"--run.dir={tmp_path / 'killed'}"])
    assert resumed[0] == resumed[1] == logged_rows(tmp_path / "two")[1:]
    checkpoint = tmp_path / "two/checkpoints/step_000002"
    [(files, same)] = run_world(1, export, one, str(checkpoint), str(tmp_path / "out"))
    assert same and files == ["config.json", "model.safetensors"]
    given, back = (json.loads((path / "config.json").read_text()) for path in (hf, tmp_path / "out"))
    assert given["eos_token_id"] == [2, 7] and back == given  # nothing is added, not even what pads a batch here
    for answer in run_world(2, export, two, str(checkpoint), str(tmp_path / "out 2")):
        assert answer == (files, True)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "out 2/model.safetensors").read_bytes()


@pytest.mark.slow
def test_experts_and_a_teacher_of_another_size(tmp_path: Path) -> None:
    """Expert ranks give one process's rows; the teacher is a folder of its own."""
    hf, teacher = (write_folder(name, tmp_path / name) for name in ("qwen3_moe", "llama"))
    shared = {
        "rl__teacher": str(teacher),
        "rl__advantages": {"name": "grpo", "teacher_kl": {"coefficient": 1.0}},
    }
    [rows] = run_world(1, train_rows, arguments(tmp_path / "one", hf, **shared))
    parallel = {"expert": 2}
    for other in run_world(2, train_rows, arguments(tmp_path / "two", hf, parallel=parallel, **shared)):
        assert_near(other, rows, rel=1e-5, abs=1e-6)
    checkpoint = str(tmp_path / "two/checkpoints/step_000002")
    [(_, same)] = run_world(1, export, arguments(tmp_path / "one", hf, **shared), checkpoint, str(tmp_path / "out"))
    assert same


def test_folders_that_cannot_be_trained(tmp_path: Path) -> None:
    """Found by `parallel-rl check`, and by every rank of a run before a model is built."""
    hf = write_folder("qwen3", tmp_path / "qwen3")
    other = write_folder("qwen2", tmp_path / "qwen2")
    (hf / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    first, second = run_world(2, refused, arguments(tmp_path / "run", hf))
    assert first == second and "model.hf = " in first and "lacks model.layers.0.self_attn.k_norm.weight" in first
    assert not (tmp_path / "run/checkpoints").exists()
    wide = tmp_path / "wide"
    shutil.copytree(other, wide)
    described = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**described, "vocab_size": described["vocab_size"] + 64}))
    taught = {"rl__teacher": str(wide), "rl__advantages": {"name": "grpo", "teacher_kl": {"coefficient": 1.0}}}
    [message] = run_world(1, refused, arguments(tmp_path / "taught", other, **taught))
    assert (
        f"the teacher {wide} has {described['vocab_size'] + 64} vocabulary entries" in message
        and "cut or pad embed_tokens" in message
    )
    sizes = {"layers": 1, "hidden": 16, "heads": 2}
    [message] = run_world(1, refused, arguments(tmp_path / "init", hf, model=sizes, run__init_from=str(other)))
    assert "is a Hugging Face folder, not a checkpoint" in message and f"set model: {{hf: {other}}} instead" in message
    learned = {"layers": 1, "hidden": 16, "heads": 2, "position": "learned_absolute"}
    run_arguments = arguments(tmp_path / "learned", hf, model=learned)
    run_world(1, train_rows, run_arguments)
    checkpoint = str(tmp_path / "learned/checkpoints/step_000002")
    [message] = run_world(1, refused, run_arguments, checkpoint, str(tmp_path / "out"))
    assert "none of Hugging Face's llama" in message and not (tmp_path / "out").exists()


def refused(rank: int, given: list[str], checkpoint: str | None = None, out: str = "") -> str:
    """The message with which a run, or the export of a checkpoint, is refused."""
    try:
        if checkpoint is None:
            train_rows(rank, given)
        else:
            export(rank, given, checkpoint, out)
    except ValueError as error:
        return str(error)
    return "was taken"


@pytest.mark.slow
def test_the_command_exports_what_was_drawn_here(tmp_path: Path) -> None:
    """A model of the trainer's own that is a llama; its end token is told to engines."""
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "position": "rope", "gated": True}
    given = arguments(tmp_path / "run", tmp_path, model=sizes)
    run_world(1, train_rows, given)
    checkpoint, out = tmp_path / "run/checkpoints/step_000002", tmp_path / "out"
    words = ["export", str(checkpoint), str(out), "--parallel.tensor", "2"]
    (status, screen, errors), second = run_world(2, run_command, words)
    assert status == 0 and screen.endswith(f"wrote {out}: config.json, model.safetensors\n"), errors
    assert second == (0, "", "")
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["vocab_size"]) == ("llama", 2, 15)
    [again] = run_world(1, refused, given, str(checkpoint), str(out))
    assert "exists already and is not overwritten" in again
