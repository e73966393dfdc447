"""A folder in, transformers' logits, the same bits out, on every layout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_rl.testing.pool import run_world
from tests.launch import UNCOMPILED
from tests.megatron.hf.cases import BOUND, Layout, apart, layout, round_trip, whole_logits
from tests.megatron.hf.golden import CASES, weights, write_folder
from tests.training.helpers import ROOT

pytest.importorskip("megatron.core")
pytest.importorskip("safetensors")

MOE = [name for name in CASES if "moe" in name]
DENSE = [name for name in CASES if "moe" not in name]
DENSE_LAYOUTS = {
    2: [Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)],
    4: [Layout(tp=2, pp=2), Layout(tp=4), Layout(tp=4, sp=True), Layout(tp=2, cp=2, sp=True), Layout(pp=2, cp=2)],
    8: [Layout(tp=4, pp=2, sp=True), Layout(tp=2, pp=2, cp=2, sp=True)],
}
EXPERT_LAYOUTS = {
    2: [Layout(ep=2), Layout(tp=2, sp=True), Layout(tp=2, etp=2, sp=True), Layout(tp=2, ep=2, sp=True)],
    4: [Layout(ep=4), Layout(pp=2, cp=2, ep=2), Layout(tp=2, cp=2, ep=4, sp=True), Layout(tp=2, ep=2, etp=2, sp=True)],
    8: [Layout(tp=2, pp=2, ep=4, sp=True), Layout(tp=2, pp=2, cp=2, ep=2, etp=2, sp=True)],
}


def check(names: list[str], tmp_path: Path, layouts: list[Layout], version: str = "5", files: int = 2) -> None:
    from safetensors.torch import load_file

    folders = [
        (name, str(write_folder(name, tmp_path / version / name, version=version, files=files))) for name in names
    ]
    out = tmp_path / "out" / version
    for wrong in run_world(layouts[0].world, round_trip, folders, str(out), layouts, timeout=300.0):
        assert wrong == []
    for name in names:
        for number, sizes in enumerate(layouts):
            left = weights(name)
            for file in (out / name / str(number)).glob("*.safetensors"):
                for key, tensor in load_file(file).items():
                    assert torch.equal(tensor, left.pop(key)), (name, sizes, key)
            assert left == {}, (name, sizes)


def test_every_family_on_one_process(tmp_path: Path) -> None:
    """Names, orders of rows, rotary positions and experts of each family, in both spellings of config.json."""
    check(list(CASES), tmp_path, [Layout()], "4", files=1)
    check(["llama31", "qwen3", "qwen3_moe"], tmp_path, [Layout()], "5", files=3)


@pytest.mark.slow
def test_the_loop_of_the_page_runs(tmp_path: Path) -> None:
    """From the start of a process: what a rank's own call needs before it, the pool's ranks have already."""
    [code] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "hf.md").read_text(encoding="utf-8"), re.M | re.S)
    folder, out = write_folder("qwen3", tmp_path / "qwen3"), tmp_path / "out"
    code = code.replace("/models/Qwen3-0.6B", str(folder)).replace("out/step_100", str(out)).replace("pp=2", "pp=1")
    (tmp_path / "loop.py").write_text(f"send = lambda name, tensor: print(name, flush=True)\n{code}")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "loop.py"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **UNCOMPILED}
    done = subprocess.run(run, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in weights("qwen3"))
    assert (out / "model.safetensors").exists()


def test_tensor_and_pipeline_ranks_and_experts(tmp_path: Path) -> None:
    """The layouts that stand for the others: each rank reads its own rows alone, tied embeddings are on two stages."""
    check(["qwen3_tied", "qwen2"], tmp_path / "dense", [Layout(tp=2, pp=2, sp=True)])
    check(["qwen3_moe"], tmp_path / "moe", [Layout(tp=2, pp=2, ep=2, sp=True)])


@pytest.mark.slow
@pytest.mark.parametrize("world", DENSE_LAYOUTS)
def test_every_dense_family_in_every_world(world: int, tmp_path: Path) -> None:
    """Key-value heads below the tensor ranks, context ranks; each layout has every second family, a world has all."""
    for number, sizes in enumerate(DENSE_LAYOUTS[world]):
        check(DENSE[number % 2 :: 2], tmp_path / str(number), [sizes])


@pytest.mark.slow
@pytest.mark.parametrize("world", EXPERT_LAYOUTS)
def test_experts_on_every_layout(world: int, tmp_path: Path) -> None:
    """Experts in other groups than attention: fewer ranks share a matrix, data and context ranks share experts out."""
    check(MOE, tmp_path, EXPERT_LAYOUTS[world])


@pytest.mark.slow
def test_the_chunks_of_a_virtual_pipeline(tmp_path: Path) -> None:
    """A stage holds layers that do not follow one another."""
    check(["llama"], tmp_path, [Layout(pp=2, virtual_pp=2)])


def test_what_is_wrong_shows_in_the_logits(tmp_path: Path) -> None:
    """The bound does not hold with keys for values, without 3.1's scaling, with another base or other weights of experts."""
    folders = {name: str(write_folder(name, tmp_path / name)) for name in ("llama31", "qwen3_moe")}
    unscaled = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    changed = {
        "unscaled": write_folder("llama31", tmp_path / "unscaled", **unscaled),
        "base": write_folder("qwen3_moe", tmp_path / "base", rope_parameters={"rope_theta": 2e6}),
        "raw": write_folder("qwen3_moe", tmp_path / "raw", norm_topk_prob=False),
    }
    [found] = run_world(1, _with_faults, folders, {name: str(path) for name, path in changed.items()})
    assert found.pop("right") < BOUND
    assert {name: off for name, off in found.items() if off < 100 * BOUND} == {}


