"""Checkpoints that somebody made to do harm: nothing in them runs, nothing outside them is read or removed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.testing.pool import run_world
from parallel_rl.training.checkpointing import storage
from parallel_rl.training.checkpointing.checkpoint import fill_weights
from parallel_rl.training.checkpointing.manifest import MANIFEST, DamagedCheckpoint, checksum, read_manifest
from parallel_rl.training.checkpointing.sharded import check_pickles
from tests.training.checkpointing.saves import Small, arguments, snapshot


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.proof),)


def _seal(path: Path, change: Callable[[dict], object] = lambda body: None) -> None:
    """The manifest anew, as whoever writes the folder can."""
    body = json.loads(json.loads((path / MANIFEST).read_text())["body"])
    for name in body["files"]:
        if (path / name).exists():
            entry = checksum(path / name)
            body["files"][name] = {"size": entry.size, "sha256": entry.sha256}
    change(body)
    text = json.dumps(body, sort_keys=True)
    (path / MANIFEST).write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}))


def _in_index(path: Path, proof: Path) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = Evil(proof)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def _in_common(path: Path, proof: Path) -> None:
    torch.save({"evil": Evil(proof)}, path / "common.pt")


def _in_object(path: Path, proof: Path) -> None:
    """In a random state, which lies among the tensors of a rank."""
    index = pickle.loads((path / ".metadata").read_bytes())
    [(entry, where)] = [(key, place) for key, place in index.storage_data.items() if key.fqn == "random/shard_0_1"]
    buffer = io.BytesIO()
    torch.save(Evil(proof), buffer)
    file = path / where.relative_path
    index.storage_data[entry] = type(where)(where.relative_path, file.stat().st_size, len(buffer.getvalue()))
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(index))


def _out_of_the_folder(path: Path, proof: Path) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    entry, where = next(iter(index.storage_data.items()))
    shutil.copy(path / where.relative_path, path.parent / "elsewhere")
    index.storage_data[entry] = type(where)("../elsewhere", where.offset, where.length)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def _other_backend(path: Path, proof: Path) -> None:
    settings = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps({**settings, "sharded_backend": "zarr"}))


ATTACKS = {
    "index": (_in_index, "posix.mkdir, which is no part of an index; it could run code"),
    "common": (_in_common, "common.pt: "),
    "object": (_in_object, "'random/shard_0_1' in __0_0.distcp: "),
    "outside": (_out_of_the_folder, "lies in '../elsewhere'"),
    "backend": (_other_backend, "'zarr'"),
}


def _attacked(rank: int, given: list[str]) -> list[str]:
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.trainer import train

    small, found = Small(given), []
    good, proof = small.save(1), small.folder.parent / "proof"
    check_pickles(good)
    for name, (attack, _) in ATTACKS.items():
        path = good.with_name(name)
        shutil.copytree(good, path)
        attack(path, proof)
        _seal(path)
        new = small.folder.parent / f"new_{name}"
        with pytest.raises(ValueError) as refusal:
            train(load_config(given[0], [*given[1:], f"--run.dir={new}", f"--run.init_from={path}"]))
        found.append(str(refusal.value))
        assert not proof.exists(), name
    shutil.rmtree(good)
    good.with_name("index").rename(good)  # and where a run would go on from it
    with pytest.raises(ValueError, match="could run code"):
        small.load()
    assert not proof.exists()
    dist.barrier()
    return found


def test_no_pickle_of_a_strangers_checkpoint_runs(tmp_path: Path) -> None:
    """The checksums of each folder are right: only what its pickles name tells it from a good one."""
    [found] = run_world(1, _attacked, arguments(tmp_path))
    for text, (name, (_, words)) in zip(found, ATTACKS.items(), strict=True):
        assert words in text and "is not loaded" in text, name


class Engine(torch.nn.Linear):
    """A layer with a state of its own, as Transformer Engine's up to 2.16 have."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        pickle.loads(state.numpy().tobytes())


