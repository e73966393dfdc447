"""Pre-shifted labels: column t of the data belongs to what position t predicts (torchtitan; Hugging Face under CP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

SHIFT_LABELS = "shift_labels"
IGNORED = -100


def is_shifted(data: Mapping[str, object]) -> bool:
    """Return whether the data has pre-shifted labels."""
    return SHIFT_LABELS in data


def with_labels(data: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Use pre-shifted labels as `input_ids`, with masks if the data has none; keep other data.

    >>> data = with_labels({"shift_labels": torch.tensor([[7, -100]])})
    >>> data["input_ids"].tolist(), data["token_mask"].tolist(), data["sample_mask"].tolist()
    ([[7, -100]], [[True, False]], [True])
    """
    labels = data.get(SHIFT_LABELS)
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or "input_ids" in data:
        return data
    masks = {"token_mask": labels != IGNORED, "sample_mask": labels.new_ones(len(labels), dtype=torch.bool)}
    return {**masks, **data, "input_ids": labels}


def check_labels(data: Mapping[str, object]) -> None:
    """Check pre-shifted labels: integers [B, S], without other `input_ids`; else ValueError."""
    if not is_shifted(data):
        return
    labels = data[SHIFT_LABELS]
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or labels.is_floating_point():
        got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise ValueError(f"{SHIFT_LABELS} must be integers [B, S], {IGNORED} where nothing is scored, got {got}")
    if data.get("input_ids", labels) is not labels:
        raise ValueError(
            f"data has input_ids and {SHIFT_LABELS}, and each says what is scored; give input_ids, whose column t describes "
            f"token t, or {SHIFT_LABELS}, whose column t describes what position t predicts"
        )
