"""Losses by name, and a decorator that makes a loss of a user's own objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from parallel_rl.config import nearest
from parallel_rl.losses.base import LossFn, NoConfig
from parallel_rl.losses.batch import TokenBatch
from parallel_rl.losses.clipped_pg import ClippedPGLossFn
from parallel_rl.losses.nll import NLLLoss
from parallel_rl.losses.preference import DPOLossFn, PreferenceLoss
from parallel_rl.reduce import Aggregation, Metric, Metrics, token_weights

_LOSSES: dict[str, type[LossFn]] = {
    "clipped_pg": ClippedPGLossFn,
    "nll": NLLLoss,
    "preference": PreferenceLoss,
    "dpo": DPOLossFn,
}

Objective = Callable[[Tensor, TokenBatch], Tensor]


@dataclass(frozen=True)
class ObjectiveConfig:
    """aggregation: how tokens are averaged. max_length: L_max of "constant-length"."""

    aggregation: Aggregation = "token-mean"
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length = {self.max_length} must be a positive number of tokens")
        if (self.max_length is None) == (self.aggregation == "constant-length"):
            raise ValueError(
                f"max_length = {self.max_length} goes with aggregation 'constant-length' only, and it needs one"
            )


def losses() -> Mapping[str, type[LossFn]]:
    """Every registered loss by its name."""
    return dict(_LOSSES)


def get_loss(name: str) -> type[LossFn]:
    """The loss registered as `name`.

    Raises:
        ValueError: an unknown name, with the nearest one.
    """
    if name not in _LOSSES:
        raise ValueError(f"no loss is registered as {name!r}; {nearest(name, _LOSSES)}")
    return _LOSSES[name]


def register_objective(
    name: str,
    *,
    level: Literal["token", "sequence"] = "token",
    token_fields: tuple[str, ...] = (),
    sequence_fields: tuple[str, ...] = (),
    needs_entropy: bool = False,
) -> Callable[[Objective], type[LossFn]]:
    """Makes a loss of a function on flat local tokens; it then has every layout, packing, metrics and the law harness.

        @register_objective("reinforce", token_fields=("advantages",))
        def Reinforce(logprobs, batch):
            return -batch["advantages"] * logprobs

    Args:
        name: in the registry.
        level: "token": the function gets log-probs [T_local] and gives a loss a token, aggregated as the config says;
            what it needs of a whole sequence it takes from `batch.segment_sum`, `batch.segment_mean` and
            `batch.expand`. "sequence": it gets the sums of log-probs [B] and gives a loss a sequence, averaged over
            sequences; such a loss has no options.
        token_fields, sequence_fields: names of the fields [B, S] and [B] of the data that it reads.
        needs_entropy: it reads `batch.entropy`.

    Returns:
        A decorator that gives the loss class, whose instances have the call of `LossFn`.

    Raises:
        ValueError: a name that is taken, or an unknown level.
    """
    if name in _LOSSES:
        raise ValueError(f"a loss is registered as {name!r} already")
    if level not in ("token", "sequence"):
        raise ValueError(f"level = {level!r} is not valid; choose 'token' or 'sequence'")

    def decorate(objective: Objective) -> type[LossFn]:
        def compute(self: LossFn[ObjectiveConfig], batch: TokenBatch) -> tuple[Tensor, Metrics]:
            if level == "sequence":
                per_sequence = objective(batch.segment_sum(batch.logprobs), batch)
                loss = batch.sequence_sum(per_sequence, batch.sequence_mask, batch.counts.seqs)
            else:
                cfg = self.config
                weights = token_weights(cfg.aggregation, batch.tokens_per_sequence, batch.counts, cfg.max_length)
                loss = batch.weighted_sum(objective(batch.logprobs, batch), weights)
            return loss, Metrics({"loss": Metric("share", loss), "num_valid_samples": batch.count(batch.sequence_mask)})

        members = {
            "__doc__": objective.__doc__,
            "__module__": objective.__module__,
            "config_class": NoConfig if level == "sequence" else ObjectiveConfig,
            "token_fields": token_fields,
            "sequence_fields": sequence_fields,
            "needs_entropy": needs_entropy,
            "compute": compute,
        }
        _LOSSES[name] = type(objective.__name__, (LossFn,), members)
        return _LOSSES[name]

    return decorate
