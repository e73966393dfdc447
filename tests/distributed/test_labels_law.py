"""Pre-shifted labels and fields in place of token-aligned ones, any layout, the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl import LossFn, Metrics, NLLLoss, PRMLossFn, Statistics, ValueLossFn, count_valid
from parallel_rl.layout import CPLayout
from parallel_rl.losses import Requirements
from parallel_rl.losses.core.call import LossCall, LossFunction
from parallel_rl.losses.core.component import Component, ComponentsLoss
from parallel_rl.testing import layouts
from parallel_rl.testing.cases import EVERY_AXIS, Case, Trial
from parallel_rl.testing.check import list_faults
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.testing.step import check_world
from tests.distributed import law, law_references

preload("tests.distributed.law", "tests.distributed.test_labels_law")


def shifted(data: Mapping[str, Tensor], needs: Requirements) -> dict[str, Tensor]:
    """The same data, every column at the position that predicts its token, without input_ids and token_mask."""
    found = {}
    for name, x in data.items():
        stays = x.dim() == 1 or needs.field(name).alignment == "predictor" or needs.field(name).per == "local"
        found[name] = x if stays else x.roll(-1, 1)
        if not stays and (name.endswith("_mask") or name == "token_weights"):
            found[name] = found[name].clone()
            found[name][:, -1] = 0
    mask = found.pop("token_mask").bool()
    ids = found.pop("input_ids")
    unscored = not any(name.endswith("_mask") and name != "sample_mask" for name in found)
    if unscored:
        return {**found, "shift_labels": torch.where(mask, ids, -100)}
    return {**found, "shift_labels": ids, "token_mask": mask}  # components score tokens beyond the mask


@dataclass(frozen=True, eq=False)
class OnShiftedLabels:
    """A case whose loss gets pre-shifted data."""

    case: Case

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def axes(self) -> frozenset[str]:
        return EVERY_AXIS

    def build(
        self, *, vocab_size: int | None = None, cp_layout: CPLayout = "zigzag", consume_logits: bool = False
    ) -> LossFunction:
        return _Shifted(self.case.build(vocab_size=vocab_size, cp_layout=cp_layout, consume_logits=consume_logits))


class _Shifted(LossFunction):
    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn

    @property
    def requirements(self) -> Requirements:
        return self.loss_fn.requirements

    @property
    def components(self) -> tuple[Component, ...]:
        return self.loss_fn.components if isinstance(self.loss_fn, ComponentsLoss) else ()

    def _data(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = {"input_ids", "token_mask", "sample_mask", *self.requirements.given(data).names}
        names |= {"kept_ids", "temperature"} & data.keys()
        return shifted({name: data[name] for name in names}, self.requirements)

    def run(self, call: LossCall) -> tuple[Tensor, Metrics]:
        return self.loss_fn.run(replace(call, data=self._data(call.data)))

    def run_collect(self, call: LossCall) -> Statistics:
        return self.loss_fn.run_collect(replace(call, data=self._data(call.data)))

    def count(
        self,
        batches: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        data_parallel_group: ProcessGroup | None = None,
    ) -> Statistics:
        return self.loss_fn.count([self._data(data) for data in batches], data_parallel_group)  # type: ignore[arg-type]


# every loss, and each way to truncate: what more options read is shifted by the same lines
CASES = [case for case in (*law.CORE, *law.TRUNCATED[:5:2]) if case.loss not in ("prm", "value", "preference")]


@cache
def _trials(first: int, step: int) -> list[Trial]:
    found = []
    for case in CASES[first::step]:
        batch = law_references.batch_of(case)
        found.append(Trial(OnShiftedLabels(case), batch, law_references.expected(case, batch)))
    return found


# cut and packed with padding; data ranks and padded rows; a contiguous cut of packed rows; and uncut packed rows, padded rows:
# each case on one of the layouts of four ranks and on both of one process
RUNS = [
    *((layout, first, 3) for first, layout in enumerate(layouts.layouts(4, 3))),
    *((layout, 0, 1) for layout in layouts.layouts(1)[1:3]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "first", "step"), RUNS, ids=[layout.name for layout, *_ in RUNS])
def test_pre_shifted_labels_give_the_same_numbers(layout: layouts.Layout, first: int, step: int) -> None:
    trials, wrong = _trials(first, step), []
    per_rank = run_world(layout.world, check_world, [layout], trials, torch.float64, timeout=300)
    for trial, entries in zip(trials, zip(*per_rank, strict=True), strict=True):
        found = list_faults(trial, {layout.name: [outcome for *_, outcome in entries]}, 1e-10)
        wrong += [f"{trial.case.name}: {fault}" for fault in found]
    assert wrong == []


def test_labels_alone_are_enough() -> None:
    """torchtitan's call: logits and labels; no row of logits is added, and no column is left out of the counts."""
    logits = torch.randn(1, 5, 7, dtype=torch.float64)
    data = {"shift_labels": torch.tensor([[3, -100, 6, 0, -100]])}
    seqs, toks = count_valid(data)
    assert (int(seqs), int(toks)) == (1, 3)
    want = torch.nn.functional.cross_entropy(logits[0], data["shift_labels"][0])
    torch.testing.assert_close(NLLLoss()(logits, data, seqs, toks)[0], want)


def test_labels_that_do_not_fit() -> None:
    logits = torch.zeros(1, 3, 7)
    for labels in (torch.zeros(1, 3), torch.zeros(3, dtype=torch.int64), 3):
        with pytest.raises(ValueError, match=r"shift_labels must be integers \[B, S\], -100 where nothing is scored"):
            NLLLoss()(logits, {"shift_labels": labels}, 1, 1)
    labels = torch.zeros(1, 3, dtype=torch.int64)
    unlabelled = {"shift_labels": torch.where(torch.arange(3) == 1, -100, labels), "token_mask": torch.ones(1, 3)}
    with pytest.raises(
        ValueError, match=r"token_mask is 1 at \[0, 1\], where shift_labels is -100: .* shift token_mask like"
    ):
        NLLLoss()(logits, {**unlabelled, "sample_mask": torch.ones(1)}, 1, 3)
    with pytest.raises(ValueError, match="the position that holds a token, which predicts no token; give input_ids"):
        prm = PRMLossFn({"placeholder_token_id": 1})
        prm(logits, {"shift_labels": labels}, 1, 1, statistics=Statistics({"steps": torch.ones(())}))
    with pytest.raises(ValueError, match="ValueLossFn reads a scalar head's output, which predicts no token"):
        ValueLossFn()(logits[..., :1], {"shift_labels": labels}, 1, 1)
