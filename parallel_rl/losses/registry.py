"""The table of losses by name: classes and functions, of the package and of users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.config.names import not_registered
from parallel_rl.counts import Aggregation, WeightedBy, check_aggregation, unit_of
from parallel_rl.losses.core.aggregation import aggregate, with_units
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.measures import count_true, measured_entries, measured_tokens
from parallel_rl.losses.core.options import NoConfig
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.metrics import Measure, Metric, Metrics
from parallel_rl.statistics import Statistics

LossT = TypeVar("LossT", bound=type[LossFn])

_LOSSES: dict[str, type[LossFn]] = {}

Level = Literal["token", "sequence", "pair"]
# (logprobs, batch), or with options (logprobs, batch, config)
Objective = Callable[..., "Tensor | tuple[Tensor, Mapping[str, Measure]]"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """Options of an objective on tokens; extend it for more options.

    aggregation: how tokens are averaged, see `NLLLossConfig`. max_length: divisor of "constant-length".
    token_weights: "count" or "sum", see `NLLLossConfig`.

    >>> ObjectiveConfig("constant-length", max_length=512).aggregation
    'constant-length'
    """

    aggregation: Aggregation = "token-mean"
    max_length: int | None = None
    token_weights: WeightedBy | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length, self.token_weights)


def losses() -> Mapping[str, type[LossFn]]:
    """Return every registered loss by its name."""
    return dict(_LOSSES)


def get_loss(name: str) -> type[LossFn]:
    """Return the loss registered as `name`; ValueError with the nearest one for an unknown name.

    >>> get_loss("nll").__name__
    'NLLLoss'
    """
    if name not in _LOSSES:
        raise ValueError(not_registered("loss", name, _LOSSES, "register_loss"))
    return _LOSSES[name]


def registered_name(loss_class: type[LossFn]) -> str:
    """Return the registered name of a loss, or its class's name."""
    return next((name for name, known in _LOSSES.items() if known is loss_class), loss_class.__name__)


def register_loss(name: str) -> Callable[[LossT], LossT]:
    """Register a loss class for `get_loss`, the trainer's `loss: {name: ...}` and the law harness.

    >>> from parallel_rl import NLLLoss, get_loss
    >>> @register_loss("doc_doubled_nll")
    ... class Doubled(NLLLoss):
    ...     def compute(self, batch):
    ...         loss, metrics = super().compute(batch)
    ...         return 2 * loss, metrics
    >>> get_loss("doc_doubled_nll").__name__
    'Doubled'

    Raises:
        ValueError: a taken name, or anything but a subclass of `LossFn`.
    """

    def decorate(loss_class: LossT) -> LossT:
        if not (isinstance(loss_class, type) and issubclass(loss_class, LossFn)):
            raise ValueError(
                f"@register_loss({name!r}) takes a subclass of LossFn, got {loss_class!r}; a function is registered with "
                "@register_objective"
            )
        _check_free(name)
        _LOSSES[name] = loss_class
        return loss_class

    return decorate


def _check_free(name: str) -> None:
    if name in _LOSSES:
        raise ValueError(f"a loss is registered as {name!r} already")


