"""Groups of a step, with prompts resampled if their samples teach nothing (DAPO's dynamic sampling)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from parallel_rl.agreement import communication_device
from parallel_rl.experience.samples import Samples
from parallel_rl.groups import ParallelGroups, sum_over_ranks


@dataclass(frozen=True)
class DynamicSampling:
    """Keep a prompt iff low < its mean raw reward < high, and sample others (DAPO, arXiv 2503.14476).

    Attributes:
        low: lower bound of the mean, excluded. high: upper bound of the mean, excluded.
        max_rounds: sampling rounds, including the first.
        exhausted: if prompts are missing after all rounds: "error", or "mask": keep the last prompts with `sample_mask` 0.
    """

    low: float = 0.0
    high: float = 1.0
    max_rounds: int = 10
    exhausted: Literal["error", "mask"] = "error"

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        if self.max_rounds < 2:
            raise ValueError(f"max_rounds = {self.max_rounds} must be at least 2: one round never samples again")

    def keeps(self, rewards: Tensor) -> list[bool]:
        """Return whether each prompt stays, from rewards [prompts, samples]; NaN for failed samples.

        >>> DynamicSampling().keeps(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        [True, False]
        """
        means = rewards.double().nanmean(1)
        return ((self.low < means) & (means < self.high)).tolist()


# (places to fill, round) -> a prompt's samples for each place, adjacent; raw rewards [N] or [N, K]. Every rank calls it each
# round; without places it may return None.
Draw = Callable[[Sequence[int], int], tuple[Samples, Tensor] | None]


class Drawn(NamedTuple):
    """Samples of this rank's prompts and their raw rewards [N] or [N, K].

    Attributes:
        keep: [N] bool: samples of prompts that stay.
        first_rewards: of the first round, the policy's own. tried: prompts sampled in all rounds.
    """

    samples: Samples
    rewards: Tensor
    keep: Tensor
    first_rewards: Tensor
    tried: int


def draw_groups(
    draw: Draw,
    count: int,
    size: int,
    dynamic: DynamicSampling | None,
    groups: ParallelGroups,
    *,
    in_place: bool = True,
) -> Drawn:
    """Draw `size` samples of each of `count` prompts; with dynamic sampling, over several rounds.

    >>> from parallel_rl.experience import padded_samples
    >>> rewards = [[1.0, 1.0, 0.0, 1.0], [0.0, 1.0]]  # the first prompt teaches nothing and is replaced
    >>> def draw(places, number):
    ...     return padded_samples([[number]] * 2 * len(places), [[9]] * 2 * len(places)), torch.tensor(rewards[number])
    >>> draw_groups(draw, 2, 2, DynamicSampling(), ParallelGroups()).samples.input_ids[:, 0].tolist()
    [1, 1, 0, 0]

    Args:
        draw: see `Draw`.
        groups: the data ranks; each continues while another lacks prompts.
        in_place: later prompts take the places of those they replace; else order of arrival, masked prompts last.

    Raises:
        ValueError: prompts are missing after the last round and are not masked; on all data ranks alike.
    """
    parts: list[tuple[Samples, Tensor]] = []
    device = communication_device(groups.data, torch.device("cpu"))
    group_at, missing, tried, short = [0] * count, list(range(count)), 0, 0
    for number in range(1 if dynamic is None else dynamic.max_rounds):
        drawn = draw(missing, number)
        if drawn is not None:
            parts.append(drawn)
            rewards = drawn[1] if drawn[1].dim() == 1 else drawn[1].sum(1)
            stays = [True] * len(missing) if dynamic is None else dynamic.keeps(rewards.view(len(missing), size))
            for place in missing:
                group_at[place], tried = tried, tried + 1
            missing = [place for place, good in zip(missing, stays, strict=True) if not good]
        short = 0 if dynamic is None else sum_over_ranks(len(missing), groups.data, device)
        if not short:
            break
    if dynamic is not None and short and dynamic.exhausted == "error":
        raise ValueError(
            f"after {dynamic.max_rounds} rounds {short} prompts have no mean reward between {dynamic.low} and {dynamic.high}; "
            "raise max_rounds, widen the bounds, or set exhausted to 'mask'"
        )
    masked = {group_at[place] for place in missing}
    order = group_at if in_place else sorted(group_at, key=lambda group: (group in masked, group))
    rows = torch.tensor([group * size + index for group in order for index in range(size)], dtype=torch.int64)
    rewards = torch.cat([part for _, part in parts])
    keep = torch.tensor([group not in masked for group in order], device=rewards.device).repeat_interleave(size)
    samples = Samples.concat([part for part, _ in parts]).select(rows)
    return Drawn(samples, rewards[rows.to(rewards.device)], keep, parts[0][1], tried)
