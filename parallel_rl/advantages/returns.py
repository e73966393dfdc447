"""Returns and generalised advantages over the valid tokens of each row, without a loop over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class GAE(NamedTuple):
    """Advantages for the policy and targets for the value function, [N, S] each, 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


def terminal_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coefficient: float = 0.0) -> Tensor:
    """Compute [N, S] r_t = −c·kl_t, plus the sample's reward at its last valid token; 0 if masked.

    >>> terminal_rewards(torch.tensor([2.0]), torch.tensor([[0, 1, 1, 0]]))
    tensor([[0., 0., 2., 0.]])

    Args:
        rewards: [N]; a row without a valid token gets none. mask: [N, S] valid tokens.
        kl: [N, S], needed if `kl_coefficient` (c) is not 0; may be NaN outside the mask.
    """
    keep = mask.bool()
    column = torch.arange(keep.shape[1], device=keep.device)
    last = torch.where(keep, column, -1).amax(1, keepdim=True) if keep.shape[1] else column[None]
    at_end = torch.where(keep & (column == last), rewards[:, None], 0.0)
    if kl_coefficient == 0:
        return at_end
    if kl is None:
        raise ValueError(f"kl_coefficient = {kl_coefficient} needs kl [N, S], which is missing")
    return at_end - kl_coefficient * torch.where(keep, kl, 0.0)


def discounted_returns(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute G_t = Σ_{s≥t} γ^{(valid tokens from t to s)} r_s; masked holes do not count.

    >>> discounted_returns(torch.tensor([[1.0, 0.0, 4.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5)
    tensor([[3., 0., 4.]])

    Args:
        token_rewards, mask: [N, S]; valid tokens in any pattern, results are 0 outside. gamma: γ in [0, 1].
    """
    _check(token_rewards, mask, gamma=gamma)
    order, keep = _compaction(mask)
    rewards = torch.where(keep, token_rewards.gather(1, order), 0.0)
    return _spread(reverse_scan(rewards, rewards.new_full((len(rewards),), gamma)), order, keep)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    value_lam: float | Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> GAE:
    """Compute generalised advantages (arXiv 1506.02438) over the valid tokens of each row, and returns.

    >>> gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.ones(1, 2)).advantages
    tensor([[0.5000, 0.5000]])

        δ_t = r_t + γ V_{t'} − V_t        A_t = δ_t + γλ A_{t'}        R_t = A_t + V_t

    t' is the next valid token: masked holes (tool results, observations) are skipped. After the last valid token V is 0, or the
    row's bootstrap value.

    Args:
        token_rewards, values: [N, S]; `values[:, t]` is the value of the state before token t.
        mask: [N, S] valid tokens, in any pattern; elsewhere values may be NaN.
        gamma: γ in [0, 1]. lam: λ in [0, 1] of the advantages, or [N] one per row.
        value_lam: λ of the returns; None: `lam`. VAPO (arXiv 2504.05118) has another.
        bootstrap_values: [N] the value after the last token of a truncated response, 0 for a finished one.
    """
    lams = {name: x for name, x in (("lam", lam), ("value_lam", value_lam)) if isinstance(x, (int, float))}
    _check(token_rewards, mask, gamma=gamma, **lams)
    _check(values, mask)
    order, keep = _compaction(mask)
    rewards, now = (torch.where(keep, x.gather(1, order), 0.0) for x in (token_rewards, values))
    following = torch.cat([now[:, 1:], torch.zeros_like(now[:, :1])], 1)
    if bootstrap_values is not None:
        is_last = keep & (keep.cumsum(1) == keep.sum(1, keepdim=True))
        following = torch.where(is_last, bootstrap_values[:, None].to(now.dtype), following)
    delta = torch.where(keep, rewards + gamma * following - now, 0.0)
    policy = reverse_scan(delta, _per_row(lam, delta) * gamma)
    value = policy if value_lam is None else reverse_scan(delta, _per_row(value_lam, delta) * gamma)
    return GAE(_spread(policy, order, keep), _spread(value + now, order, keep))


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """Return [N] λ_i = clamp(1 − 1/max(α·n_i, 1), 0, 1) of VAPO (arXiv 2504.05118), n_i valid tokens.

    >>> length_adaptive_lambda(torch.ones(1, 40), alpha=0.05)
    tensor([0.5000], dtype=torch.float64)
    """
    return (1 - 1 / (alpha * mask.bool().sum(1).double()).clamp(min=1)).clamp(0, 1)


def reverse_scan(x: Tensor, factor: Tensor) -> Tensor:
    """Compute y_t = x_t + f·y_{t+1} along the columns of x [N, S], in ⌈log2 S⌉ doublings; f [N] in [0, 1]."""
    power, step = factor.to(x.dtype)[:, None], 1
    while step < x.shape[1]:
        x = torch.cat([x[:, :-step] + power * x[:, step:], x[:, -step:]], 1)
        power, step = power * power, 2 * step
    return x


def _compaction(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return [N, S] the columns ordered with the valid ones first, and which of these places are valid."""
    keep = mask.bool()
    order = keep.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    return order, keep.gather(1, order)


def _spread(x: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(1, order, torch.where(keep, x, 0.0))


def _per_row(value: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(like.dtype)
    return like.new_full((len(like),), value)


def _check(x: Tensor, mask: Tensor, **factors: float) -> None:
    if x.dim() != 2 or x.shape != mask.shape:
        raise ValueError(f"rewards, values and mask must be [N, S] alike, got {list(x.shape)} and {list(mask.shape)}")
    for name, factor in factors.items():
        if not 0 <= factor <= 1:
            raise ValueError(f"{name} = {factor} must lie in [0, 1]")