def register_objective(
    name: str,
    *,
    level: Level = "token",
    config: type | None = None,
    token_fields: tuple[str, ...] = (),
    sequence_fields: tuple[str, ...] = (),
    integer_fields: tuple[str, ...] = (),
    needs_entropy: bool = False,
    token_separable: bool = False,
    count: Callable[[TokenBatch], Statistics] | None = None,
    collect: Callable[[TokenBatch], Statistics] | None = None,
) -> Callable[[Objective], type[LossFn]]:
    """Make a loss of a function on flat local tokens, with all layouts, packing, metrics and the harness.

    >>> from parallel_rl import MinMax
    >>> @register_objective("doc_reinforced", token_fields=("advantages",))
    ... def Reinforced(logprobs, batch):
    ...     return -batch["advantages"] * logprobs, {"logprob": MinMax(logprobs)}
    >>> Reinforced({"aggregation": "seq-mean-token-mean"}).requirements.names
    ('advantages',)

    Args:
        name: in the registry.
        level: "token": the function receives log-probs [T_local] and returns one loss per token, aggregated by the config;
            `batch.segment_sum`, `batch.segment_mean` and `batch.expand` handle whole sequences. "sequence": it receives the
            sums of log-probs [B] and returns one loss per sequence, averaged over sequences. "pair": rows are (chosen,
            rejected), (chosen, rejected), ...; it receives the sums [B] and returns one loss per pair [B/2], averaged over
            pairs with two valid rows.
        config: a frozen dataclass of options, the function's third argument. On level "token" it extends `ObjectiveConfig`.
            None: `ObjectiveConfig` on level "token", else no options.
        token_fields, sequence_fields: names of the data's fields [B, S] and [B] that the function reads.
        integer_fields: those of them that hold integers or bools.
        needs_entropy: it reads `batch.entropy`.
        token_separable: on level "token", a token's loss depends on the log-prob and entropy of no other token, so the fused
            head (`LMHeadInput`) may compute gradients in forward; a false claim gives a wrong gradient. A truncation drops
            tokens, so gradients are then computed in backward anyway.
        count: from a batch without log-probs to the step's statistics that depend on the data alone; the function may then
            read `batch.statistics`, see `Statistics`.
        collect: like `count` for statistics that depend on the policy, from a batch with log-probs.

    The function returns one value per token (sequence, pair), not averaged, or (values, {"name": Mean(x), ...}): metrics of
    the same shape, reduced over the step's valid entries. Anything else is a ValueError on every context rank.

    Raises:
        ValueError: a taken name, an unknown level, options that do not fit the level.
    """
    _check_free(name)
    if level not in ("token", "sequence", "pair"):
        raise ValueError(f"level = {level!r} is not valid; choose 'token', 'sequence' or 'pair'")
    if token_separable and level != "token":
        raise ValueError(f"token_separable = True goes with level 'token'; {level!r} depends on sums over sequences")
    if level == "token" and config is not None and not issubclass(config, ObjectiveConfig):
        raise ValueError(
            f"config = {config.__name__} must extend ObjectiveConfig: level 'token' is aggregated by its keys"
        )

    def decorate(objective: Objective) -> type[LossFn]:
        def compute(self: LossFn, batch: TokenBatch) -> tuple[Tensor, Metrics]:
            options = () if config is None else (self.config,)
            logprobs = batch.logprobs if level == "token" else batch.segment_sum(batch.logprobs)
            result = objective(logprobs, batch, *options)
            mask, number = batch.mask if level == "token" else batch.sequence_mask, batch.counts.seqs
            if level == "pair":
                mask, number = mask[::2] & mask[1::2], number / 2
            values, measures = raise_on_all_ranks(
                lambda: _checked(name, level, result, mask), [batch.local.context_group], logprobs
            )
            if level == "token":
                cfg = self.config
                loss = aggregate(batch, values, cfg.aggregation, cfg.max_length)
                per = unit_of(cfg.aggregation, cfg.token_weights)
                metrics = measured_tokens(batch, measures)
            else:
                loss = batch.sequence_sum(values, mask, number)
                per = "pairs" if level == "pair" else "sequences"
                metrics = measured_entries(batch, measures, mask, number, per)
            defaults = {
                "loss": Metric("share", loss, per=per),
                "num_valid_samples": count_true(batch, batch.sequence_mask),
            }
            return loss, Metrics({**defaults, **metrics})

        fields = [*map(Field, token_fields), *(Field(field, per="sequence") for field in sequence_fields)]
        needs = Requirements(
            tuple(replace(field, dtype="integer") if field.name in integer_fields else field for field in fields),
            paired=level == "pair",
            counted=count is not None,
            collected=collect is not None,
            entropy=needs_entropy,
            truncatable=level != "pair",
            token_separable=token_separable,
        )

        members: dict[str, object] = {
            "__doc__": objective.__doc__,
            "__module__": objective.__module__,
            "config_class": config or (ObjectiveConfig if level == "token" else NoConfig),
            "requirements": cached_property(
                lambda self: (
                    with_units(needs, self.config.aggregation, self.config.token_weights) if level == "token" else needs
                )
            ),
            "compute": compute,
        }
        if count is not None:
            members["count_from"] = lambda self, batch: count(batch)
        if collect is not None:
            members["collect_from"] = lambda self, batch: collect(batch)
        loss_class: type[LossFn] = type(objective.__name__, (LossFn,), members)
        return register_loss(name)(loss_class)

    return decorate


def _checked(objective: str, level: Level, result: object, mask: Tensor) -> tuple[Tensor, Mapping[str, Measure]]:
    """Split an objective's result into values and measures; a scalar, which would broadcast, is refused."""
    values, measures = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(values, Tensor) or values.shape != mask.shape or not isinstance(measures, Mapping):
        kinds = [
            f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            for x in (result if isinstance(result, tuple) else (result,))
        ]
        raise ValueError(
            f"the objective {objective!r} returns {', '.join(kinds)}; on level {level!r} it must return a tensor of shape "
            f"{list(mask.shape)}, one loss a {level} and not averaged, or such a tensor and a dict of metrics"
        )
    _check_measures(objective, measures, mask)
    return values, measures


def _check_measures(objective: str, measures: Mapping[str, Measure], mask: Tensor) -> None:
    for name, measure in measures.items():
        if not isinstance(measure, Measure):
            raise ValueError(
                f"the objective {objective!r} returns {name} = {type(measure).__name__} as a metric; it must be a Mean, "
                "Sum or MinMax of parallel_rl"
            )
        if name in ("loss", "num_valid_samples"):
            raise ValueError(
                f"the objective {objective!r} returns the metric {name!r}, which every loss has; rename it"
            )
        if measure.values.shape != mask.shape:
            raise ValueError(
                f"the objective {objective!r} returns the metric {name!r} with shape {list(measure.values.shape)}; it must "
                f"have one value for each token (sequence, pair), {list(mask.shape)}"
            )
