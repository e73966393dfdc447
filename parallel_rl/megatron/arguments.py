"""Arguments of a step that are of another kind than it takes, and models that were built for another layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_model_config

from parallel_rl.losses.core.call import LossFunction
from parallel_rl.megatron.micro_batch import MicroBatch
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def split_partial(loss_fn: object) -> tuple[LossFunction, Statistics | None]:
    """Split `functools.partial(loss_fn, statistics=...)` in two; any other loss has no statistics with it.

    Raises:
        ValueError: a loss's name, its class, or a function, each with what makes a loss of it.
    """
    if isinstance(loss_fn, LossFunction):
        return loss_fn, None
    if isinstance(loss_fn, partial):
        if isinstance(loss_fn.func, LossFunction) and not loss_fn.args and set(loss_fn.keywords) == {"statistics"}:
            return loss_fn.func, loss_fn.keywords["statistics"]
        raise ValueError(
            f"loss_fn is {loss_fn!r}; a partial may give statistics= alone, the constructor takes all else"
        )
    refuse_name_and_class(loss_fn)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    raise ValueError(
        f"loss_fn must be a loss of this package, got {name}; `register_objective` makes one of a function (logprobs, batch)"
    )


def refuse_name_and_class(loss_fn: object) -> None:
    """Refuse what names or makes a loss and is none.

    Raises:
        ValueError: with the call that makes the loss.
    """
    if isinstance(loss_fn, str):
        raise ValueError(
            f"loss_fn = {loss_fn!r} is a name; give a loss: get_loss({loss_fn!r})({{}}, vocab_size=...), or of a recipe "
            f"kind, config = load_recipe({loss_fn!r}) and kind(config, vocab_size=...)"
        )
    if isinstance(loss_fn, type):
        raise ValueError(
            f"loss_fn is the class {loss_fn.__name__}; give an instance, {loss_fn.__name__}(vocab_size=...)"
        )


def check_sizes(config: TransformerConfig) -> None:
    """Refuse a model's config that was written for other sizes than those of Megatron's process groups.

    Megatron reads either, each in other places: context ranks would attend to their own tokens alone, stages hold all layers.

    Raises:
        ValueError: names both.
    """
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    for name, size in sizes.items():
        if (written := getattr(config, name, size)) != size:
            raise ValueError(
                f"the model's config has {name} = {written}, the process groups have {size}; give TransformerConfig the sizes "
                "of initialize_model_parallel"
            )


def fault_of(models: Sequence[torch.nn.Module], batches: object) -> ValueError | None:
    """Return the error of micro-batches that are no list of them, of a step without gradient, or of an unfit model.

    One rank may have it alone, so `prepare` raises it where all ranks agree.
    """
    try:
        if not torch.is_grad_enabled():
            raise ValueError(
                "forward_backward runs under torch.no_grad (or inference_mode), where there is no backward; call it outside, "
                "or score with `forward_only`"
            )
        _check_batches(batches)
        check_sizes(get_model_config(models[0]))
        _check_packed_rows(models, batches)
    except ValueError as error:
        return error
    return None


def _check_batches(batches: object) -> None:
    if isinstance(batches, Mapping | MicroBatch):
        raise ValueError(
            f"batches is one {type(batches).__name__}; give the step's micro-batches as a list, [batch] where it has one"
        )
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise ValueError(
            f"batches must be the list of the step's micro-batches, got {type(batches).__name__}; of an iterator take "
            "[next(iterator) for _ in range(get_num_microbatches())]"
        )
    for i, batch in enumerate(batches):
        if not isinstance(batch, Mapping | MicroBatch):
            raise ValueError(
                f"batches[{i}] is {type(batch).__name__}; a micro-batch is a dict of tensors, or what `packed_batch` makes"
            )


def _check_packed_rows(models: Sequence[torch.nn.Module], batches: object) -> None:
    """Megatron's own attention asserts that rows are padded: a stage would end alone, and the others would wait."""
    packed = isinstance(batches, Sequence) and any(isinstance(batch, MicroBatch) and batch.packed for batch in batches)
    if packed and any(isinstance(module, DotProductAttention) for model in models for module in model.modules()):
        raise ValueError(
            "packed rows on Megatron's DotProductAttention, which takes padded ones only; build the layers by "
            "`layer_spec(config)`, which takes Transformer Engine's where it is installed"
        )
