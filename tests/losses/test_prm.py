"""The process reward loss: labels of every kind, tokens on every shard, and the faults that the field's have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl import ParallelGroups, PRMLossFn, SequencePackingLossWrapper, count_valid
from parallel_rl.testing.batches import PLACEHOLDER, REWARD_IDS, ROWS, VOCAB, make_batch
from parallel_rl.testing.pool import preload, run_world
from tests import reference_heads
from tests.losses.steps import cut, step

preload("parallel_rl", "tests.losses.test_prm")

FULL: dict[str, Any] = {"placeholder_token_id": PLACEHOLDER}
HARD: dict[str, Any] = {**FULL, "reward_token_ids": REWARD_IDS}
SOFT: dict[str, Any] = {**HARD, "soft_labels": True}


def make(config: dict[str, Any], seed: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    batch = make_batch(seed, False, "prm", torch.float64)
    data = dict(batch.data)
    if config.get("soft_labels"):
        ignored = data["reward_labels"] == -100
        p = torch.rand(ignored.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        data["reward_labels"] = torch.where(ignored, -100.0, p)
    return batch.logits, data


def test_by_hand() -> None:
    """Two steps; the logits at the placeholder itself count, ignored and masked ones do not."""
    logits = torch.zeros(1, 5, 4, dtype=torch.float64)
    logits[0, 1] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    logits[0, 3] = torch.tensor([2.0, 0.0, 0.5, -1.0])
    data = {
        "input_ids": torch.tensor([[3, 3, 1, 3, 3]]),
        "token_mask": torch.tensor([[1, 1, 1, 1, 0]]),
        "sample_mask": torch.ones(1),
        "reward_labels": torch.tensor([[-100, 2, 9, 1, 17]]),
    }
    got = step(PRMLossFn({"placeholder_token_id": 3, "reward_token_ids": [2, 1]}), logits, data)
    losses = [math.log(1 + math.exp(1.0 - 2.0)), math.log(1 + math.exp(0.5 - 0.0))]
    assert got.loss == pytest.approx(sum(losses) / 2, rel=1e-14)
    assert got.metrics["accuracy"] == 0.5 and got.metrics["num_steps"] == 2
    whole = step(PRMLossFn({"placeholder_token_id": 3}), logits, data)
    log_p = logits[0].log_softmax(-1)
    assert whole.loss == pytest.approx(-(log_p[1, 2] + log_p[3, 1]).item() / 2, rel=1e-14)
    assert whole.metrics["accuracy"] == 0


@pytest.mark.parametrize("config", [FULL, HARD, SOFT, {**HARD, "reward_token_ids": [2, 5, 19, 0]}], ids=str)
def test_against_a_second_expression(config: dict[str, Any]) -> None:
    logits, data = make(config)
    leaf = logits.clone().requires_grad_()
    want, metrics = reference_heads.prm(leaf, data, config)
    want.backward()
    got = step(PRMLossFn(config), logits, data)
    assert metrics["num_steps"] > 9 and (0 < metrics["accuracy"] < 1 or config == FULL)
    assert got.loss == pytest.approx(want.item(), rel=1e-13)
    assert got.metrics == pytest.approx(metrics, rel=1e-13)
    torch.testing.assert_close(got.gradient, leaf.grad, rtol=1e-12, atol=1e-16)


# Q23, one after the other.


def test_ignored_soft_labels_are_ignored() -> None:
    logits, data = make(SOFT)
    got = step(PRMLossFn(SOFT), logits, data)
    fewer = {**data, "token_mask": data["token_mask"] * (data["reward_labels"] != -100)}
    alone = step(PRMLossFn(SOFT), logits, {**fewer, "reward_labels": data["reward_labels"].clamp(min=0)})
    assert (got.loss, got.metrics) == (alone.loss, alone.metrics)
    ignored = (data["reward_labels"] == -100)[..., None].expand_as(got.gradient)
    assert not got.gradient[ignored].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_soft_labels_may_have_any_floating_dtype(dtype: torch.dtype) -> None:
    logits, data = make(SOFT, dtype=dtype)
    got = step(PRMLossFn(SOFT), logits, data)
    same = step(PRMLossFn(SOFT), logits, {**data, "reward_labels": data["reward_labels"].double()})
    assert data["reward_labels"].dtype == dtype and got.loss == same.loss


@pytest.mark.parametrize("ids", [[1, 0], [0, 1], [2, 0, 1]], ids=str)
def test_small_reward_ids_do_not_collide(ids: list[int]) -> None:
    """A remapping label → place one id after the other turns 1 into 0 and then into 1 again with ids [1, 0]."""
    logits = torch.tensor([[[3.0, 1.0, 0.0], [0.5, 2.0, 0.0], [1.0, 4.0, 2.0]]], dtype=torch.float64)
    data = {
        "input_ids": torch.full((1, 3), 7),
        "token_mask": torch.ones(1, 3),
        "sample_mask": torch.ones(1),
        "reward_labels": torch.tensor([[0, 1, 1]]),
    }
    config = {"placeholder_token_id": 7, "reward_token_ids": ids}
    got = step(PRMLossFn(config), logits, data)
    assert got.loss == pytest.approx(reference_heads.prm(logits, data, config)[0].item(), rel=1e-14)
    assert got.metrics["accuracy"] == 1


@pytest.mark.parametrize("config", [FULL, HARD, SOFT], ids=str)
def test_no_placeholder_is_an_exact_connected_zero(config: dict[str, Any]) -> None:
    logits, data = make(config)
    none = {**data, "input_ids": torch.where(data["input_ids"] == PLACEHOLDER, 0, data["input_ids"])}
    got = step(PRMLossFn(config), torch.full_like(logits, math.nan), none)
    assert got.loss == 0 and not got.gradient.any() and set(got.metrics.values()) == {0.0}
    masked = {**data, "sample_mask": torch.zeros(ROWS)}
    got = step(PRMLossFn(config), torch.full_like(logits, math.nan), masked)
    assert got.loss == 0 and not got.gradient.any()


@pytest.mark.parametrize("config", [FULL, HARD, SOFT], ids=str)
def test_only_the_scored_places_are_read(config: dict[str, Any]) -> None:
    logits, data = make(config)
    right = step(PRMLossFn(config), logits, data)
    scored = (data["input_ids"] == PLACEHOLDER) & (data["reward_labels"] != -100)
    scored &= (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    got = step(PRMLossFn(config), torch.where(scored[..., None], logits, math.nan), data)
    assert (got.loss, got.metrics) == (right.loss, right.metrics)
    torch.testing.assert_close(got.gradient, right.gradient, rtol=0, atol=0)


@settings(max_examples=10, deadline=None)
@given(
    order=st.permutations(range(ROWS)),
    cuts=st.sets(st.integers(1, ROWS - 1)),
    config=st.sampled_from([FULL, HARD, SOFT]),
)
def test_order_and_micro_batches_change_nothing(order: list[int], cuts: set[int], config: dict[str, Any]) -> None:
    """The number of steps is of the whole step, so a micro-batch with few of them weighs little."""
    logits, data = make(config)
    whole = step(PRMLossFn(config), logits, data)
    split = step(PRMLossFn(config), logits, data, cut(order, cuts))
    assert split.loss == pytest.approx(whole.loss, rel=1e-13)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-13)
    torch.testing.assert_close(split.gradient, whole.gradient, rtol=1e-12, atol=1e-16)


def test_temperature() -> None:
    for config in (FULL, HARD, SOFT):
        logits, data = make(config)
        cold = step(PRMLossFn(config, temperature=0.5), logits, data)
        assert cold.loss == pytest.approx(step(PRMLossFn(config), logits * 2, data).loss, rel=1e-13)


def on_two_ranks(rank: int, packed: bool) -> list[tuple[float, float, dict[str, float]]]:
    """Shares, errors of the gradient and metrics on TP 2: reward tokens 19 and 2 lie on different shards."""
    groups, found = ParallelGroups(tensor=dist.group.WORLD), []
    for config in (FULL, HARD, SOFT):
        logits, data = make(config)
        want = step(PRMLossFn(config), logits, data)
        padded = torch.nn.functional.pad(logits, (0, 24 - VOCAB), value=math.nan)
        leaf = padded[..., rank * 12 : rank * 12 + 12].clone().requires_grad_()
        loss_fn = call = PRMLossFn(config, vocab_size=VOCAB)
        head = leaf
        if packed:
            call = SequencePackingLossWrapper(loss_fn, torch.arange(0, leaf[..., 0].numel() + 1, leaf.shape[1]))
            head = leaf.view(1, -1, 12)
        arguments = (head, data, *count_valid(data), rank, groups.tensor)
        loss, metrics = call(*arguments, statistics=call.count(data))
        loss.backward()
        truth = torch.nn.functional.pad(want.gradient, (0, 24 - VOCAB))[..., rank * 12 : rank * 12 + 12]
        assert leaf.grad is not None
        error = (leaf.grad - truth).norm() / want.gradient.norm()
        values = {name: value.item() - want.metrics[name] for name, value in metrics.items()}
        found.append((loss.item() - want.loss, error.item(), values))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_on_different_shards(packed: bool) -> None:
    for of_rank in run_world(2, on_two_ranks, packed):
        for loss, gradient, metrics in of_rank:
            assert abs(loss) < 1e-13 and gradient < 1e-13
            assert all(abs(value) < 1e-13 for value in metrics.values())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "PRMLossConfig needs the key 'placeholder_token_id', which is missing"),
        ({"placeholder_token_id": -1}, "placeholder_token_id = -1 must be a token id"),
        ({**FULL, "reward_token_ids": [3]}, r"reward_token_ids = \[3\] must be two or more different token ids"),
        ({**FULL, "reward_token_ids": [3, 3]}, r"reward_token_ids = \[3, 3\] must be two or more different"),
        ({**FULL, "soft_labels": True}, "soft_labels = True needs exactly two reward_token_ids, .*; got None"),
        ({**SOFT, "reward_token_ids": [1, 2, 3]}, r"needs exactly two reward_token_ids, .*; got \[1, 2, 3\]"),
        ({**HARD, "ignore_index": 2}, "ignore_index = 2 is a label too"),
        ({**FULL, "ignore_index": 5}, "ignore_index = 5 is a label too"),
    ],
    ids=str,
)
def test_configs_that_do_not_do(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PRMLossFn(config)


def with_label(config: dict[str, Any], value: float) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Another label at the first scored placeholder."""
    logits, data = make(config)
    valid = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    place = ((data["input_ids"] == PLACEHOLDER) & valid).nonzero()[0].tolist()
    data["reward_labels"] = data["reward_labels"].clone()
    data["reward_labels"][tuple(place)] = value
    return logits, data, place


