"""TRL's losses through ours, against its arithmetic; `test_installed_trl` runs its own trainers."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid as ls

from parallel_rl.hosts.trl import DPO_KINDS, DPOLossMixin, GRPOLossMixin, dpo_loss, grpo_loss, grpo_options

B, A = 6, 5
BETA, EPS = 0.3, 0.1


def completions(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 2, 4, 3, 1, 5])[:, None]
    fields = {name: torch.randn(B, A, generator=g, dtype=torch.float64) * 0.3 - 1 for name in ("new", "old", "ref")}
    return {**fields, "mask": (torch.arange(A) < lengths).long(), "advantages": torch.randn(B, generator=g).double()}


DPO_BY_HAND: dict[
    str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
] = {  # D of chosen and rejected, their lengths
    "sigmoid": lambda c, r, n, m: -ls(BETA * (c - r)),
    "hinge": lambda c, r, n, m: (1 - BETA * (c - r)).clamp(min=0),
    "ipo": lambda c, r, n, m: (c / n - r / m - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda c, r, n, m: (
        torch.sigmoid(BETA * (c - r)) * (ls(BETA * (c - r)) - math.log(1 - EPS))
        + torch.sigmoid(BETA * (r - c)) * (ls(BETA * (r - c)) - math.log(EPS))
    ),
    "nca_pair": lambda c, r, n, m: -ls(BETA * c) - 0.5 * ls(-BETA * c) - 0.5 * ls(-BETA * r),
    "robust": lambda c, r, n, m: (-(1 - EPS) * ls(BETA * (c - r)) + EPS * ls(BETA * (r - c))) / (1 - 2 * EPS),
    "bco_pair": lambda c, r, n, m: -ls(BETA * c) - ls(-BETA * r),
    "sppo_hard": lambda c, r, n, m: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
    "apo_zero": lambda c, r, n, m: 1 - torch.sigmoid(BETA * c) + torch.sigmoid(BETA * r),
    "apo_down": lambda c, r, n, m: torch.sigmoid(BETA * c) + 1 - torch.sigmoid(BETA * (c - r)),
    "discopop": lambda c, r, n, m: (
        -ls(BETA * (c - r)) * (1 - torch.sigmoid(BETA * (c - r) / 0.05))
        + torch.exp(-BETA * (c - r)) * torch.sigmoid(BETA * (c - r) / 0.05)
    ),
}


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo_by_hand(kind: str) -> None:
    data = completions()
    new = data["new"].clone().requires_grad_()
    ref = (data["ref"] * data["mask"]).sum(1)
    c, r = ((new * data["mask"]).sum(1) - ref).chunk(2)
    n, m = data["mask"].sum(1).chunk(2)
    want = DPO_BY_HAND[kind](c, r, n, m).mean()
    loss, ratios = dpo_loss(new, data["mask"], ref, {kind: 1.0}, beta=BETA, label_smoothing=EPS)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, new), torch.autograd.grad(want, new))
    torch.testing.assert_close(ratios, torch.cat([c, r]).detach())


@pytest.mark.parametrize("kind", ["discopop", "sppo_hard", "nca_pair"])
def test_dpo_of_float32_log_probs_starts_at_the_reference(kind: str) -> None:
    """A sum in another precision than the reference's leaves a log-ratio of 1e-6 where there is none; a steep gate shows it."""
    data = completions(4)
    new = (20 * data["new"]).float().requires_grad_()
    ref = (new.detach() * data["mask"]).sum(1)  # as TRL sums the reference's
    loss, _ = dpo_loss(new, data["mask"], ref, {kind: 1.0}, beta=BETA)
    exact = new.detach().double().requires_grad_()
    sums = (exact * data["mask"]).sum(1)
    c, r = (sums - sums.detach()).chunk(2)
    want = DPO_BY_HAND[kind](c, r, *data["mask"].sum(1).chunk(2)).mean()
    gradient, right = torch.autograd.grad(loss, new)[0].double(), torch.autograd.grad(want, exact)[0]
    assert (gradient - right).norm() <= 2e-7 * right.norm()


def arguments(kind: str, **more: object) -> SimpleNamespace:
    args = {
        "loss_type": kind, "epsilon": 0.2, "epsilon_high": 5.0 if kind == "cispo" else 0.28, "delta": None, "beta": 0.0,
        "importance_sampling_level": "token", "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0, **more,
    }  # fmt: skip
    return SimpleNamespace(args=SimpleNamespace(**args), max_completion_length=7)


