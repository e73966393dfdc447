"""The user's model: how a provider of Megatron-LM's, Megatron-Bridge's or one's own is called, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel_rl.testing.whole_step.layouts import WIDTH, StepLayout
from parallel_rl.testing.whole_step.shrink import VOCABULARY

Provider = Callable[..., object]
_ENGINE = "transformer_engine"


def config_of(provider: Provider | TransformerConfig, config: object) -> TransformerConfig:
    """Return the config of a provider: the one that is passed, what a function of it returns, or the provider itself.

    Raises:
        ValueError: neither is a TransformerConfig.
    """
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
    """Call the provider for each model chunk of this rank.

    Raises:
        ValueError: a provider that returns no model, wants an argument that is unknown here, or needs Transformer Engine.
    """
    places = range(layout.vp) if layout.vp > 1 else [None]
    chunks: list[torch.nn.Module] = []
    for place in places:
        built = _call(provider, config, place)
        if isinstance(built, list | tuple) and len(built) == layout.vp and _are_models(built):
            return list(built)
        if not _are_models([built]):
            raise ValueError(
                f"the provider returned {type(built).__name__}; it must return a model, or a list of its chunks"
            )
        assert isinstance(built, torch.nn.Module)
        chunks.append(built)
    return chunks


def _are_models(built: Sequence[object]) -> bool:
    return all(isinstance(model, torch.nn.Module) for model in built)


def _call(provider: Provider | TransformerConfig, config: TransformerConfig, place: int | None) -> object:
    call = getattr(config, "provide", None) if isinstance(provider, TransformerConfig) else provider
    if not callable(call):
        raise ValueError(
            f"the model is {type(provider).__name__}, which is no provider; pass a function config → model, or an object with "
            "provide()"
        )
    known: dict[str, object] = {
        "config": config,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=place),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=place),
        "vp_stage": place,
        "vocab_size": VOCABULARY,
        "max_sequence_length": 4 * WIDTH,
    }
    parameters = inspect.signature(call).parameters
    named = [name for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    takes_all = any(one.kind == one.VAR_KEYWORD for one in parameters.values())
    passed = {name: value for name, value in known.items() if takes_all or name in named}
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
                f"the provider needs {name!r}, which check_step does not know; it passes {', '.join(known)}. Bind it with "
                "functools.partial"
            )
    if place is not None and "vp_stage" not in passed:
        raise ValueError("the provider takes no vp_stage, so virtual stages cannot be built; add the argument")
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and "pre_process" not in passed:
        raise ValueError(
            "the provider takes no pre_process and post_process, so stages cannot be built; add the arguments"
        )
    return _run(call, config if by_place else None, passed)


def _run(call: Callable[..., object], config: TransformerConfig | None, passed: dict[str, object]) -> object:
    try:
        return call(**passed) if config is None else call(config, **passed)
    except Exception as error:
        if _ENGINE in f"{error}".lower().replace(" ", "_") or _through_engine(error):
            raise ValueError(
                "the provider needs Transformer Engine, which is not usable here "
                f"({type(error).__name__}: {error}); build the layers by parallel_rl.megatron.layer_spec(config), which takes "
                "local ones on a machine without it, or run the command where it is installed"
            ) from error
        raise


def _through_engine(error: BaseException) -> bool:
    """Whether the error came from Megatron's layers of Transformer Engine on a machine that lacks it."""
    from megatron.core import extensions

    if getattr(extensions, "HAVE_TE", False):
        return False
    trace = error.__traceback__
    while trace is not None:
        if _ENGINE in trace.tb_frame.f_code.co_filename or "_TE" in trace.tb_frame.f_code.co_name:
            return True
        trace = trace.tb_next
    return isinstance(error, NameError) and "TE" in f"{error}"
