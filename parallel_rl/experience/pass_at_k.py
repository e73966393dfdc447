"""mean@k and pass@k of several completions a prompt, over all prompts and by source."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pass_at_k(passed: Tensor, k: int) -> Tensor:
    """Estimate the chance that one of k completions of a prompt passes, from n ≥ k, without bias.

    1 − C(n − c, k) / C(n, k) for c passing completions (arXiv 2107.03374), as the product 1 − Π_{i = n−c+1}^{n} (1 − k / i),
    without large numbers.

    >>> pass_at_k(torch.tensor([[True, False, False, False], [False, False, False, False]]), 2).tolist()
    [0.5, 0.0]

    Args:
        passed: [N, n], whether each completion of N prompts passes.
        k: number of samples.

    Returns:
        [N] float64.

    Raises:
        ValueError: k outside [1, n].
    """
    n = passed.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} must lie in [1, {n}], the completions of a prompt")
    i = torch.arange(1, n + 1, dtype=torch.float64)
    among = i > n - passed.sum(1, keepdim=True)
    return 1 - torch.where(among, 1 - k / i, 1.0).prod(1)  # with fewer than k failures, one factor is 0


def evaluation_metrics(rewards: Tensor, sources: Sequence[str | None], passing: float) -> dict[str, float]:
    """Return mean@n, the mean reward, and pass@k for k = 2, 4, ... up to n of N prompts.

    With several sources, also for each, as `held_out_mean@4/gsm8k`. One completion each of one source has none beyond the
    mean reward.

    >>> evaluation_metrics(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), ["a", "b"], 1.0)["held_out_pass@2/a"]
    1.0

    Args:
        rewards: [N, n] float64.
        sources: of each prompt, or None.
        passing: least reward of a passing completion.
    """
    n, metrics = rewards.shape[1], dict[str, float]()
    names = sorted({source for source in sources if source is not None})
    parts = [("", list(range(len(sources))))]
    if len(names) > 1:
        parts += [(f"/{name}", [row for row, source in enumerate(sources) if source == name]) for name in names]
    for suffix, rows in parts:
        part = rewards[rows]
        if n > 1 or suffix:
            metrics[f"held_out_mean@{n}{suffix}"] = float(part.mean())
        for k in ks(n):
            metrics[f"held_out_pass@{k}{suffix}"] = float(pass_at_k(part >= passing, k).mean())
    return metrics


def ks(n: int) -> list[int]:
    """List 2, 4, 8, ... below n, and n; empty for n = 1.

    >>> ks(6)
    [2, 4, 6]
    """
    powers = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*powers, n] if n > 1 else []
