"""Components that do not do, and data that does not, are refused by the name of component and field."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import ComponentsLossFn, count_valid
from parallel_rl.testing.batches import VOCAB
from tests.losses.test_components import NLL, OBSERVED, POLICY, batch, of


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({}, "components is empty; name at least one"),
        ({"a/b": NLL}, "components has the name 'a/b'; a name is made of a-z, 0-9 and _"),
        ({"a": {}}, r"components\.a needs the key 'loss', which is missing"),
        ({"a": {**NLL, "weight": 1.0}}, r"unknown key components\.a\.weight = 1\.0 in ComponentConfig"),
        ({"a": {"loss": {"name": "nlll"}}}, "loss = 'nlll' is not valid; did you mean 'nll'"),
        (
            {"a": {**NLL, "coefficient": math.nan}},
            r"components\.a: coefficient = nan must be a finite number other than 0",
        ),
        ({"a": {**NLL, "coefficient": 0}}, r"components\.a: coefficient = 0\.0 must be a finite number other than 0"),
        ({"a": {**NLL, "coefficient": {"peak": 1, "valley": 0}}}, r"components\.a\.coefficient"),
        ({"a": {"loss": {"name": "value"}}}, "loss.name = 'value' reads a scalar head; a component reads logits"),
        (
            {"a": {"loss": {"name": "prm", "options": {"placeholder_token_id": 3}}}},
            "component 'a' must score predicted tokens by their logits; its loss reads the position that holds a token",
        ),
        (
            {"a": {**NLL, "fields": {"advantages": "other"}}},
            r"fields\.advantages = 'other' has no effect: loss\.name = 'nll' does not read 'advantages'",
        ),
        (
            {"a": {**POLICY, "fields": {"advantages": "x"}}, "b": {**NLL, "rows": "x"}},
            "component 'b' reads the field 'x' as .* another as .* rename one",
        ),
    ],
    ids=str,
)
def test_configs_that_do_not_do(components: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ComponentsLossFn({"components": components})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("observation_mask", None, "data lacks the field 'observation_mask'; this loss needs .*observation_mask"),
        ("observation_mask", torch.full((12, 16), 0.5), r"observation_mask = 0.5 at \[0, 0\] must be 0 or 1"),
        ("observation_mask", torch.full((12, 16), 2), r"observation_mask = 2 at \[0, 0\] must be 0 or 1"),
        ("observation_mask", torch.ones(12), r"observation_mask has shape \[12\]; .* calls for \[12, 16\]"),
        ("input_ids", torch.full((12, 16), VOCAB), rf"target {VOCAB} at \[\d+, \d+\] lies outside the vocabulary"),
    ],
    ids=str,
)
def test_data_that_does_not_do(name: str, value: Tensor | None, message: str) -> None:
    logits, data = batch()
    loss_fn = of(observed=OBSERVED)
    right = loss_fn.count(data)
    if value is None:
        del data[name]
    else:
        data[name] = value
    with pytest.raises(ValueError, match=message):
        loss_fn(logits, data, *count_valid(data), statistics=right)
    if name == "observation_mask":
        with pytest.raises(ValueError, match=message):
            loss_fn.count(data)


def test_a_fault_is_told_by_the_component_and_by_the_names_of_the_data() -> None:
    """A component's loss knows its fields by its own names; the caller knows them by those of the data."""
    logits, data = batch()
    component = {"loss": {"name": "reference_kl"}, "fields": {"reference_policy_logprobs": "teacher_token_logprobs"}}
    loss_fn = of(observed={**component, "mask": "observation_mask"})
    right = loss_fn.count(data)
    data["teacher_token_logprobs"] = torch.full((12, 16), torch.nan, dtype=torch.float64)
    message = (
        r"component 'observed' \(reads token_mask from 'observation_mask', reference_policy_logprobs from "
        r"'teacher_token_logprobs'\): reference_policy_logprobs is NaN at"
    )
    with pytest.raises(ValueError, match=message):
        loss_fn(logits, data, *count_valid(data), statistics=right)
    with pytest.raises(ValueError, match=message):
        loss_fn.count(data)


def test_a_loss_of_another_policy_than_the_samplers_is_refused() -> None:
    with pytest.raises(ValueError, match="NLLLoss is not a loss on a sampler's policy, so Truncation"):
        ComponentsLossFn({"components": {"policy": POLICY, "observed": OBSERVED}}, top_k=5)
    assert ComponentsLossFn({"components": {"policy": POLICY}}, top_k=5).requirements.truncatable
