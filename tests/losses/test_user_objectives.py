"""Objectives that the package does not ship, each written in a line or two as a user would, against the golden rows.

They prove that `register_objective` is enough: aggregation, masks, sequence quantities and their gradients come with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_rl import count_valid, register_objective
from parallel_rl.losses.core.batch import TokenBatch
from tests.losses.test_golden import check_row, make

LogRatio = Callable[[Tensor, TokenBatch], Tensor]


def y(lp: Tensor, b: TokenBatch) -> Tensor:
    return lp - b["prev_logprobs"]


def rho(lp: Tensor, b: TokenBatch) -> Tensor:
    return y(lp, b).exp()


def ref(lp: Tensor, b: TokenBatch) -> Tensor:
    return b["reference_policy_logprobs"] - lp


def adv(b: TokenBatch) -> Tensor:
    return b["advantages"]


def ppo(lp: Tensor, b: TokenBatch, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-adv(b) * rho(lp, b), -adv(b) * rho(lp, b).clamp(1 - low, 1 + high))


def dual(lp: Tensor, b: TokenBatch) -> Tensor:
    return torch.where(adv(b) < 0, torch.minimum(ppo(lp, b), -3 * adv(b)), ppo(lp, b))


def off_policy_mask(lp: Tensor, b: TokenBatch) -> Tensor:
    kl = b.expand(b.segment_mean(-y(lp, b)))
    return torch.where((adv(b) < 0) & (kl > -1), 0, dual(lp, b))


def cpgd(lp: Tensor, b: TokenBatch) -> Tensor:
    old, a = b["prev_logprobs"], adv(b)
    eps = torch.tensor(0.2, dtype=lp.dtype)
    return -a * torch.where(a > 0, torch.minimum(lp, old + (1 + eps).log()), torch.maximum(lp, old + (1 - eps).log()))


def gspo_token(lp: Tensor, b: TokenBatch, low: float, high: float) -> Tensor:
    r = (lp - lp.detach() + b.expand(b.segment_mean(y(lp, b))).detach()).exp()
    return torch.maximum(-adv(b) * r, -adv(b) * r.clamp(1 - low, 1 + high))


def cispo_mask(lp: Tensor, b: TokenBatch) -> Tensor:
    r = rho(lp, b).detach()
    keep = ~(((r > 1.28) & (adv(b) > 0)) | ((r < 0) & (adv(b) < 0)))
    return -adv(b) * r.clamp(0, 1.28) * keep * lp


def topr(lp: Tensor, b: TokenBatch, log_ratio: LogRatio = y) -> Tensor:
    taper = torch.where(adv(b) <= 0, log_ratio(lp, b).exp().clamp(0, 1), 1).detach()
    return -taper * adv(b) * lp


def whole(lp: Tensor, b: TokenBatch) -> Tensor:
    return b.expand(b.segment_sum(y(lp, b)))


def sppo(lp: Tensor, b: TokenBatch) -> Tensor:
    r = rho(lp, b).detach()
    return -adv(b) * y(lp, b) * ((r >= 1 / 1.3) & (r <= 1.3))


def sapo(lp: Tensor, b: TokenBatch) -> Tensor:
    tau = 1.05 - 0.05 * (adv(b) > 0).double()
    return -(tau * (rho(lp, b) - 1)).sigmoid() * 4 / tau * adv(b)


def sapo_trinity(lp: Tensor, b: TokenBatch) -> Tensor:
    tau = 1.05 - 0.05 * (adv(b) > 0).double()
    return -((tau * (rho(lp, b) - 1)).sigmoid() * 4 / tau).detach() * adv(b) * lp


def sft_phi(lp: Tensor, b: TokenBatch, cutoff: float = 1.0) -> Tensor:
    p = lp.exp().detach()
    return -p * (1 - p) * torch.minimum(lp, torch.tensor(cutoff, dtype=lp.dtype).log())


def rec(lp: Tensor, b: TokenBatch, mode: str, weighted: bool = False) -> Tensor:
    a, r = adv(b), rho(lp, b).detach()
    if mode == "gspo":
        r = b.expand(b.segment_mean(y(lp, b))).exp().detach()
    inside = (r >= 0.8) & (r <= 1.2)
    one_side = ((a >= 0) & (r <= 1.2)) | ((a <= 0) & (r >= 0.8))
    ring = inside | ((a >= 0) & (r <= 0.4)) | ((a <= 0) & (r >= 3.0))
    keep = {"two": inside, "one": one_side, "gspo": one_side, "ring": ring}[mode]
    return -a * (r if weighted else 1) * lp * keep


def gmpo(lp: Tensor, b: TokenBatch) -> Tensor:
    """Its ratio is of whole sequences, so every token of one carries the same loss: the token mean over it is that loss."""
    s = adv(b).sign()
    clipped = s * torch.minimum(s * y(lp, b), s * y(lp, b).clamp(-0.4, 0.4))
    return -adv(b) * b.expand(b.segment_mean(clipped)).exp()


def k3(lp: Tensor, b: TokenBatch) -> Tensor:
    return ref(lp, b).exp() - 1 - ref(lp, b)


TOKEN, SEQ, SUM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
Row = tuple[str, LogRatio, str, float, "tuple[float, float, float] | None"]
ROWS: list[Row] = [
    ("ppo", ppo, TOKEN, 1.430469, (0.0, 0.074992, 1.344366)),
    ("ppo seq", ppo, SEQ, 2.155992, None),
    ("ppo sum", ppo, SUM, 4.291408, None),
    ("ppo length", ppo, "constant-length", 3.218556 / 3, None),
    ("dual", dual, TOKEN, 0.75277, (0.0, 0.074992, 0.0)),
    ("dual seq", dual, SEQ, 1.139443, None),
    ("dual sum", dual, SUM, 2.25831, None),
    ("dual length", dual, "constant-length", 1.693732 / 3, None),
    ("sequence mask", off_policy_mask, TOKEN, -0.367204, None),
    ("cpgd", cpgd, SEQ, 0.046984, (0.0, 0.041667, 0.333333)),
    ("gspo token seq", lambda lp, b: gspo_token(lp, b, 3e-4, 4e-4), SEQ, 1.477155, None),
    ("gspo token", lambda lp, b: gspo_token(lp, b, 3e-4, 4e-4), TOKEN, 0.987538, None),
    ("gspo wide", lambda lp, b: gspo_token(lp, b, 0.2, 0.2), SEQ, math.nan, (0.0, 0.042721, 0.819868)),
    ("cispo mask", cispo_mask, TOKEN, -0.175754, None),
    ("topr", topr, TOKEN, 0.072742, (-0.111111, 0.055556, 0.222222)),
    ("topr sequence", lambda lp, b: topr(lp, b, whole), TOKEN, 0.061111, None),
    ("sppo", sppo, TOKEN, -0.022222, None),
    ("sapo", sapo, SEQ, 1.472165, (-0.134062, 0.054388, 0.039780)),
    ("sapo trinity", sapo_trinity, TOKEN, 0.134576, (-0.246723, 0.125041, 0.842365)),
    ("opmd", lambda lp, b: -adv(b) * lp / 2, TOKEN, 0.030556, None),
    ("sft", lambda lp, b: -lp, TOKEN, 0.777778, None),
    ("sft is", lambda lp, b: -lp.exp().detach() * lp, TOKEN, 0.28293, None),
    ("sft phi", sft_phi, TOKEN, 0.142777, (-0.026517, -0.016490, -0.024555)),
    ("sft phi cutoff", lambda lp, b: sft_phi(lp, b, 0.5), TOKEN, 0.178814, None),
    ("importance sampling", lambda lp, b: -adv(b) * rho(lp, b), TOKEN, 1.378233, None),
    ("rec one side", lambda lp, b: rec(lp, b, "one", weighted=True), TOKEN, -0.668354, None),
    ("rec two side", lambda lp, b: rec(lp, b, "two"), TOKEN, -0.116667, None),
    ("rec ring", lambda lp, b: rec(lp, b, "ring"), TOKEN, -0.205556, None),
    ("rec gspo", lambda lp, b: rec(lp, b, "gspo", weighted=True), SEQ, -0.771242, None),
    ("rec k2", lambda lp, b: -adv(b) * lp + 0.1 * y(lp, b).square(), TOKEN, 0.101667, None),
    ("rec fkl", lambda lp, b: -adv(b) * lp - 0.1 * lp, TOKEN, 0.138889, None),
    ("rec advantage", lambda lp, b: -adv(b) * adv(b).exp() * lp, TOKEN, 0.94207, None),
    ("gmpo", gmpo, SEQ, 1.416834, (-0.131262, 0.042721, 0.819868)),
    ("gpg", lambda lp, b: -adv(b) * lp, TOKEN, 0.061111, None),
    ("k1", lambda lp, b: -ref(lp, b), TOKEN, 0.2, (0.111111, 0.111111, 0.111111)),
    ("k2", lambda lp, b: ref(lp, b).square() / 2, TOKEN, 0.086667, (0.011111, -0.011111, 0.122222)),
    ("k3", k3, TOKEN, 0.066218, (0.010574, -0.011686, 0.074125)),
    ("k3 score", lambda lp, b: (lp - lp.detach()).exp() * k3(lp, b), TOKEN, 0.066218, (0.011111, -0.011111, 0.122222)),
    ("abs", lambda lp, b: ref(lp, b).abs(), TOKEN, 0.288889, None),
    ("k3 ratio", lambda lp, b: rho(lp, b).clamp(0, 2) * k3(lp, b), TOKEN, 0.115038, (0.013571, -0.014998, 0.148251)),
]  # fmt: skip
FIELDS = ("advantages", "prev_logprobs", "reference_policy_logprobs")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_golden_row(row: Row) -> None:
    name, objective, aggregation, value, gradient = row

    def named(logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return objective(logprobs, batch)

    loss_class = register_objective(f"doc_{name}", token_fields=FIELDS)(named)
    config = {"aggregation": aggregation, **({"max_length": 4} if aggregation == "constant-length" else {})}
    logits, data = make()
    loss, _ = loss_class(config)(logits, data, *count_valid(data))
    check_row(loss, logits, value, gradient)


def test_sequence_quantities() -> None:
    """The golden rows of the sequence KL and of the geometric mean of ratios."""
    seen: list[Tensor] = []

    def look(logprobs: Tensor, batch: TokenBatch) -> Tensor:
        seen.append(batch.segment_mean(-y(logprobs, batch)).detach())
        seen.append(batch.segment_mean(batch["prev_logprobs"] - batch["generation_logprobs"]).exp())
        return logprobs

    logits, data = make()
    fields = (*FIELDS, "generation_logprobs")
    register_objective("doc_look", token_fields=fields)(look)()(logits, data, *count_valid(data))
    assert seen[0].tolist() == pytest.approx([-0.2, -0.025, -0.9], abs=1e-6)
    assert seen[1].tolist() == pytest.approx([0.954405, 1.038212, 1.404948], abs=1e-6)


def test_an_integer_field_tells_turns_apart() -> None:
    def turns(logprobs: Tensor, batch: TokenBatch) -> Tensor:
        return -batch.turn_mean(logprobs)

    loss_class = register_objective("doc_turns", token_fields=("segment_ids",), integer_fields=("segment_ids",))(turns)
    logits, data = make()
    data = {**data, "segment_ids": torch.ones_like(data["input_ids"])}  # one turn a row
    loss, _ = loss_class()(logits, data, *count_valid(data))
    whole, _ = register_objective("doc_rows")(lambda logprobs, batch: -batch.expand(batch.segment_mean(logprobs)))()(
        logits, data, *count_valid(data)
    )
    torch.testing.assert_close(loss, whole)
    with pytest.raises(ValueError, match="segment_ids must hold integers or bools, got"):
        loss_class()(logits, {**data, "segment_ids": torch.ones(data["input_ids"].shape)}, *count_valid(data))
