"""Responses of a policy's step, and the arithmetic of hosts on them, written from their formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

B, A = 6, 5
LENGTHS = (5, 2, 4, 0, 1, 5)  # one row is masked throughout


def step(seed: int = 0) -> dict[str, Tensor]:
    """float64 [B, A], with NaN where no loss is carried; the mask; a host's own weights."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(A) < torch.tensor(LENGTHS)[:, None]).long()
    names = ("new", "old", "generation", "advantages")
    data = {name: torch.randn(B, A, generator=g, dtype=torch.float64) * 0.3 for name in names}
    for name in ("new", "old", "generation"):
        data[name] = data[name] - 1.5  # log-probs
    data["weights"] = torch.rand(B, A, generator=g, dtype=torch.float64)
    return {"mask": mask, **{name: torch.where(mask != 0, x, torch.nan) for name, x in data.items()}}


def clean(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with 0 in place of NaN: hosts multiply by their masks."""
    return {name: x.nan_to_num(0.0) if x.is_floating_point() else x for name, x in data.items()}


def ppo(new: Tensor, data: dict[str, Tensor], clip: tuple[float, float] = (0.2, 0.28)) -> Tensor:
    """[B, A] of −min(ρA, clip(ρ)A)."""
    ratio = (new - data["old"]).exp()
    return -torch.minimum(ratio * data["advantages"], ratio.clamp(1 - clip[0], 1 + clip[1]) * data["advantages"])


def gspo(new: Tensor, data: dict[str, Tensor], clip: tuple[float, float] = (0.2, 0.28)) -> Tensor:
    """The same with the geometric mean of a row as ratio."""
    mean = ((new - data["old"]) * data["mask"]).sum(1) / data["mask"].sum(1).clamp(min=1)
    return ppo(data["old"] + mean[:, None], data, clip)


def same(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], new: Tensor, tolerance: float = 1e-7
) -> None:
    """Value and gradient of two functions of the log-probs; where those are NaN no gradient may be."""
    results = []
    for call, at in ((ours, new), (theirs, new.nan_to_num(0.0))):
        x = at.clone().requires_grad_()
        loss = call(x)
        results.append((loss.detach(), *torch.autograd.grad(loss, x)))
    (loss, gradient), (want, right) = results
    torch.testing.assert_close(loss, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, right, rtol=tolerance, atol=tolerance)
