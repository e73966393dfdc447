"""Failed samples: ended by a time limit, retried, counted by cause, masked, and an error if there are too many."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_rl.advantages.table import SampleTable, by_group
from parallel_rl.agreement import communication_device, raise_on_all_ranks
from parallel_rl.config.strict import at_least, positive
from parallel_rl.experience.samples import Samples
from parallel_rl.groups import group_sum
from parallel_rl.servers.completions import MINUS_INFINITY
from parallel_rl.servers.http_reward import Scored

ResultT = TypeVar("ResultT")

_AGAIN = 1.0  # seconds between alarms of one call: the function may have swallowed the first
CAUSES = ("logprobs", "reward", "timeout")


@dataclass(frozen=True)
class FailedSamplesConfig:
    """Samples without a finite reward or finite log-probs: masked, as long as they are few.

    Attributes:
        retries: attempts to sample or score again before a sample is masked.
        max_share: fraction of a step's samples that may be masked; a larger fraction ends the run.
        timeout: seconds for a reward function in Python to score one sample, each time. null: no limit.
    """

    retries: int = 2
    max_share: float = 0.1
    timeout: float | None = None

    def __post_init__(self) -> None:
        positive(self, "timeout", below=math.inf)
        at_least(self, retries=0, max_share=0)
        if self.max_share > 1:
            raise ValueError(f"max_share = {self.max_share} must be at most 1, all samples of a step")


def score_again(score: Callable[[Sequence[int]], Scored], count: int, retries: int) -> Scored:
    """Score `count` samples, failed ones again up to `retries` times; faults are the first attempt's."""
    rewards, faults, _ = score(range(count))
    for _ in range(retries):
        if not faults:
            break
        rows = sorted(faults)
        again = score(rows)
        rewards[rows] = again.rewards
        faults = {rows[place]: faults[rows[place]] for place in again.faults}
    return Scored(rewards, faults)


def failed_logprobs(samples: Samples) -> Tensor:
    """Mark padded samples, [N] bool, with a sampled token whose log-prob is no finite number."""
    if samples.generation_logprobs is None:
        return torch.zeros_like(samples.lengths, dtype=torch.bool)
    finite = (samples.generation_logprobs > MINUS_INFINITY) & (samples.generation_logprobs < math.inf)
    return (samples.token_mask.bool() & ~finite).any(1)


def without_failed_logprobs(samples: Samples) -> tuple[Samples, Tensor]:
    """Set the log-probs of failed samples to 0; also return their mask [N]."""
    failed, logprobs = failed_logprobs(samples), samples.generation_logprobs
    if logprobs is None:
        return samples, failed
    return replace(samples, generation_logprobs=logprobs.masked_fill(failed[:, None], 0.0)), failed


