"""Names and ids that calls on log-probs and scores once took in silence or failed on: a mask's own name, an id of -100."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import ComponentsLossFn, token_scores


@pytest.mark.parametrize("masked", [True, False])
def test_an_id_of_a_valid_token_lies_in_the_vocabulary(masked: bool) -> None:
    data = {"input_ids": torch.tensor([[0, 1, -100, 2], [0, 1, 2, 3]])}
    if masked:
        data |= {"token_mask": torch.ones(2, 4), "sample_mask": torch.ones(2)}
    with pytest.raises(ValueError, match=r"target -100 at \[0, 2\] lies outside the vocabulary"):
        token_scores(torch.randn(2, 4, 5), data)
    if masked:
        data["token_mask"][0, 2] = 0
        assert token_scores(torch.randn(2, 4, 5), data).logprobs.isfinite().all()


def test_pre_shifted_labels_are_scored_where_they_are_predicted() -> None:
    logits, ids = torch.randn(2, 4, 5), torch.tensor([[0, 1, 4, 2], [0, 1, 2, 3]])
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    right = token_scores(logits, {"input_ids": ids}, entropy=True)
    scores = token_scores(logits, {"shift_labels": labels}, entropy=True)
    for found, want in zip(scores[:2], right[:2], strict=True):
        assert torch.equal(found[:, :-1], want[:, 1:]) and not found[:, -1].any()


def test_a_component_may_name_the_mask_of_responses() -> None:
    """... as its own mask, and as the complement of that of another."""
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    data = {"response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    nll = {"loss": {"name": "nll"}, "mask": "response_mask"}
    loss_fn = ComponentsLossFn({"components": {"own": nll}})
    call = {"data": data, "global_valid_seqs": torch.tensor(2), "global_valid_toks": torch.tensor(3)}
    statistics = loss_fn.collect_from_logprobs(logprobs, **call).reduce()
    loss, _ = loss_fn.from_logprobs(logprobs, **call, statistics=statistics)
    assert loss.item() == pytest.approx((1 + 2 + 4) / 3)
