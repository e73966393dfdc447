"""A checked model: its provider, its step, and the results of a rank and of one process."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from parallel_rl.megatron import unwrap
from parallel_rl.testing.whole_step.layouts import WIDTH, StepLayout
from parallel_rl.testing.whole_step.ranks import Inapplicable, needs_gpu, refusal, user_place
from parallel_rl.testing.whole_step.shrink import VOCABULARY

Provider = Callable[..., object]
_ENGINE = "transformer_engine"
_PASSED = ("config", "pre_process", "post_process", "vp_stage", "vocab_size", "max_sequence_length")
_OF_A_GPT_MODEL = ("config", "pre_process", "post_process", "vocab_size", "share_embeddings_and_output_weights")


def config_of(provider: Provider | TransformerConfig, config: object) -> TransformerConfig:
    """Return the config: the value, a function's result, or the provider; ValueError if it is none."""
    if config is None:
        config = provider
    if callable(config) and not isinstance(config, TransformerConfig) and config is not provider:
        config = config()
    if not isinstance(config, TransformerConfig):
        raise ValueError(
            f"config is {type(config).__name__}, not a TransformerConfig; pass one, or a function that returns one, as config="
        )
    return config


def build_chunks(
    provider: Provider | TransformerConfig, config: TransformerConfig, layout: StepLayout
) -> list[torch.nn.Module]:
    """Call the provider for each model chunk of this rank; ValueError if it returns no model or raises."""
    places = range(layout.vp) if layout.vp > 1 else [None]
    chunks: list[torch.nn.Module] = []
    for place in places:
        built = _call(provider, config, place)
        if isinstance(built, list | tuple) and len(built) == layout.vp:
            return [_checked(model, provider, layout) for model in built]
        chunks.append(_checked(built, provider, layout))
    return chunks


def _checked(built: object, provider: Provider | TransformerConfig, layout: StepLayout) -> torch.nn.Module:
    expected = "a GPTModel" if layout.vp == 1 else f"a GPTModel for each vp_stage, or a list of all {layout.vp}"
    kind = type(built).__name__
    if isinstance(built, list | tuple):
        kind = f"a {kind} of {len(built)} ({', '.join(type(item).__name__ for item in built[:3])})"
    if not isinstance(built, torch.nn.Module):
        raise ValueError(f"the provider {provider_name(provider)} returned {kind}; it must return {expected}")
    missing = [name for name in _OF_A_GPT_MODEL if not hasattr(unwrap(built), name)]
    if missing:
        raise ValueError(
            f"the provider {provider_name(provider)} returned {kind}, which has no {', '.join(missing)}; it must return "
            f"{expected}"
        )
    return built


def provider_name(provider: Provider | TransformerConfig) -> str:
    """Name a provider by its module, function, file and line."""
    return source_name(_function(provider, None))