def _with_faults(rank: int, folders: dict[str, str], changed: dict[str, str]) -> dict[str, float]:
    from parallel_rl.megatron.hf import load, load_hf

    found = {}
    names = {"right": "llama31", "unscaled": "llama31", "base": "qwen3_moe", "raw": "qwen3_moe"}
    with layout(Layout()):
        for fault, name in names.items():
            found[fault] = apart(whole_logits(load_hf(changed.get(fault, folders[name]))), name)
        right = load.table
        swap = {"k_proj": "v_proj", "v_proj": "k_proj"}

        def swapped(*args: object, **options: object) -> dict:
            def other(piece):
                for key, value in swap.items():
                    if key in piece.name:
                        return replace(piece, name=piece.name.replace(key, value))
                return piece

            sources = right(*args, **options)
            return {key: replace(one, rows=tuple(map(other, one.rows))) for key, one in sources.items()}

        load.table = swapped
        try:
            found["keys for values"] = apart(whole_logits(load_hf(folders["llama31"])), "llama31")
        finally:
            load.table = right
    return found


def test_what_is_loaded_is_not_drawn_first(tmp_path: Path) -> None:
    """A large model would take minutes to draw, on every rank, for nothing."""
    [(loaded, built)] = run_world(1, _draws, str(write_folder("qwen3_moe", tmp_path / "model")))
    assert loaded == 0 and built > 0


def _draws(rank: int, folder: str) -> tuple[int, int]:
    from torch.overrides import TorchFunctionMode

    from parallel_rl import megatron as M
    from parallel_rl.megatron.hf import load_hf

    class Count(TorchFunctionMode):
        draws = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.draws += getattr(func, "__name__", "").strip("_") in ("normal", "uniform", "randn", "rand")
            return func(*args, **(kwargs or {}))

    with layout(Layout()):
        with Count() as loading:
            load_hf(folder)
        with Count() as building:
            M.build_model(M.build_config(num_layers=1, hidden_size=16, num_attention_heads=2), 8, 4)
    return loading.draws, building.draws


def test_config_json_survives_and_says_the_dtype(tmp_path: Path) -> None:
    """What is not read, end tokens for instance, is given back as it was; the weights are in the model's dtype."""
    folder = write_folder("mistral", tmp_path / "model", eos_token_id=[7, 9], custom={"key": 1})
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    run_world(1, _in_bfloat16, str(folder), str(tmp_path / "out"))
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert after == {**before, "dtype": "bfloat16"}
    assert (tmp_path / "out/generation_config.json").read_text() == '{"eos_token_id": [7, 9]}'
    from safetensors.torch import load_file

    for key, tensor in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(tensor, weights("mistral")[key].bfloat16()), key


def _in_bfloat16(rank: int, folder: str, out: str) -> None:
    from parallel_rl.megatron import wrap_model
    from parallel_rl.megatron.hf import load_hf, save_hf

    with layout(Layout()):
        [model] = load_hf(folder, dtype=torch.bfloat16)
        save_hf(wrap_model(model), out, companions=folder)


def test_a_scalar_head_in_place_of_logits(tmp_path: Path) -> None:
    """A critic and a reward model start from a policy's folder, tied or not; a reward model's own folder has its head."""
    for name in ("qwen3", "qwen3_tied"):
        run_world(2, _reward_model, name, str(write_folder(name, tmp_path / name)), str(tmp_path / f"{name} reward"))
        config = json.loads((tmp_path / f"{name} reward/config.json").read_text())
        assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1


def _reward_model(rank: int, name: str, folder: str, out: str) -> None:
    from parallel_rl.megatron.hf import export_tensors, load_hf, save_hf

    with layout(Layout(pp=2)):
        models = load_hf(folder, scalar_head=True)
        tensors = {key: tensor.clone() for key, tensor in export_tensors(models)}
        right = weights(name)
        right.pop("lm_head.weight", None)
        assert not tensors.pop("score.weight").any()
        assert tensors.keys() == right.keys() and all(torch.equal(tensors[key], right[key]) for key in right)
        if rank == 1:
            with torch.no_grad():
                models[0].output_layer.weight.fill_(0.5)
        save_hf(models, out)
        assert (dict(export_tensors(load_hf(out, scalar_head=True)))["score.weight"] == 0.5).all()