def redrawn(samples: Samples, fresh: Samples, failed: Tensor, places: Sequence[int]) -> Samples:
    """Replace the samples that failed by fresh ones of the prompts at `places`; group ids stay."""
    count = len(fresh) // len(places)
    rows = [
        len(samples) + places.index(row // count) * count + row % count if bad else row
        for row, bad in enumerate(failed.tolist())
    ]
    return replace(Samples.concat([samples, fresh]).select(rows), group_ids=samples.group_ids)


def without_lone(rewards: Tensor, size: int) -> Tensor:
    """Set the reward of a sample to NaN if all others of its group, `size` rows in order, failed.

    >>> without_lone(torch.tensor([1.0, torch.nan, 2.0, 3.0]), 2).tolist()
    [nan, nan, 2.0, 3.0]
    """
    scored = ~(rewards if rewards.dim() == 2 else rewards[:, None]).isnan().any(1)
    lone = (scored.view(-1, size).sum(1) == 1) & (size > 1)
    rewards = rewards.clone()
    rewards[lone.repeat_interleave(size)] = torch.nan
    return rewards


def lone_in_groups(scored: Tensor, group_ids: Tensor, data: ProcessGroup | None = None) -> Tensor:
    """Mark samples [N] that alone are scored in their group; every data rank calls it.

    >>> lone_in_groups(torch.tensor([True, True, False, True]), torch.tensor([5, 6, 5, 6])).tolist()
    [True, False, True, False]

    `scored` is [N] bool, `group_ids` [N] in any order; the ranks of `data` hold other samples.
    """

    def lone(table: SampleTable) -> Tensor:
        return ((table.sums(table.rewards)[table.index] == 1) & ~table.alone).double()

    columns = {"rewards": scored.double(), "group_ids": group_ids}
    return by_group(lone, columns, torch.ones_like(scored), data) > 0


class SampleFailures:
    """Counter of failed samples by cause; it prints the first message of each cause."""

    def __init__(self, config: FailedSamplesConfig) -> None:
        self.config = config
        self._printed: set[str] = set()
        self._samples, self._counts, self._first = 0, [0] * len(CAUSES), ""

    def report(self, cause: str, message: str) -> None:
        """Keep the message of a failed sample for `count`, and print the first of its cause."""
        self._first = self._first or message
        if cause not in self._printed:
            self._printed.add(cause)
            print(
                f"warning: a sample failed and is masked: {message}; samples_failed/{cause} counts such samples",
                flush=True,
            )

    def report_logprobs(self, source: str, failed: Tensor, sample_ids: Sequence[int]) -> None:
        """Report the first of the samples [N] whose log-probs failed, if any."""
        if bool(failed.any()):
            first = sample_ids[int(failed.nonzero()[0, 0])]
            self.report("logprobs", f"{source} gave a log-prob that is not finite, of sample {first}")

    def report_unread(self, fault: str | None) -> None:
        """Print the first fault of log-probs that nothing reads; its sample stays."""
        if fault is not None and "unread" not in self._printed:
            self._printed.add("unread")
            print(
                f"warning: the log-probs of a sample are invalid, but this run does not read them: {fault}", flush=True
            )

    def count(
        self,
        samples: int,
        failed: Mapping[str, Tensor],
        data: ProcessGroup | None = None,
        sharing: Sequence[ProcessGroup | None] = (),
    ) -> None:
        """Add this rank's samples and, by cause, bool masks of the failed ones; every rank calls it.

        The ranks of `data` hold other samples, those of `sharing` the same ones.
        ValueError on all ranks, with their first messages: too many samples failed since the last `metrics`.
        """
        device = communication_device(data, torch.device("cpu"))
        numbers = [samples, *(int(failed[cause].sum()) if cause in failed else 0 for cause in CAUSES)]
        total, *counts = group_sum(torch.tensor(numbers, device=device), data).tolist()
        self._samples += total
        self._counts = [count + more for count, more in zip(self._counts, counts, strict=True)]
        most = self.config.max_share * self._samples * (1 + 1e-9)  # 0.29 · 100 is below 29
        if sum(self._counts) <= most:
            return
        causes = ", ".join(f"{n} by {cause}" for n, cause in zip(self._counts, CAUSES, strict=True) if n)
        what = f"{causes} of {self._samples} samples failed, more than failed_samples.max_share = {self.config.max_share:g}"

        def refuse() -> None:
            if self._first:
                raise ValueError(f"{self._first} ({what})")

        raise_on_all_ranks(refuse, [*sharing, data])
        raise ValueError(what)

    def metrics(self) -> dict[str, float]:
        """Return the counts of all ranks by name, and reset them."""
        counts = {f"samples_failed/{cause}": float(n) for cause, n in zip(CAUSES, self._counts, strict=True)}
        self._samples, self._counts, self._first = 0, [0] * len(CAUSES), ""
        return counts


class TimeLimitExceeded(BaseException):
    """A call took longer than its limit; no Exception, which the call itself might catch."""


def check_time_limit(seconds: float | None) -> None:
    """Refuse a time limit outside the main thread, the only one that handles signals; ValueError."""
    if seconds is not None and threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"timeout = {seconds:g} of a reward function needs the main thread, because it uses the signal SIGALRM; score "
            "in the main thread, or set timeout to null"
        )


def within(seconds: float | None, call: Callable[[], ResultT]) -> ResultT:
    """Return the result of `call`, or end it after `seconds`; None is no limit.

    Ends Python code and waiting calls (sleep, sockets, locks); compiled code ends when it returns to Python. Main thread only.

    Raises:
        TimeLimitExceeded: the call took longer, even if it returned a value then.
    """
    if seconds is None:
        return call()
    rang, over = False, False

    def ring(number: int, frame: object) -> None:
        nonlocal rang
        if not over:
            rang = True
            raise TimeLimitExceeded

    handler = signal.signal(signal.SIGALRM, ring)
    timer = 0.0, 0.0
    try:
        timer = signal.setitimer(signal.ITIMER_REAL, seconds, max(seconds, _AGAIN))
        result = call()
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
    if rang:
        raise TimeLimitExceeded
    return result
