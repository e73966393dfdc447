"""Run a subject's step on ranks: the one-process truth and its rounding, each layout, and the parts of a gradient."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel_rl.agreement import describe
from parallel_rl.testing.pool import WorldError, preload
from parallel_rl.testing.whole_step.compare import NO_ANSWER, Compared, compare
from parallel_rl.testing.whole_step.layouts import StepLayout, make_rows
from parallel_rl.testing.whole_step.parts import joined, token_parts, weigh
from parallel_rl.testing.whole_step.ranks import Inapplicable, Ranks, refusal, refused, user_place
from parallel_rl.testing.whole_step.run import run_layout, run_truth
from parallel_rl.testing.whole_step.shrink import adds_balance, shrink
from parallel_rl.testing.whole_step.subject import RankResult, StepSubject, Truth, config_of, stage_refusal

_MOST_KINDS = 6  # of modules that are kept in float32


def measure_rounding(
    subject: StepSubject, config: TransformerConfig, layout: StepLayout, timeout: float
) -> tuple[float, tuple[str, ...]]:
    """Compare float32 with float64 on one process; return the largest error and the float32 classes."""
    truth, kinds = _run_in_float64(subject, config, layout, timeout)
    seen = compare(layout, [run_layout(subject, config, layout, truth, torch.float32, timeout)], truth, 0.0)
    errors = (seen.loss, seen.gradient, seen.norm, seen.weights, *seen.metrics.values())
    return (max(errors) if all(map(math.isfinite, errors)) else math.inf), kinds


def _run_in_float64(
    subject: StepSubject, config: TransformerConfig, layout: StepLayout, timeout: float
) -> tuple[Truth, tuple[str, ...]]:
    """Run one process in float64; keep modules whose forward refuses float64 in float32."""
    kinds: tuple[str, ...] = ()
    while True:
        try:
            return run_truth(subject, config, layout, torch.float64, timeout, single=kinds), kinds
        except Exception as error:
            kind = _refusing_kind(error)
            if not kind or kind in kinds or len(kinds) == _MOST_KINDS:
                raise
            kinds = (*kinds, kind)


def _refusing_kind(error: Exception) -> str:
    """Return the class of the innermost module whose forward raised; "" for the whole model or none."""
    kind, trace = "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "forward" and isinstance(module, torch.nn.Module):
            kind = "" if hasattr(module, "module") or hasattr(module, "vocab_size") else type(module).__name__
        trace = trace.tb_next
    return kind


BOUND = 1e-6  # of relative errors in float64
_UNMEASURED = 2e-3  # in float32, where float64 gives no measure of the rounding
_ROUNDINGS = 20  # of one process that layouts may differ by
_FOLLOWS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
_OTHER_SEED = 7919
_MOST_WEIGHED = 3  # layouts whose gradients are explained by parts
ResultT = TypeVar("ResultT")
preload("parallel_rl.megatron", __name__)


class ModelFacts(NamedTuple):
    """A model's kind by its config: `balanced` if routers add losses; `notes` of `shrink`."""

    experts: bool
    balanced: bool
    heads: bool
    per_token: bool
    notes: tuple[str, ...]


def look(subject: StepSubject, ranks: Ranks) -> ModelFacts:
    """Read the subject's config on a rank; ValueError if it is no config or cannot shrink."""
    return _alone(ranks, _look, subject)


def _alone(ranks: Ranks, work: Callable[..., ResultT], *args: object) -> ResultT:
    """Run the work of one process; an error of the caller's input becomes a ValueError."""
    try:
        return ranks.alone(work, *args)
    except WorldError as error:
        raise ValueError(f"on one process: {'; '.join(dict.fromkeys(_errors_by_rank(error).values()))}") from error


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


class _OneProcess(NamedTuple):
    """The step of one process, to run on a rank."""

    subject: StepSubject
    key: StepLayout
    layers: int
    dtype: torch.dtype
    timeout: float

    def truth(self, tokens: torch.Tensor | None = None, seed: int | None = None) -> Truth:
        config = _shrunk(self.subject, self.layers)
        return run_truth(self.subject, config, self.key, self.dtype, self.timeout, tokens, seed)


