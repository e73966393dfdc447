"""Prompts, trajectories and turns that each weigh the same, against sums over lists of their tokens in float64."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import groupby

import pytest
import torch
from torch import Tensor

from parallel_rl import LossFn, count_valid, get_loss
from parallel_rl.testing.batches import UNIT_BASE, make_batch
from tests import reference

Place = tuple[int, int]
FIELDS = {"prompt-mean": "group_ids", "trajectory-mean": "run_ids"}
RULE = {"statistic": "k1", "low": 0.7, "high": 1.4}
KEPT = {"rejection": {"rules": [RULE], "denominator": "kept"}}


def valid_of(data: dict[str, Tensor]) -> Tensor:
    valid = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    valid[:, 0] = False
    return valid


def units_of(mode: str, data: dict[str, Tensor], counts: Tensor) -> list[list[Place]]:
    """The counted tokens of each unit; a prompt or trajectory of valid rows without a token is a unit, too."""
    units: dict[Hashable, list[Place]] = {}
    for row in range(len(counts)):
        if not data["sample_mask"][row]:
            continue
        tokens = [(row, t) for t in range(counts.shape[1]) if valid_of(data)[row, t]]
        if mode == "turn-mean":
            runs = [list(turn) for _, turn in groupby(tokens, lambda place: int(data["segment_ids"][place]))]
            units |= {(row, number): turn for number, turn in enumerate(runs)}
        else:
            units.setdefault(int(data[FIELDS[mode]][row]), []).extend(tokens)
    return [[place for place in unit if counts[place]] for unit in units.values()]


def mean_of_units(losses: Tensor, units: list[list[Place]]) -> Tensor:
    """1/N Σ_units mean of the unit's tokens."""
    means = [sum((losses[place] for place in unit), losses.new_zeros(())) / max(len(unit), 1) for unit in units]
    return torch.stack(means).sum() / max(len(units), 1)


def shares(loss_fn: LossFn, logits: Tensor, data: dict[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, from micro-batches of `size` rows."""
    leaf, counts = logits.clone().requires_grad_(), count_valid(data)
    parts = [
        ({name: value[i : i + size] for name, value in data.items()}, leaf[i : i + size])
        for i in range(0, len(logits), size)
    ]
    statistics = loss_fn.count([part for part, _ in parts]) if loss_fn.needs_statistics else None
    if loss_fn.needs_collect:
        collected = [loss_fn.collect(z, part, *counts) for part, z in parts]
        statistics |= sum(collected[1:], collected[0]).reduce()
    loss = sum(
        (loss_fn(z, part, *counts, statistics=statistics)[0] for part, z in parts), torch.zeros((), dtype=logits.dtype)
    )
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("size", [12, 2])
@pytest.mark.parametrize("mode", ["prompt-mean", "trajectory-mean", "turn-mean"])
@pytest.mark.parametrize("loss", ["nll", "policy", "policy kept", "policy kept, on policy"])
def test_each_unit_weighs_the_same(loss: str, mode: str, size: int) -> None:
    """Over micro-batches; where a rejection counts what it keeps, units of kept tokens. The law's own truth is the loss."""
    logits, data, _ = make_batch(11, False, "policy", torch.float64)
    twin, counted = logits.clone().requires_grad_(), valid_of(data)
    logprobs = reference.logprobs_and_entropy(twin, data["input_ids"])[0]
    config: dict = {"aggregation": mode}
    losses = -logprobs
    if loss != "nll":
        prev = logprobs.detach() if loss.endswith("on policy") else data["prev_logprobs"]
        ratio, advantages = (logprobs - prev).exp(), data["advantages"]
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        if loss != "policy":
            mismatch = prev - data["generation_logprobs"]
            counted = counted & (mismatch >= math.log(0.7)) & (mismatch <= math.log(1.4))
            config |= KEPT | {"on_policy": loss.endswith("on policy")}
    units = units_of(mode, data, counted)
    want = mean_of_units(losses, [unit for unit in units if unit or "kept" not in loss])
    want.backward()
    got, gradient = shares(get_loss(loss.split()[0])(config), logits, data, size)
    torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, twin.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", ["prompt-mean", "trajectory-mean"])
def test_a_row_each_is_the_sequence_and_all_rows_in_one_the_token(mode: str) -> None:
    logits, data, _ = make_batch(2, False, "nll", torch.float64)
    rows = torch.randperm(12) + UNIT_BASE
    for ids, same in ((rows, "seq-mean-token-mean"), (torch.full((12,), 4, dtype=torch.int32), "token-mean")):
        data[FIELDS[mode]] = ids
        for found, want in zip(
            shares(get_loss("nll")({"aggregation": mode}), logits, data, 4),
            shares(get_loss("nll")({"aggregation": same}), logits, data, 12),
            strict=True,
        ):
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)


def test_ids_of_masked_rows_are_of_no_unit() -> None:
    """Neither an id that only they have, nor a valid prompt's, nor a negative one changes a number."""
    logits, data, _ = make_batch(2, False, "nll", torch.float64)
    loss_fn, masked = get_loss("nll")({"aggregation": "prompt-mean"}), data["sample_mask"] == 0
    right = shares(loss_fn, logits, data, 6)
    for there in (int(data["group_ids"][0]), 77, -1):
        moved = {**data, "group_ids": torch.where(masked, there, data["group_ids"])}
        for one, other in zip(shares(loss_fn, logits, moved, 6), right, strict=True):
            assert torch.equal(one, other)


def test_statistics_of_other_data_are_named() -> None:
    """A count that left a micro-batch out would weigh its tokens by themselves, without a word."""
    logits, data, _ = make_batch(2, False, "nll", torch.float64)
    loss_fn, half = get_loss("nll")({"aggregation": "prompt-mean"}), {name: value[:4] for name, value in data.items()}
    with pytest.raises(ValueError, match=r"group_ids = \d+ at \[8\] is not among the units of the statistics; count"):
        loss_fn(logits, data, *count_valid(data), statistics=loss_fn.count(half))
    with pytest.raises(ValueError, match="statistics have no group_ids: they are of another loss"):
        loss_fn(logits, data, *count_valid(data), statistics=get_loss("nll")({"aggregation": "turn-mean"}).count(data))


def test_a_step_of_masked_rows_is_an_exact_zero() -> None:
    logits, data, _ = make_batch(2, False, "nll", torch.float64)
    data["sample_mask"] = torch.zeros(12)
    for mode in ("prompt-mean", "turn-mean"):
        loss, gradient = shares(get_loss("nll")({"aggregation": mode}), logits, data, 6)
        assert loss == 0 and not gradient.any()


def test_the_count_names_a_bad_id() -> None:
    """Before the step, where a forward would still be ahead."""
    _, data, _ = make_batch(2, False, "nll", torch.float64)
    data["group_ids"][7] = -3
    with pytest.raises(ValueError, match=r"group_ids is -3 at \[7\], a valid row"):
        get_loss("nll")({"aggregation": "prompt-mean"}).count(data)