def grpo_by_hand(data: dict[str, Tensor], new: Tensor, args: SimpleNamespace) -> Tensor:
    """Formulas of TRL 1.16, two micro-batches a step and 30 items in it."""
    mask, a = data["mask"], data["advantages"][:, None]
    y = new - data["old"]
    level = y if args.importance_sampling_level == "token" else ((y * mask).sum(-1) / mask.sum(-1))[:, None]
    rho = level.exp()
    kl = (data["ref"] - new).exp() - (data["ref"] - new) - 1
    kl = kl * rho if args.use_bias_correction_kl else kl
    if args.loss_type == "cispo":
        x = -rho.clamp(max=args.epsilon_high).detach() * a * new
    elif args.loss_type == "sapo":
        t = torch.where(a > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        x = -torch.sigmoid(t * (rho - 1)) * 4 / t * a
    elif args.loss_type == "vespo":
        w = (y.detach() * mask).sum(-1, keepdim=True)
        k, lam = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        x = -(lam + k * w - lam * w.exp()).exp() * a * new
    else:
        top = rho if args.delta is None else rho.clamp(max=args.delta)
        x = -torch.minimum(top * a, rho.clamp(1 - args.epsilon, 1 + args.epsilon_high) * a)
    x = (x + args.beta * kl) * mask
    if args.loss_type in ("grpo", "sapo"):
        return (x.sum(-1) / mask.sum(-1)).mean() / 2
    if args.loss_type == "bnpo":
        return x.sum() / mask.sum() / 2
    if args.loss_type == "dr_grpo":
        return x.sum() / (B * 7) / 2
    return x.sum(-1).mean() / 2 if args.loss_type == "luspo" else x.sum() / 30


GRPO = [
    *(arguments(kind) for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")),
    arguments("grpo", beta=0.1), arguments("dapo", beta=0.1, use_bias_correction_kl=False), arguments("grpo", delta=1.5),
    arguments("luspo", importance_sampling_level="sequence"),
    arguments("grpo", importance_sampling_level="sequence", beta=0.1),
    arguments("cispo", importance_sampling_level="sequence", beta=0.1),
]  # fmt: skip


@pytest.mark.parametrize(
    "trainer", GRPO, ids=lambda x: f"{x.args.loss_type}-{x.args.importance_sampling_level}-{x.args.beta}"
)
def test_grpo_by_hand(trainer: SimpleNamespace) -> None:
    data = completions(1)
    new = data["new"].clone().requires_grad_()
    want = grpo_by_hand(data, new, trainer.args)
    tokens = data["mask"].sum() * 2 if trainer.args.loss_type == "bnpo" else torch.tensor(30.0)
    fields = {"response_mask": data["mask"], "advantages": data["advantages"], "prev_logprobs": data["old"]}
    fields["reference_policy_logprobs"] = data["ref"]
    loss, _ = grpo_loss(new, None, fields, (torch.tensor(2 * B), tokens), grpo_options(trainer))
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, new), torch.autograd.grad(want, new))


def test_a_share_of_less_than_a_token() -> None:
    """Of a step whose completions are all but masked, TRL divides its one token by the processes."""
    data = completions(3)
    fields = {"response_mask": data["mask"], "advantages": data["advantages"], "prev_logprobs": data["old"]}
    found = [
        grpo_loss(data["new"], None, fields, (torch.tensor(B), torch.tensor(n)), grpo_options(arguments("dapo")))[0]
        for n in (0.25, 1.0)
    ]
    assert found[0].item() == pytest.approx(4 * found[1].item())


def test_a_trainer_of_another_trl() -> None:
    """One without the method would train on with its own loss, and nobody would know."""
    older = type("DPOTrainer", (), {"__module__": "trl.trainer.dpo_trainer", "compute_loss": lambda self: 0})
    with pytest.raises(
        ValueError, match=r"DPOTrainer of this TRL has no _compute_loss, so that DPOLossMixin .* TRL 1.16"
    ):
        type("Ours", (DPOLossMixin, older), {})
    other = type("GRPOTrainer", (), {"__module__": "trl.trainer.grpo_trainer", "_compute_loss": lambda self: 0})
    for mixin, trainer, lacking in (
        (DPOLossMixin, other, "f_divergence_type"),
        (GRPOLossMixin, other, "top_entropy_q"),
    ):
        ours = type("Ours", (mixin, trainer), {})()
        with pytest.raises(ValueError, match=f"Ours of this TRL has no {lacking}.*; supported is TRL 1.16"):
            ours._compute_loss(None, {})


def test_kinds_that_are_not_there() -> None:
    data = completions()
    with pytest.raises(ValueError, match="have 3, 3 and 3 rows; pairs need the same even number of rows"):
        dpo_loss(data["new"][:3], data["mask"][:3], data["ref"].sum(1)[:3], {"sigmoid": 1.0}, beta=0.1)
    with pytest.raises(ValueError, match="loss_type = 'aot' is not supported here; supported are sigmoid, hinge"):
        dpo_loss(data["new"], data["mask"], data["ref"].sum(1), {"aot": 1.0}, beta=0.1)
    with pytest.raises(ValueError, match="loss_type = 'dg' is not supported here; supported are grpo"):
        grpo_options(arguments("dg"))
    with pytest.raises(
        ValueError, match="importance_sampling_level = 'sequenc' is not supported here; supported are token"
    ):
        grpo_options(arguments("grpo", importance_sampling_level="sequenc"))