@dataclass
class Worlds:
    """The step of one subject at test size; each truth is computed once."""

    subject: StepSubject
    layers: int
    dtype: torch.dtype
    ranks: Ranks
    truths: dict[StepLayout, Truth] = field(default_factory=dict)
    weighed: int = 0
    bound: float = BOUND

    def truth(self, key: StepLayout) -> Truth:
        """Run the step of one process; ValueError if it cannot run."""
        if key not in self.truths:
            self.truths[key] = _alone(self.ranks, _truth, self._one_process(key))
        return self.truths[key]

    def _one_process(self, key: StepLayout) -> _OneProcess:
        return _OneProcess(self.subject, key, self.layers, self.dtype, self.ranks.timeout)

    def measure_bound(self, key: StepLayout) -> str:
        """Set the bound for float32 from a run in float64; return a note on how."""
        try:
            args = self.subject, key, self.layers, self.ranks.timeout
            rounding, kinds = _alone(self.ranks, _rounding, *args)
        except ValueError as error:
            self.bound = _UNMEASURED
            return f"which is not measured: {error}"
        if not _ROUNDINGS * rounding <= _UNMEASURED:  # also for NaN
            self.bound = _UNMEASURED
            return f"which is not measured: one process in float32 is {rounding:.1e} off one in float64"
        self.bound = max(BOUND, _ROUNDINGS * rounding)
        return f"{_ROUNDINGS} times the rounding, measured against a run in float64 that keeps {', '.join(kinds)} in float32"

    def compared(self, layout: StepLayout, key: StepLayout) -> Compared:
        """Run a layout and compare it with the one process of `key`."""
        truth = self.truth(key)
        if reason := stage_refusal(self.subject.provider, layout):
            return Compared(layout, error=reason, refused=True)
        start = replace(truth, gradients={}, after={})  # a vocabulary at full size is large
        args = self.subject, layout, self.layers, start, self.dtype, self.ranks.timeout
        try:
            results = self.ranks.run(layout.world, _rank, *args)
        except WorldError as error:
            return _failed(layout, error)
        except (ValueError, RuntimeError) as error:
            return Compared(layout, error=describe(error))
        seen = compare(layout, results, truth, self.bound)
        if any(error.unexplained for error in seen.gradients) and not layout.ep > 1 and self.weighed < _MOST_WEIGHED:
            self.weighed += 1
            return self._explained(seen, results, key, truth)
        return seen

    def randomness(self) -> str:
        """Run one process with another seed; describe by how much its step differs, or return ""."""
        key, truth = next(iter(self.truths.items()))
        other = _alone(self.ranks, _truth, self._one_process(key), _OTHER_SEED)
        off = sum(float((g - other.gradients[name]).double().square().sum()) for name, g in truth.gradients.items())
        error = math.sqrt(off) / truth.norm
        if error <= self.bound:
            return ""
        drops = f"; it has {', '.join(truth.dropout[:3])}" if truth.dropout else ""
        return f"another seed changes the gradients of one process by {error:.1e}{drops}"

    def _explained(self, seen: Compared, results: Sequence[RankResult], key: StepLayout, truth: Truth) -> Compared:
        """Explain gradients by one factor for each part of the step: all together, then weight by weight."""
        parts = token_parts(make_rows(truth.vocabulary), seen.layout)
        total = sum(part.number for part in parts)
        single = key._replace(micro=1, packed=False)
        try:
            of_parts = _alone(self.ranks, _parts, self._one_process(single), [part.tokens for part in parts])
            whole = self.truth(single).gradients
        except ValueError:
            return seen  # the script divides by a count that such a mask makes zero
        scaled = [
            {name: gradient * (part.number / total) for name, gradient in gradients.items()}
            for part, gradients in zip(parts, of_parts, strict=True)
        ]
        of_layout = joined(results, truth.gradients)
        names = [error.name for error in seen.gradients if error.unexplained and error.name in of_layout]
        together = weigh(parts, scaled, of_layout, whole, names) if names else None
        explained = {name: together or weigh(parts, scaled, of_layout, whole, [name]) for name in names}
        gradients = [
            error
            if (weighing := explained.get(error.name)) is None
            else replace(error, factor=weighing.factor, text=weighing.text, weighed=weighing)
            for error in seen.gradients
        ]
        return replace(seen, gradients=tuple(gradients))


def _truth(rank: int, step: _OneProcess, seed: int | None = None) -> Truth:
    with _quiet():
        return step.truth(seed=seed)


def _rounding(
    rank: int, subject: StepSubject, key: StepLayout, layers: int, timeout: float
) -> tuple[float, tuple[str, ...]]:
    with _quiet():
        return measure_rounding(subject, _shrunk(subject, layers), key, timeout)


def _parts(rank: int, step: _OneProcess, tokens: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    with _quiet():
        return [dict(step.truth(tokens=mask).gradients) for mask in tokens]


def _rank(
    rank: int,
    subject: StepSubject,
    layout: StepLayout,
    layers: int,
    truth: Truth,
    dtype: torch.dtype,
    timeout: float,
) -> RankResult:
    with _quiet():
        try:
            return run_layout(subject, _shrunk(subject, layers), layout, truth, dtype, timeout)
        except Exception as error:
            if reason := refusal(error):
                raise Inapplicable(reason) from error
            raise


def _shrunk(subject: StepSubject, layers: int) -> TransformerConfig:
    return shrink(config_of(subject.provider, subject.config), layers)[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress a rank's warnings and logs, and redirect its prints to standard error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _failed(layout: StepLayout, error: WorldError) -> Compared:
    """Return the result of a layout that failed or that was refused by name."""
    reasons = {refused(text) for text in _first_errors(error).values()}
    if reasons and "" not in reasons:
        return Compared(layout, error="; ".join(sorted(reasons)), refused=True)
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, text in sorted(_errors_by_rank(error).items()):
        ranks[text].append(str(rank))
    if layout.world == 1:
        return Compared(layout, error="; ".join(ranks))
    names = {
        text: "every rank" if len(numbers) == layout.world else f"rank {', '.join(numbers)}"
        for text, numbers in ranks.items()
    }
    return Compared(layout, error="; ".join(f"{name}: {text}" for text, name in names.items()))


def _first_errors(error: WorldError) -> dict[int, str]:
    """Return the errors of ranks, without those that follow from another rank's end."""
    return {rank: text for rank, text in error.errors.items() if not any(end in text for end in _FOLLOWS)}


def _errors_by_rank(error: WorldError) -> dict[int, str]:
    """Return each rank's error with the user's line, or that the rank did not answer."""
    texts = {}
    errors = _first_errors(error) or ({} if error.silent else error.errors)
    for rank, text in errors.items():
        place = user_place(error.tracebacks.get(rank, ""))
        text = refused(text) or text.removeprefix("ValueError: ")
        texts[rank] = text if not place or place in text else f"{text} at {place}"
    if texts:
        return texts
    why = str(error).splitlines()[0]
    _, silent, seconds = why.partition(NO_ANSWER)
    for rank in error.silent:
        place = user_place(error.tracebacks.get(rank, ""), innermost_first=True)
        texts[rank] = (f"{silent}{seconds}" if silent else why) + (f", at {place}" if place else "")
    return texts