@pytest.mark.parametrize(
    ("config", "value", "message"),
    [
        (HARD, 7, "reward_labels = 7 at {}, a placeholder, is neither one of reward_token_ids nor ignore_index = -100"),
        (SOFT, 1.5, "reward_labels = 1.5 at {}, a placeholder, is neither a probability nor ignore_index = -100"),
        (SOFT, -1.0, "reward_labels = -1 at {}, a placeholder, is neither a probability"),
        (SOFT, math.nan, "reward_labels is NaN at {}, a valid place"),
        (FULL, VOCAB, "target 23 at {} lies outside the vocabulary"),
        (FULL, -3, "target -3 at {} lies outside the vocabulary"),
    ],
)
def test_labels_that_do_not_do(config: dict[str, Any], value: float, message: str) -> None:
    logits, data, place = with_label(config, value)
    with pytest.raises(ValueError) as error:
        step(PRMLossFn(config), logits, data)
    assert message.format(place) in str(error.value)


def test_dtypes_and_tokens_that_do_not_do() -> None:
    logits, data = make(HARD)
    with pytest.raises(ValueError, match=r"reward_labels must hold integers or bools, got torch.float64"):
        step(PRMLossFn(HARD), logits, {**data, "reward_labels": data["reward_labels"].double()})
    with pytest.raises(ValueError, match=r"reward_labels must be floating point, got torch.int64"):
        step(PRMLossFn(SOFT), logits, data)
    with pytest.raises(ValueError, match=r"reward_token_ids = \[2, 23\] must lie in the vocabulary \[0, 23\)"):
        step(PRMLossFn({**FULL, "reward_token_ids": [2, VOCAB]}), logits, data)
    with pytest.raises(ValueError, match="PRMLossFn in this configuration needs statistics="):
        PRMLossFn(HARD)(logits, data, *count_valid(data))


def test_only_labels_at_placeholders_are_looked_at() -> None:
    logits = torch.zeros(1, 3, 4)
    data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    loss_fn = PRMLossFn({"placeholder_token_id": 1, "reward_token_ids": (2, 3), "soft_labels": True})
    data["reward_labels"] = torch.tensor([[math.nan, 0.5, math.nan]])
    assert step(loss_fn, logits, data).loss == pytest.approx(math.log(2))
    data["reward_labels"] = torch.tensor([[0.5, math.nan, 0.5]])
    with pytest.raises(ValueError, match=r"reward_labels is NaN at \[0, 1\], a valid place"):
        step(loss_fn, logits, data)
    data |= {"reward_labels": torch.full((1, 3), 0.5), "token_mask": torch.tensor([[1.0, 0.5, 1.0]])}
    with pytest.raises(ValueError, match="token_mask"):
        step(loss_fn, logits, data)