def source_name(function: Callable[..., object]) -> str:
    """Name a function by its module, file and line.

    >>> source_name(len)
    'builtins:len'
    """
    function = inspect.unwrap(getattr(function, "func", function))  # of a functools.partial
    if not hasattr(function, "__qualname__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    place = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', '?')}{place}"


def stage_refusal(provider: Provider | TransformerConfig, layout: StepLayout) -> str:
    """Return why the provider's arguments do not allow several pipeline stages; empty if they do."""
    accepted = _arguments(_function(provider, None))
    if layout.pp > 1 and "pre_process" not in accepted:
        return (
            f"the provider {provider_name(provider)} takes no pre_process and post_process, so stages cannot be built; "
            "add the arguments"
        )
    if layout.vp > 1 and "vp_stage" not in accepted:
        return f"the provider {provider_name(provider)} takes no vp_stage, so virtual stages cannot be built; add the argument"
    return ""


def _function(provider: Provider | TransformerConfig, config: TransformerConfig | None) -> Provider:
    call = getattr(config or provider, "provide", None) if isinstance(provider, TransformerConfig) else provider
    if not callable(call):
        raise ValueError(
            f"the model is {type(provider).__name__}, which is no provider; pass a function config → model, or an object with "
            "provide()"
        )
    return call


def _arguments(call: Provider) -> set[str]:
    """Return the known argument names that a provider accepts."""
    parameters = inspect.signature(call).parameters
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return {*_PASSED} if takes_all else {*_PASSED} & parameters.keys()


def _call(provider: Provider | TransformerConfig, config: TransformerConfig, place: int | None) -> object:
    call = _function(provider, config)
    first_stage = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=place)
    last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=place)
    values = (config, first_stage, last_stage, place, VOCABULARY, 4 * WIDTH)
    known: dict[str, object] = dict(zip(_PASSED, values, strict=True))
    parameters = inspect.signature(call).parameters
    named = [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    accepted = _arguments(call)
    passed = {name: value for name, value in known.items() if name in accepted}
    first = named[0] if named else ""
    by_place = first not in known and first and parameters[first].default is inspect.Parameter.empty
    if isinstance(provider, TransformerConfig) or not by_place:
        by_place = False
    else:  # whatever its name is, the first argument is the config
        passed.pop("config", None)
    for name in named:
        if (
            name not in known
            and parameters[name].default is inspect.Parameter.empty
            and not (by_place and name == first)
        ):
            raise ValueError(
                f"the provider {provider_name(provider)} needs {name!r}, which check_step does not know; it passes "
                f"{', '.join(known)}. Bind it with functools.partial"
            )
    try:
        return call(config, **passed) if by_place else call(**passed)
    except (Exception, SystemExit) as error:
        if _ENGINE in f"{error}".lower().replace(" ", "_") or _through_engine(error):
            raise ValueError(
                "the provider needs Transformer Engine, which is not usable here "
                f"({type(error).__name__}: {error}); build the layers by parallel_rl.megatron.layer_spec(config), which takes "
                "local ones on a machine without it, or run the command where it is installed"
            ) from error
        if needs_gpu(error):
            raise ValueError(
                f"the provider {provider_name(provider)} needs a GPU ({error}); build on the CPU where "
                "torch.cuda.is_available() is false, or run the command on a machine with one"
            ) from error
        if reason := refusal(error):
            raise Inapplicable(reason) from error
        where = user_place("".join(traceback.format_exception(error)))
        at = f" at {where}" if where else ""
        raise ValueError(
            f"the provider {provider_name(provider)} raises {type(error).__name__}: {error}{at}"
        ) from error


def _through_engine(error: BaseException) -> bool:
    """Return whether Megatron's Transformer Engine layers raised the error because the engine is missing."""
    from megatron.core import extensions

    if getattr(extensions, "HAVE_TE", False):
        return False
    trace = error.__traceback__
    while trace is not None:
        if _ENGINE in trace.tb_frame.f_code.co_filename or "_TE" in trace.tb_frame.f_code.co_name:
            return True
        trace = trace.tb_next
    return isinstance(error, NameError) and "TE" in f"{error}"


Cut = tuple[int, int, int, int]  # dimension, stride, parts, and which of them a rank holds


@dataclass(frozen=True)
class StepSubject:
    """A model and its step, by the arguments of `check_step`."""

    provider: Provider | TransformerConfig
    config: TransformerConfig | Callable[[], TransformerConfig] | None = None
    forward_step: Callable[..., object] | None = None
    loss_callback: Callable[..., object] | None = None
    setup: Callable[[TransformerConfig], object] | None = None

    @property
    def is_script(self) -> bool:
        """Return whether the step is the user's."""
        return self.forward_step is not None or self.loss_callback is not None


@dataclass(frozen=True)
class Piece:
    """One weight on one rank, after the step."""

    name: str  # in a one-process model
    gradient: Tensor | None  # this rank's part; None if the weight is frozen here
    after: Tensor  # this rank's part
    cut: Cut | None  # this rank's part of the whole weight; None: all of it
    marked: bool  # Megatron's norm treats it as a shard, and counts it on every tensor rank
    expert: bool  # the weight lies on expert parallel ranks


@dataclass(frozen=True)
class RankResult:
    """One rank's result of the step on one layout."""

    place: Mapping[str, int]  # its rank in each group, by axis: tensor, context, data, pipeline, expert
    metrics: Mapping[str, float]  # reduced as a training loop logs them
    norm: float  # of Megatron's optimizer
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Truth:
    """The step of one process."""

    layout: str
    before: Mapping[str, Tensor]  # all weights by name
    gradients: Mapping[str, Tensor]  # of the weights that train
    after: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    norm: float
    clip: float  # the norm to which gradients are clipped
    vocabulary: int
    buffers: Mapping[str, Tensor]  # persistent ones by name
    dropout: tuple[str, ...] = ()  # modules that drop at random, with their rates


def part(whole: Tensor, cut: Cut | None, shape: torch.Size) -> Tensor:
    """Cut a rank's part from a whole tensor; rows of vocabulary padding are zero."""
    if cut is None:
        return whole
    dim, stride, parts, rank = cut
    missing = shape[dim] * parts - whole.shape[dim]
    if missing > 0:
        whole = torch.cat((whole, whole.new_zeros(missing, *whole.shape[1:])))
    return torch.cat([chunk.chunk(parts, dim)[rank] for chunk in whole.chunk(stride, dim)], dim)
