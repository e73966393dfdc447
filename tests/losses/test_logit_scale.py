"""A scale of the logits (Granite, Cohere) gives each loss what logits scaled beforehand give, hidden states too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_rl import LMHeadInput, NLLLoss, count_valid, token_logprobs
from parallel_rl.testing.cases import Case, step_statistics
from parallel_rl.testing.hidden_states import reads_one_distribution, takes_head
from tests.distributed import law, law_references

SCALE, SOFTCAP = 0.37, 4.0
CASES = [case for case in (*law.CORE, *law.TRUNCATED) if takes_head(case) and reads_one_distribution(case)]


def run(case: Case, output: object, data: dict, leaves: list[Tensor], **options: float) -> tuple[Tensor, list[Tensor]]:
    loss_fn = Case(case.loss, case.config, {**case.options, **options}).build()
    call = (output, data, *count_valid(data))
    loss, _ = loss_fn(*call, statistics=step_statistics([(loss_fn, call)]))
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_scale_is_that_of_logits_scaled_before(case: Case) -> None:
    batch = law_references.batch_of(case)
    logits = batch.logits.clone().requires_grad_()
    want = run(case, logits * SCALE, batch.data, [logits])
    torch.testing.assert_close(run(case, logits, batch.data, [logits], logit_scale=SCALE), want)

    hidden, weight = batch.logits.clone(), torch.eye(batch.logits.shape[-1], dtype=torch.float64)
    capped = SOFTCAP * torch.tanh(logits * SCALE / SOFTCAP)
    want = run(case, capped, batch.data, [logits])
    hidden.requires_grad_()
    head = LMHeadInput(hidden, weight, softcap=SOFTCAP, logit_scale=SCALE)
    torch.testing.assert_close(run(case, head, batch.data, [hidden]), want)


def test_a_teachers_head_has_a_scale_of_its_own() -> None:
    case = Case("full_distillation")
    batch = law_references.batch_of(case)
    hidden, weight = batch.logits.clone().requires_grad_(), torch.eye(batch.logits.shape[-1], dtype=torch.float64)
    scaled = {**batch.data, "teacher_logits": batch.data["teacher_logits"] * 3.0}
    want = run(case, LMHeadInput(hidden, weight), scaled, [hidden])
    teacher = {**batch.data, "teacher_logits": LMHeadInput(batch.data["teacher_logits"], weight, logit_scale=3.0)}
    loss_fn = case.build()
    loss, _ = loss_fn(LMHeadInput(hidden, weight), teacher, *count_valid(batch.data))
    torch.testing.assert_close((loss.detach(), list(torch.autograd.grad(loss, [hidden]))), want)


def test_log_probs_of_a_scaled_head() -> None:
    case = Case("nll")
    batch = law_references.batch_of(case)
    weight = torch.eye(batch.logits.shape[-1], dtype=torch.float64)
    found = token_logprobs(LMHeadInput(batch.logits, weight, logit_scale=SCALE), batch.data)
    torch.testing.assert_close(found, token_logprobs(batch.logits * SCALE, batch.data))


def test_scales_that_are_refused() -> None:
    data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    counts = count_valid(data)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"logit_scale = {scale} must be positive and finite"):
            NLLLoss(logit_scale=scale)
        with pytest.raises(ValueError, match=f"logit_scale = {scale} must be positive and finite"):
            NLLLoss()(LMHeadInput(torch.zeros(1, 3, 4), torch.zeros(5, 4), logit_scale=scale), data, *counts)
    with pytest.raises(ValueError, match=r"logit_scale = 2.0 is of logits; an LMHeadInput has its own"):
        NLLLoss(logit_scale=2.0)(LMHeadInput(torch.zeros(1, 3, 4), torch.zeros(5, 4)), data, *counts)
    with pytest.raises(ValueError, match=r"logit_scale = 2.0 has no effect on log-probs"):
        NLLLoss(logit_scale=2.0).from_logprobs(torch.zeros(1, 3), data=data, global_valid_seqs=1, global_valid_toks=2)
