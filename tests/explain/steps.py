"""Dumped steps for the tests."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import torch
from torch import Tensor

from parallel_rl import count_valid, token_logprobs
from parallel_rl.explain import Step, StepInfo, dump_step, read_step
from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.cases import Case, step_statistics
from parallel_rl.verify.words import _NEEDED


def of_loss(folder: Path, name: str, options: dict | None = None) -> Step:
    """A dumped step of a registered loss, with every field, ragged rows, masked ones and an empty one."""
    case = Case(name, {**_NEEDED.get(name, {}), **(options or {})})
    batch = make_batch(1, False, name, torch.float64)
    data = {**batch.data, "lengths": torch.tensor(batch.lengths)}
    call = (batch.logits.clone().requires_grad_(), data, *count_valid(data))
    loss_fn = case.build()
    statistics = step_statistics([(loss_fn, call)])
    with dump_step(folder, loss_fn, info=StepInfo(name)) as recording:
        recording(*call, statistics=statistics)
    return read_step(folder)


def policy_batch(rows: int = 6, width: int = 20, vocab: int = 11, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Prompts of four tokens, ragged responses, a row that is left out, both signs of advantages, far ratios."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, vocab, generator=g, dtype=torch.float64)
    lengths = torch.randint(8, width + 1, (rows,), generator=g)
    column = torch.arange(width)
    data = {
        "input_ids": torch.randint(vocab, (rows, width), generator=g),
        "token_mask": ((column >= 4) & (column < lengths[:, None])).double(),
        "sample_mask": torch.ones(rows),
        "advantages": torch.randn(rows, generator=g).double()[:, None].expand(rows, width).clone(),
        "lengths": lengths,
        "sample_ids": torch.arange(rows) + 100,
        "rewards": torch.rand(rows, generator=g).double(),
    }
    data["sample_mask"][2] = 0
    data["advantages"][3] = 0
    own = token_logprobs(logits, data)
    for name, scale in (("prev_logprobs", 0.3), ("generation_logprobs", 0.5), ("reference_policy_logprobs", 0.4)):
        data[name] = (own + scale * torch.randn(rows, width, generator=g).double()).clamp(max=0)
    return logits, data


def dumped(
    folder: Path, loss_fn: LossFn, logits: Tensor, data: dict[str, Tensor], info: StepInfo | None = None
) -> Step:
    """A dumped step on one process."""
    with dump_step(folder, loss_fn, info=info) as recording:
        recording(logits, data, *count_valid(data))
    return read_step(folder)


class Tables(HTMLParser):
    """The tables of a page: caption → name of the row → exact numbers (None: no number)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[str, dict[str, list[float | None]]] = {}
        self._into, self._text, self._row, self._head = "", "", "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("caption", "th"):
            self._into, self._text = tag, ""
        elif tag == "td" and self._row:
            value = dict(attrs).get("data-v")
            self.found[self._caption][self._row].append(None if value is None else float(value))
        elif tag in ("tr", "thead", "tbody"):
            self._row, self._head = "", tag == "thead" or (tag == "tr" and self._head)

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self._caption = self._text
            self.found[self._caption] = {}
        elif tag == "th" and not self._head:
            self._row = self._text
            self.found[self._caption][self._row] = []