def test_no_pickle_in_a_layer_s_own_state_runs(tmp_path: Path) -> None:
    """It lies in a tensor of bytes, which no look at the checkpoint's own pickles sees through."""
    layer = torch.nn.Sequential(Engine(2, 2, bias=False))
    state = {"0.weight": torch.ones(2, 2), "0._extra_state": torch.tensor(list(pickle.dumps(Evil(tmp_path / "proof"))))}
    fill_weights(layer, {**state, "0._extra_state": state["0._extra_state"].to(torch.uint8)})
    assert layer[0].weight.tolist() == [[1, 1], [1, 1]] and not (tmp_path / "proof").exists()
    for wrong, words in (
        ({}, r"lacks the model's weights \['0.weight'\]"),
        ({**state, "1": 0}, r"has the weights \['1'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            fill_weights(layer, wrong)


MANIFESTS: dict[str, tuple[Callable[[dict], object], str]] = {
    "no file": (lambda body: body["files"].clear(), "it lists no file"),
    "one file less": (
        lambda body: body["files"].pop("common.pt"),
        "holds common.pt, which manifest.json does not list",
    ),
    "a path outside": (
        lambda body: body["files"].update({"../x": {"size": 0, "sha256": ""}}),
        "'../x' is not the name",
    ),
    "itself": (lambda body: body["files"].update({MANIFEST: {"size": 0, "sha256": ""}}), "is not the name of a file"),
    "a list": (lambda body: body.update(files=[]), "has another shape"),
    "no progress": (lambda body: body["record"].pop("position"), "has another shape"),
    "a step in words": (lambda body: body["record"]["position"].update(step="two"), "'two' is not of type"),
    "one more field": (lambda body: body["record"]["position"].update(more=1), "has another shape"),
    "no format": (lambda body: body.pop("format"), "has another shape"),
    "a deep value": (lambda body: body["record"]["model"].update(layers=[[1]]), "[[1]] is not of type"),
}


def test_a_manifest_of_another_shape_is_damage(tmp_path: Path) -> None:
    """Each is one line that says what is wrong; none a traceback of ours, none taken for a whole checkpoint."""
    good = tmp_path / "step_000001"
    good.mkdir()
    for name in ("common.pt", ".metadata"):
        (good / name).write_bytes(b"content")
    record = {"position": {"phase": "rl", "step": 1, "taken": {}}, "facts": {}, "model": {}, "layout": {"data": 1}}
    body = {"format": 2, "record": {**record, "parts": ["model"]}, "files": {"common.pt": {}, ".metadata": {}}}
    (good / MANIFEST).write_text(json.dumps({"body": json.dumps(body)}))
    _seal(good)
    assert set(read_manifest(good).files) == {"common.pt", ".metadata"}
    for name, (change, words) in MANIFESTS.items():
        path = tmp_path / f"case {name}"
        shutil.copytree(good, path)
        _seal(path, change)
        with pytest.raises(DamagedCheckpoint) as refusal:
            read_manifest(path)
        assert words in str(refusal.value), name
    (good / MANIFEST).write_text("[" * 200_000)
    with pytest.raises(DamagedCheckpoint, match="garbled"):
        read_manifest(good)


def _never_resumed(rank: int, given: list[str]) -> list[str]:
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.trainer import train

    config = load_config(given[0], [*given[1:], "--run.resume=never", "--sft.steps=1"])
    folder, found = Path(config.run.dir), []
    for foreign in ("checkpoints/llama/model.safetensors", "tensorboard/notes.txt", "checkpoints/step_12/weights.bin"):
        (folder / foreign).parent.mkdir(parents=True)
        (folder / foreign).write_text("mine")
        before = snapshot(folder)
        with pytest.raises(ValueError) as refusal:
            train(config)
        found.append(str(refusal.value))
        assert snapshot(folder) == before
        shutil.rmtree((folder / foreign).parent)
    train(config)
    train(config)  # what a run made goes
    return found


@pytest.mark.slow
def test_starting_over_removes_only_what_a_run_made(tmp_path: Path) -> None:
    [found] = run_world(1, _never_resumed, arguments(tmp_path / "run", evaluation="null", data__held_out="null"))
    names = ("checkpoints/llama/model.safetensors", "tensorboard/notes.txt", "checkpoints/step_12/weights.bin")
    for text, name in zip(found, names, strict=True):
        assert f"{name}, which no run made. Nothing was changed" in text


def test_the_names_that_a_run_gives(tmp_path: Path) -> None:
    names = ("step_000001", "step_1000000", "step_000002.damaged", "step_000002.damaged2", ".partial_step_000003")
    for name in (*names, ".replaced_step_000001", ".pruned_step_000001", "step_000004_3.jsonl", "rl_step_000003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert storage.foreign(tmp_path, ["checkpoints", "absent"]) is None
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    assert storage.foreign(tmp_path, ["link"]) == tmp_path / "link"
