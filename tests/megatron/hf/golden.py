"""Folders of tiny models whose logits transformers computed, see tools/hf_golden.py."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from tools.hf_golden import CASES, DATA, draw, tokens

__all__ = ["CASES", "logits", "tokens", "weights", "write_folder"]

INDEX = json.loads((DATA / "golden.json").read_text(encoding="utf-8"))


def weights(name: str) -> dict[str, Tensor]:
    return draw(INDEX[name]["shapes"])


def logits(name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(DATA / "logits.safetensors", framework="pt") as file:
        return file.get_tensor(name)


def write_folder(name: str, path: Path, *, version: str = "5", files: int = 1, **changes: object) -> Path:
    """The folder as transformers of a version writes it, in one file or in several; `changes` are to config.json."""
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    config = {**INDEX[name]["config"][version], **changes}
    (path / "config.json").write_text(json.dumps(config))
    tensors = weights(name)
    if files == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    placed = {}
    for number in range(files):
        part = {key: tensors[key] for key in sorted(tensors)[number::files]}
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file(part, path / file)
        placed |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return path
