"""How a host's call feeds a loss: its fields, the count that divides the loss, and hidden factors to undo."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.config.json_text import brief
from parallel_rl.functional.dppo import REC
from parallel_rl.functional.surrogates import TOPR
from parallel_rl.groups import group_sum
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.policy import PolicyLoss
from parallel_rl.losses.policy_config import PolicyLossConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.metrics import Metrics


def averaged(share: Tensor, ranks: int, micro_batches: int = 1) -> Tensor:
    """Multiply a local loss by the ranks and micro-batches that a host (DDP, FSDP) averages over.

    >>> averaged(torch.tensor(0.25), ranks=2, micro_batches=4).item()
    2.0
    """
    for name, number in (("ranks", ranks), ("micro_batches", micro_batches)):
        if number < 1:
            raise ValueError(f"{name} = {number} must be at least 1")
    return share * (ranks * micro_batches)


def whole_over_context(share: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum local losses over context ranks, for a host that logs the sum; the gradient stays local.

    >>> whole_over_context(torch.tensor(0.25), None).item()
    0.25
    """
    return share + (group_sum(share.detach(), group) - share.detach())


def floats(metrics: Metrics) -> dict[str, float]:
    """Copy this rank's numbers to the host, in one transfer.

    >>> from parallel_rl.metrics import Metric, Metrics
    >>> floats(Metrics({"loss": Metric("share", torch.tensor(0.5))}))
    {'loss': 0.5}
    """
    if not metrics:
        return {}
    return dict(zip(metrics, torch.stack([x.double() for x in metrics.values()]).tolist(), strict=True))


def numerator_denominator(metrics: Metrics, calls: int) -> dict[str, Tensor]:
    """Map name → [numerator, denominator], which a host (Megatron-LM) sums over all calls, then divides.

    `calls`: micro-batches × data ranks × context ranks, at least 1. A share or count is `calls` times its value over 1, so the
    quotient is its sum. Extrema and squared ratios have no such form and are left out.

    >>> from parallel_rl.metrics import Metric, Metrics
    >>> pair = numerator_denominator(Metrics({"loss": Metric("share", torch.tensor(0.5))}), calls=4)["loss"]
    >>> pair.tolist()
    [2.0, 1.0]
    """
    if calls < 1:
        raise ValueError(f"calls = {calls} must be at least 1")
    pairs = {}
    for name in metrics:
        part = metrics.parts(name)
        value = part.value.double()
        if part.kind == "ratio" and part.denominator is not None:
            pairs[name] = torch.stack([value, part.denominator.double()])
        elif part.kind in ("share", "count"):
            pairs[name] = torch.stack([calls * value, torch.ones_like(value)])
    return pairs


def check_fits(host: str, loss_fn: object, fields: Collection[str], *, entropy: bool = False) -> None:
    """Refuse an object that is not a loss, and a loss that reads more than the host's fields.

    >>> from parallel_rl import DPOLossFn
    >>> check_fits("verl", DPOLossFn(), ("advantages", "prev_logprobs"))
    Traceback (most recent call last):
    ValueError: DPOLossFn reads reference_policy_logprobs, which verl does not hand over; it has advantages, prev_logprobs
    """
    if not isinstance(loss_fn, LossFn):
        got = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else brief(loss_fn)
        cure = (
            "build it from its config" if isinstance(loss_fn, type) else "load_recipe gives a recipe's class and config"
        )
        raise ValueError(f"{host} takes a loss such as PolicyLossFn({{...}}), got {got}; {cure}")
    name, needs = type(loss_fn).__name__, loss_fn.requirements
    if needs.reads != "log-probs":
        raise ValueError(f"{name} reads {needs.reads} of the model's output; {host} hands over log-probs")
    if needs.statistics:
        raise ValueError(
            f"{name} in this configuration needs statistics of the whole step, which {host} has no call for"
        )
    lacking = [field for field in needs.names if field not in fields]
    if lacking:
        raise ValueError(
            f"{name} reads {', '.join(lacking)}, which {host} does not hand over; it has {', '.join(fields) or 'no fields'}"
        )
    if needs.entropy and not needs.entropy_measured and not entropy:
        raise ValueError(f"{name} in this configuration reads the entropy, which {host} does not hand over")


def check_learns(host: str, loss_fn: LossFn) -> None:
    """Refuse a loss that ignores the advantages, in a host that trains by them."""
    if "advantages" not in loss_fn.requirements.names:
        raise ValueError(
            f"{type(loss_fn).__name__} does not read the advantages, so that {host} would train without its rewards; take a "
            "policy loss"
        )


class Setting(NamedTuple):
    """Setting of a host's config: its dotted key, the host's default, our options' names for it."""

    key: str
    default: float | str | None
    names: tuple[str, ...]


def read_setting(config: object, key: str) -> object:
    """Return the value of a dotted key of a host's config, of attributes or mappings; None without it.

    >>> read_setting({"cispo": {"cispo_eps_clip_low": 0.1}}, "cispo.cispo_eps_clip_low")
    0.1
    """
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config


