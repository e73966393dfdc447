"""Packed rows under NeMo-RL's names have the numbers of a call a sequence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_rl.compat import nemo_rl
from tests.compat import nemo_reference as reference
from tests.compat.nemo_reference import Data
from tests.compat.test_nemo_rl import GSPO, IS, SEQS, TOKS


def test_a_packed_row_has_the_numbers_of_a_call_a_sequence() -> None:
    """Documented wrapper, at once; the present one's loop; and, but for Q2 and Q4, the fused one."""
    data = reference.batch(6, poison=False)
    data["sample_mask"][:] = 1
    lengths = [8, 5, 7, 2, 8, 6]
    for i, n in enumerate(lengths):
        data["token_mask"][i, n:] = 0
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    padded = torch.tensor([0, *(n + n % 2 for n in lengths)]).cumsum(0)
    options = {**GSPO, **IS, "positive_example_nll_weight": 0.5, "reference_policy_kl_penalty": 0.1}
    fn, answers = nemo_rl.ClippedPGLossFn(options), {}
    for name in ("rows", "documented", "present", "fused"):
        x = data["logits"].clone().requires_grad_()
        row = torch.cat([torch.nn.functional.pad(x[i, :n], (0, 0, 0, n % 2)) for i, n in enumerate(lengths)])[None]
        if name == "rows":
            parts = [fn(x[i : i + 1], {k: v[i : i + 1] for k, v in data.items()}, SEQS, TOKS) for i in range(6)]
            total = {key: sum(float(part[1][key]) for part in parts) for key in parts[0][1]}
            for key in ("probs_ratio_min", "probs_ratio_clamped_min", "probs_ratio_max", "probs_ratio_clamped_max"):
                total[key] = (min if key.endswith("min") else max)(float(part[1][key]) for part in parts)
            answer = sum(part[0] for part in parts), total
        elif name == "documented":
            answer = nemo_rl.SequencePackingLossWrapper(fn, bounds, padded)(row, data, SEQS, TOKS)
        elif name == "present":
            wrapper = nemo_rl.SequencePackingLossWrapper(
                loss_fn=fn, prepare_fn=nemo_rl.prepare_loss_input, cu_seqlens_q=bounds, cu_seqlens_q_padded=padded
            )
            answer = wrapper(row, data, SEQS, TOKS)
        else:
            prepare = nemo_rl.prepare_packed_loss_input
            answer = nemo_rl.SequencePackingFusionLossWrapper(fn, prepare, bounds, padded)(row, data, SEQS, TOKS)
        answers[name] = (*answer, torch.autograd.grad(answer[0], x)[0])
    loss, metrics, grad = answers["rows"]
    for name in ("documented", "present"):
        torch.testing.assert_close((answers[name][0], answers[name][2]), (loss, grad), rtol=1e-12, atol=1e-12)
        assert answers[name][1] == pytest.approx(metrics)
    whole, _ = fn(data["logits"], data, SEQS, TOKS)
    torch.testing.assert_close(answers["fused"][0].detach(), whole.detach(), rtol=1e-12, atol=1e-12)
    assert answers["fused"][0].item() != pytest.approx(loss.item())


def test_a_loss_of_the_callers_own_is_called_sequence_by_sequence() -> None:
    """By the documented call, with its part of the row and of the data; Q8: extrema by other names add up."""
    data, seen = reference.batch(6), []

    def own(logits: Tensor, part: Data, seqs: Tensor, toks: Tensor, **groups: object) -> tuple:
        seen.append((logits.shape[1], part["input_ids"].shape, set(groups)))
        return logits.sum() / toks, {"values_max": 2.0, "probs_ratio_min": math.inf if len(seen) == 1 else len(seen)}

    bounds, padded = torch.tensor([0, 8, 13, 20, 22, 30, 36]), torch.tensor([0, 8, 14, 22, 24, 32, 38])
    loss, metrics = nemo_rl.SequencePackingLossWrapper(own, bounds, padded)(torch.ones(1, 38, 2), data, SEQS, TOKS)
    assert loss.item() == pytest.approx(38 * 2 / 31) and metrics == {"values_max": 12.0, "probs_ratio_min": 2}
    assert [(width, *shape) for width, shape, _ in seen][1:4] == [(6, 1, 5), (8, 1, 7), (2, 1, 2)]
    assert seen[0][2] == {"vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group"}


def test_pairs_may_be_packed() -> None:
    data = reference.pairs(7)
    fn = nemo_rl.DPOLossFn({"sft_loss_weight": 0.2})
    packed = nemo_rl.SequencePackingLossWrapper(fn, torch.arange(7) * 8)
    loss, metrics = packed(data["logits"].view(1, 48, -1), data, SEQS, TOKS)
    expected, means = fn(data["logits"], data, SEQS, TOKS)
    torch.testing.assert_close(loss, expected)
    assert metrics == pytest.approx(means)


def test_tokens_beyond_a_packed_sequences_length_are_not_in_the_row() -> None:
    data = reference.batch(11, poison=False)
    data["token_mask"][:] = 1
    packed = nemo_rl.SequencePackingLossWrapper(nemo_rl.NLLLoss(), torch.arange(7) * 5)
    loss, metrics = packed(data["logits"][:, :5].reshape(1, 30, -1), data, SEQS, TOKS)
    expected, _ = nemo_rl.NLLLoss()(
        data["logits"][:, :5], {k: v[:, :5] if v.dim() > 1 else v for k, v in data.items()}, SEQS, TOKS
    )
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    assert metrics["num_unmasked_tokens"] == 4 * 4
