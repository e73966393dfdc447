"""Base of Trinity-RFT's policy losses: the names of its trainers, the call, and the returned values."""

from __future__ import annotations

import functools
import inspect
from abc import ABC
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count, Step
from parallel_rl.config.strict import nearest
from parallel_rl.counts import Aggregation
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = tuple[Tensor, Mapping[str, "float | Tensor"]]
ResultT = TypeVar("ResultT")


class KeyMapper:
    """Names of tensors in a trainer, and in Trinity."""

    def __init__(self, to_trinity_map: Mapping[str, str]) -> None:
        self.to_trinity_map = dict(to_trinity_map)
        self.from_trinity_map = {theirs: ours for ours, theirs in to_trinity_map.items()}

    def to_trinity(self, key: str) -> str:
        return self.to_trinity_map.get(key, key)

    def from_trinity(self, key: str) -> str:
        return self.from_trinity_map.get(key, key)


ALL_MAPPERS = {
    "verl": KeyMapper(
        {
            "log_prob": "logprob",
            "old_log_probs": "old_logprob",
            "ref_log_prob": "ref_logprob",
            "response_mask": "action_mask",
            "advantages": "advantages",
        }
    ),
    "tinker": KeyMapper({}),
}


def trinity_call(call: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Let `call` take tensors as keywords by the backend's names; counts and group make its `within`."""
    known = set(inspect.signature(call).parameters)

    @functools.wraps(call)
    def wrapper(
        self: PolicyLossFn,
        *args: object,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
        statistics: Statistics | None = None,
        **kwargs: object,
    ) -> ResultT:
        named = {self.mapper.to_trinity(key): value for key, value in kwargs.items()}
        within = Step(global_valid_seqs, global_valid_toks, context_parallel_group, statistics)
        return call(self, *args, **{key: value for key, value in named.items() if key in known}, within=within)

    return wrapper


class PolicyLossFn(ABC):
    """Policy loss on log-probs [B, T] of responses: `loss, metrics = fn(logprob, ...)`.

    Tensors come in the order of the call or as keywords, by Trinity's names or those of `backend`; other keywords are dropped.
    Every loss also takes global_valid_seqs and global_valid_toks, counts of the whole optimizer step, and
    context_parallel_group, whose ranks split each row's tokens ([B, T/cp], all tensors alike). With counts a loss with
    `collect` needs its reduced result, statistics.

    Returns:
        The loss and a dict of floats by the origin's names; with counts or a context group a `Metrics` of local parts.
    """

    __call__: Callable[..., Result]
    #: default arguments that differ between Trinity's configs and its constructors
    other_defaults: ClassVar[Mapping[str, object]] = {}

    def __init__(self, backend: str = "verl") -> None:
        if backend not in ALL_MAPPERS:
            raise ValueError(f"backend = {backend!r} is not valid; {nearest(backend, ALL_MAPPERS)}")
        self.backend = backend
        self.mapper = ALL_MAPPERS[backend]

    @property
    def select_keys(self) -> list[str]:
        """Return the backend's names of the tensors that the loss reads, other than the log-probs."""
        parameters = inspect.signature(type(self).__call__).parameters.values()
        keys = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        return [self.mapper.from_trinity(key) for key in keys if key not in ("self", "logprob")]

    @classmethod
    def default_args(cls) -> dict[str, object]:
        """Return the constructor's arguments for a config that gives none: defaults and `other_defaults`."""
        defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
        defaults = {name: value for name, value in defaults.items() if name != "backend" and value is not None}
        return {**defaults, **cls.other_defaults}


def aggregation(mode: str) -> Aggregation:
    """Return the library's mode for which `scaled` gives Trinity's `loss_agg_mode`; refuse unknown ones."""
    modes: dict[str, Aggregation] = {
        "token-mean": "token-mean",
        "seq-mean-token-sum": "seq-mean-token-sum",
        "seq-mean-token-mean": "seq-mean-token-mean",
        "seq-mean-token-sum-norm": "seq-mean-token-sum",
    }
    if mode not in modes:
        raise ValueError(f"loss_agg_mode = {mode!r} is not valid; {nearest(mode, modes)}")
    return modes[mode]


def scaled(loss: Tensor, batch: TokenBatch, mode: str) -> Tensor:
    """Apply Trinity's denominator: seq-mean-token-sum-norm divides by the padded width alone (Q40)."""
    if mode != "seq-mean-token-sum-norm":
        return loss
    width = batch.shape[1] * batch.local.layout.cp_size
    return (loss * batch.counts.seqs / max(width, 1)).to(loss.dtype)


def reported(metrics: Mapping[str, Metric], step: Step) -> Mapping[str, float | Tensor]:
    """Return floats, copied at once, if the call is the whole step, else this rank's parts."""
    if not step.alone or not metrics:
        return Metrics(metrics)
    values = torch.stack([metric.value.detach().double() for metric in metrics.values()])
    return dict(zip(metrics, values.tolist(), strict=True))
