"""What is wrong with a folder is an error on all ranks alike, before anything is read into a model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallel_rl.testing.pool import run_world
from tests.megatron.hf.cases import Layout, layout
from tests.megatron.hf.golden import write_folder

pytest.importorskip("megatron.core")
pytest.importorskip("safetensors")

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _no_weights(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()


def _pickle_only(path: Path) -> None:
    _no_weights(path)
    torch.save({"a": torch.zeros(1)}, path / "pytorch_model.bin")


def _cut_short(path: Path) -> None:
    data = (path / SECOND).read_bytes()
    (path / SECOND).write_bytes(data[:-100])


def _not_safetensors(path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, path / SECOND)


def _index(path: Path, change: Callable[[dict], None]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def _outside(path: Path) -> None:
    shutil.copy(path / SECOND, path.parent / SECOND)
    _index(path, lambda places: places.update({key: f"../{SECOND}" for key, file in places.items() if file == SECOND}))


def _dangling_link(path: Path) -> None:
    (path / SECOND).unlink()
    (path / SECOND).symlink_to(path / "gone")


def _tensors(path: Path, change: Callable[[dict], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / FIRST) | load_file(path / SECOND)
    _no_weights(path)
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def _config(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))

    return change


NORM, GATE = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight"
WINDOW = {"model_type": "mistral", "sliding_window": 128}
#: what is done to a whole folder, and what the message names
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (_no_weights, "has no weights"),
    "a pickle": (_pickle_only, "pytorch_model.bin, a pickle, which is never opened"),
    "cut short": (_cut_short, f"{SECOND} is not a whole safetensors file"),
    "not safetensors": (_not_safetensors, f"{SECOND} is not a whole safetensors file"),
    "a missing file": (lambda path: (path / SECOND).unlink(), f"names '{SECOND}', which is missing"),
    "a dangling link": (_dangling_link, f"names '{SECOND}', which is missing"),
    "outside": (_outside, "which is not a safetensors file of this folder"),
    "a misplaced tensor": (
        lambda path: _index(path, lambda places: places.update({NORM: FIRST if places[NORM] == SECOND else SECOND})),
        f"places {NORM} in",
    ),
    "an index of nothing": (lambda path: (path / INDEX).write_text("{}"), "has no weight_map"),
    "a missing tensor": (lambda path: _tensors(path, lambda found: found.pop(NORM)), f"lacks {NORM}"),
    "an unread tensor": (
        lambda path: _tensors(path, lambda found: found.update(extra=torch.zeros(2))),
        "holds tensors that this model would not read: extra",
    ),
    "another shape": (
        lambda path: _tensors(path, lambda found: found.update({GATE: torch.zeros(95, 64)})),
        f"{GATE} has shape [95, 64]; config.json means [96, 64]",
    ),
    "integers": (
        lambda path: _tensors(path, lambda found: found.update({NORM: torch.zeros(64, dtype=torch.int8)})),
        f"{NORM} is I8",
    ),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json cannot be read"),
    "not JSON": (lambda path: (path / "config.json").write_text("{"), "is not JSON"),
    "an unknown family": (_config(model_type="gemma3"), "model_type = 'gemma3' is not known"),
    "other converters": (_config(model_type="gpt_oss"), "mbridge and Megatron-Bridge convert more models"),
    "YaRN": (_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope_type = 'yarn' is not supported"),
    "a sliding window": (_config(**WINDOW), "sliding_window = 128 below max_position_embeddings = 512"),
    "a window by default": (_config(model_type="mistral", max_position_embeddings=8192), "sliding_window = 4096 below"),
    "qwen's window": (
        _config(use_sliding_window=True, sliding_window=9, max_window_layers=1),
        "sliding_window = 9 below",
    ),
    "an attention bias": (_config(attention_bias=True), "attention_bias = true is not supported"),
    "an MLP's bias": (_config(mlp_bias=True), "mlp_bias = true is not supported"),
    "another activation": (_config(hidden_act="gelu"), "hidden_act = 'gelu' is not supported"),
    "quantised": (_config(quantization_config={"bits": 4}), "quantization_config is not supported"),
    "dense layers": (
        _config(
            model_type="qwen3_moe", mlp_only_layers=[0], num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2
        ),
        "dense layers among the experts",
    ),
    "tied, but not equal": (_config(tie_word_embeddings=True), "lm_head.weight is not model.embed_tokens.weight"),
    "heads": (_config(num_attention_heads=3, num_key_value_heads=1, head_dim=16), "q_proj.weight has shape [128, 64]"),
}


def test_bad_folders_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for name, (break_it, _) in FAULTS.items():
        path = write_folder("qwen3", tmp_path / name / "model", files=2)
        if name == "a window by default":
            _config()(path)
            config = json.loads((path / "config.json").read_text())
            del config["sliding_window"]
            (path / "config.json").write_text(json.dumps(config))
        break_it(path)
    folders = {name: str(tmp_path / name / "model") for name in FAULTS}
    first, second = run_world(2, _messages, folders)
    assert first == second
    wrong = {name: first[name] for name, (_, part) in FAULTS.items() if part not in first[name]}
    assert wrong == {}


def _messages(rank: int, folders: dict[str, str]) -> dict[str, str]:
    from parallel_rl.megatron.hf import load_hf

    found = {}
    with layout(Layout(tp=2)):
        for name, path in folders.items():
            try:
                load_hf(path)
                found[name] = "was loaded"
            except ValueError as error:
                found[name] = str(error)
    return found


def _from_its_node(rank: int, name: str, nodes: str) -> str:
    """A folder that is not absolute, below the working folder of each node."""
    from parallel_rl.megatron.hf import load_hf

    here = Path.cwd()
    os.chdir(Path(nodes) / str(rank))
    try:
        with layout(Layout()):
            load_hf(name)
        return "was loaded"
    except ValueError as error:
        return str(error)
    finally:
        os.chdir(here)


def test_nodes_that_hold_different_weights_are_refused(tmp_path: Path) -> None:
    """A model that was fetched to each node's disk, once in a later revision: data ranks trained different models, unsaid."""
    for node in ("0", "1"):
        for name in ("same", "other"):
            write_folder("qwen3", tmp_path / node / name, files=2)
    for node, factor in (("0", 1.0), ("1", 1.01)):
        _tensors(tmp_path / node / "other", lambda found, factor=factor: found[NORM].mul_(factor))
    assert run_world(2, _from_its_node, "same", str(tmp_path)) == ["was loaded"] * 2
    refused = (
        "other does not hold the same weights on all nodes: data ranks would train different models; choose a folder that all "
        "nodes share"
    )
    assert run_world(2, _from_its_node, "other", str(tmp_path)) == [refused] * 2


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A folder that holds something stays as it is; one that could not be finished does not appear."""
    folder = write_folder("qwen3", tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    first, second = run_world(2, _unwritten, str(folder), str(tmp_path))
    assert first == second
    assert "full exists already and is not overwritten" in first["full"]
    assert first["empty"] == "written"
    assert "disk could not be written: rank 0: OSError: no space left" in first["disk"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "model"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def _unwritten(rank: int, folder: str, out: str) -> dict[str, str]:
    from parallel_rl.megatron.hf import load_hf, save, save_hf

    def broken(*args: object) -> None:
        raise OSError("no space left")

    found = {}
    with layout(Layout(tp=2)):
        models = load_hf(folder)
        for name in ("full", "empty", "disk"):
            right, save._write_file = save._write_file, broken if name == "disk" else save._write_file
            try:
                save_hf(models, f"{out}/{name}")
                found[name] = "written"
            except (ValueError, RuntimeError) as error:
                found[name] = str(error)
            finally:
                save._write_file = right
    return found
