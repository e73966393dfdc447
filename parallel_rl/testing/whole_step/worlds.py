"""A subject's step on ranks of this machine: the truth of one process, each layout, and the parts of a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel_rl.agreement import describe
from parallel_rl.testing.pool import WorldError, preload
from parallel_rl.testing.whole_step.compare import Compared, compare
from parallel_rl.testing.whole_step.layouts import StepLayout
from parallel_rl.testing.whole_step.parts import token_parts, weigh
from parallel_rl.testing.whole_step.provider import config_of
from parallel_rl.testing.whole_step.ranks import Ranks
from parallel_rl.testing.whole_step.rows import make_rows
from parallel_rl.testing.whole_step.run import run_layout, run_truth
from parallel_rl.testing.whole_step.shrink import adds_balance, shrink
from parallel_rl.testing.whole_step.subject import RankResult, StepSubject, Truth

BOUNDS = {torch.float64: 1e-6, torch.float32: 2e-3}
_MOST_WEIGHED = 3  # layouts whose gradients are explained by parts
ResultT = TypeVar("ResultT")
preload("parallel_rl.megatron", __name__)


class ModelFacts(NamedTuple):
    """A model's kind, by its config: `balanced` if its routers add losses; `notes` of `shrink`."""

    experts: bool
    balanced: bool
    heads: bool
    per_token: bool
    notes: tuple[str, ...]


def look(subject: StepSubject, ranks: Ranks) -> ModelFacts:
    """Read the subject's config on a rank.

    Raises:
        ValueError: it is none, or cannot shrink.
    """
    return _alone(ranks, _look, subject)


def _alone(ranks: Ranks, work: Callable[..., ResultT], *args: object) -> ResultT:
    """Run the work of one process, where an error is one of the caller's input."""
    try:
        return ranks.alone(work, *args)
    except WorldError as error:
        raise ValueError("; ".join(dict.fromkeys(error.errors.values())) or str(error).splitlines()[0]) from error


def _look(rank: int, subject: StepSubject) -> ModelFacts:
    config = config_of(subject.provider, subject.config)
    _, notes = shrink(config, 2)
    return ModelFacts(
        bool(config.num_moe_experts),
        adds_balance(config),
        bool(config.mtp_num_layers),
        bool(config.calculate_per_token_loss),
        tuple(notes),
    )


@dataclass
class Worlds:
    """The step of one subject at test size: each truth is computed once."""

    subject: StepSubject
    layers: int
    dtype: torch.dtype
    ranks: Ranks
    truths: dict[StepLayout, Truth] = field(default_factory=dict)
    weighed: int = 0

    def truth(self, key: StepLayout) -> Truth:
        """Run the step of one process.

        Raises:
            ValueError: it cannot be run.
        """
        if key not in self.truths:
            args = self.subject, key, self.layers, self.dtype, self.ranks.timeout
            self.truths[key] = _alone(self.ranks, _truth, *args)
        return self.truths[key]

    def compared(self, layout: StepLayout, key: StepLayout) -> Compared:
        """Run a layout, and compare it with the one process of `key`."""
        truth, bound = self.truth(key), BOUNDS[self.dtype]
        args = self.subject, layout, self.layers, truth, self.dtype, self.ranks.timeout
        try:
            results = self.ranks.run(layout.world, _rank, *args)
        except WorldError as error:
            return _failed(layout, error)
        except (ValueError, RuntimeError) as error:
            return Compared(layout, error=describe(error))
        seen = compare(layout, results, truth, bound)
        unexplained = [one for one in seen.gradients if one.factor is None]
        if len(unexplained) >= 0.9 * len(truth.before) and not layout.ep > 1 and self.weighed < _MOST_WEIGHED:
            self.weighed += 1
            return self._explained(seen, results, key, truth)
        return seen

    def _explained(self, seen: Compared, results: Sequence[RankResult], key: StepLayout, truth: Truth) -> Compared:
        parts = token_parts(make_rows(truth.vocabulary), seen.layout)
        total = sum(part.number for part in parts)
        single = key._replace(micro=1, packed=False)
        args = self.subject, single, self.layers, self.dtype, self.ranks.timeout
        try:
            of_parts = _alone(self.ranks, _parts, *args, [part.tokens for part in parts])
            whole = self.truth(single).gradients
        except ValueError:
            return seen  # the script divides by what such a mask leaves nothing of
        scaled = [
            {name: gradient * (part.number / total) for name, gradient in gradients.items()}
            for part, gradients in zip(parts, of_parts, strict=True)
        ]
        found = weigh(parts, scaled, results, whole)
        return seen if found is None else replace(seen, weighed=found.text, weighed_factor=found.factor)


def _truth(rank: int, subject: StepSubject, key: StepLayout, layers: int, dtype: torch.dtype, timeout: float) -> Truth:
    config = _shrunk(subject, layers)
    return run_truth(subject, config, key, dtype, timeout)


def _parts(
    rank: int,
    subject: StepSubject,
    key: StepLayout,
    layers: int,
    dtype: torch.dtype,
    timeout: float,
    tokens: Sequence[torch.Tensor],
) -> list[dict[str, torch.Tensor]]:
    config = _shrunk(subject, layers)
    return [dict(run_truth(subject, config, key, dtype, timeout, chosen).gradients) for chosen in tokens]


def _rank(
    rank: int,
    subject: StepSubject,
    layout: StepLayout,
    layers: int,
    truth: Truth,
    dtype: torch.dtype,
    timeout: float,
) -> RankResult:
    config = _shrunk(subject, layers)
    return run_layout(subject, config, layout, truth, dtype, timeout)


def _shrunk(subject: StepSubject, layers: int) -> TransformerConfig:
    """Return the config at test size, in a process that shows no more warnings: a user cannot tell which layout has them."""
    warnings.simplefilter("ignore")
    return shrink(config_of(subject.provider, subject.config), layers)[0]


def _failed(layout: StepLayout, error: WorldError) -> Compared:
    """Tell a layout that every rank refuses alike from a rank that ends or hangs; leave out what only follows from it."""
    first = {
        rank: text for rank, text in error.errors.items() if "Connection closed by peer" not in text
    } or error.errors
    texts = set(first.values())
    if len(first) == layout.world and len(texts) == 1:
        text = texts.pop()
        return Compared(layout, error=text, refused=not text.startswith(("SystemExit", "the process died")))
    told = [f"rank {rank}: {text}" for rank, text in sorted(first.items())]
    if error.silent and not first:
        told.append(f"rank {', '.join(map(str, error.silent))} gave no answer in {error.args[0].split()[-2]} s")
    return Compared(layout, error="; ".join(told))