def check_settings(host: str, loss_fn: LossFn, config: object, settings: Sequence[Setting]) -> None:
    """Refuse a number of the host's config that is not the surrogate's; the host's default passes.

    >>> from parallel_rl import PolicyLossFn
    >>> check_settings("verl", PolicyLossFn(), {"clip_ratio_c": 4.0}, [Setting("clip_ratio_c", 3.0, ("dual_clip",))])
    Traceback (most recent call last):
    ValueError: clip_ratio_c = 4.0, but the surrogate 'ppo' has dual_clip = None; give the loss the number of verl's config
    """
    if not isinstance(loss_fn, PolicyLoss):
        return
    surrogate = loss_fn.policy.surrogate
    for key, default, names in settings:
        value, name = read_setting(config, key), next((name for name in names if hasattr(surrogate, name)), None)
        if name is None or value is None or value == default or value == getattr(surrogate, name):
            continue
        raise ValueError(
            f"{key} = {value!r}, but the surrogate {surrogate.name!r} has {name} = {getattr(surrogate, name)!r}; give the loss "
            f"the number of {host}'s config"
        )


def losses_of(recipes: Sequence[str], **options: object) -> Iterator[tuple[str, LossFn]]:
    """Yield (name in a host's registry, loss) of each recipe, with policy `options` replaced.

    >>> [name for name, _ in losses_of(["dapo"], kl=None)]
    ['parallel_rl:dapo']
    """
    from parallel_rl.recipes import find_recipe, load_recipe

    for recipe in recipes:
        loss_class, config = load_recipe(recipe)
        if isinstance(config, PolicyLossConfig):
            config = replace(config, **options)  # type: ignore[arg-type]
        yield f"parallel_rl:{find_recipe(recipe).stem}", loss_class(config)


def divided_by(loss_fn: LossFn) -> dict[str, str | None]:
    """Map each metric to its divisor, see `Metrics.divided_by`; ValueError if log-probs are not enough.

    >>> from parallel_rl import NLLLoss
    >>> divided_by(NLLLoss({"aggregation": "seq-mean-token-mean"}))["loss"]
    'sequences'
    """
    return _trial(loss_fn, 2, 4)[1].divided_by


def unit_of(loss_fn: LossFn) -> str | None:
    """Find by trial calls what divides the loss: "tokens", "sequences", or None for neither or both.

    >>> from parallel_rl import DPOLossFn
    >>> unit_of(DPOLossFn())
    'sequences'
    """
    # off policy a correction may drop all, on policy a KL is 0
    apart = 1.0 if float(_trial(loss_fn, 2, 4)[0]) else 0.0
    loss, *others = (float(_trial(loss_fn, *counts, apart)[0]) for counts in ((2, 4), (4, 4), (2, 8)))
    halved = [abs(other - loss / 2) <= 1e-6 * abs(loss) for other in others]
    return None if halved[0] == halved[1] else "sequences" if halved[0] else "tokens"


def _trial(loss_fn: LossFn, seqs: int, toks: int, apart: float = 1.0) -> tuple[Tensor, Metrics]:
    """Compute the loss of two rows of two tokens; with `apart` 0 recorded log-probs are the policy's."""
    g = torch.Generator().manual_seed(0)
    data: dict[str, Tensor] = {"token_mask": torch.tensor([[0, 1, 1], [0, 1, 1]])}
    logprobs = -torch.rand(2, 3, generator=g)
    for field in loss_fn.requirements.fields:
        shape = (2,) if field.per == "sequence" else (2, 3, 1) if field.width else (2, 3)
        floats = -torch.rand(shape, generator=g)  # also fit for a log-prob
        floats = torch.lerp(logprobs, floats, apart) if shape == (2, 3) else floats
        data[field.name] = floats if field.dtype in ("float", "label") else torch.zeros(shape, dtype=torch.int64)
    return loss_fn.from_logprobs(
        logprobs,
        data=data,
        global_valid_seqs=torch.tensor(seqs),
        global_valid_toks=torch.tensor(toks),
        entropy=-logprobs,
    )


def scales_with_advantages(loss_fn: LossFn) -> bool:
    """Return whether scaling a token's advantage by w ≥ 0 scales its loss by w.

    >>> from parallel_rl import PolicyLossFn
    >>> scales_with_advantages(PolicyLossFn({"surrogate": {"name": "topr", "advantage_threshold": 0.5}}))
    False
    """
    if not isinstance(loss_fn, PolicyLoss):
        return False
    options = loss_fn.policy
    surrogate = options.surrogate
    if isinstance(surrogate, TOPR) and surrogate.advantage_threshold != 0:
        return False
    if isinstance(surrogate, REC) and (surrogate.weight == "advantage" or surrogate.regularizer_coef > 0):
        return False
    return options.kl is None and not options.entropy_bonus and options.positive_nll_weight == 0
