"""Checks of the training loop around a step: its number, its optimizer, and stale gradients."""

from __future__ import annotations

import math
import re
import warnings
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallel_rl.validation import get_validation

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

_OF_LOSS = "the loss (a checksum of its class, config, temperature and vocab_size)"
_OF_SCALE = "the loss scale (config.grad_scale_func of 1, in millionths)"
_OF_WEIGHTS = (
    "the model's weights (a checksum, also of which weights train; data and context ranks start alike: one seed for all, or "
    "DDP's broadcast_params; later config.finalize_model_grads_func and one kind of optimizer on all keep them so)"
)
_OF_REPLICAS = (
    "the weights that tensor ranks hold alike, such as norms, or which weights train (requires_grad; a checksum)"
)
_NOT_ZEROED = (
    "the gradients of an earlier step are still there, and this step's are added to them; before each step call {}"
)
_FIRST_STEPS = 3  # with checks that cost a collective or a wait
_ROUNDING = 1e-3  # of the factor of a loss
_NORMALISED, _NORMALISED_ROWS = 0.02, 4  # a logsumexp so near 0 in so many rows is no chance, in bfloat16 too
_NODES = 32  # of the graph behind the model's output; the LM head is among the first

_steps_of_models: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_steps_of_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_optimizer_hook: list[RemovableHandle] = []
_finalized: list[tuple[list[Tensor], Tensor]] = []  # gradients of the last inspected step, and their size


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def is_checked(steps: int) -> bool:
    """Return whether the costly checks run after `steps` steps, see `set_validation`.

    >>> is_checked(0), is_checked(3)
    (True, False)
    """
    return get_validation() == "always" or (get_validation() == "auto" and steps < _FIRST_STEPS)


def steps_of(models: Sequence[torch.nn.Module]) -> int:
    return _steps_of_models.get(models[0], 0)


def begin_step(models: Sequence[torch.nn.Module], ddp: bool) -> None:
    """Drop a stale `grad`, which DDP would add again, and warn of gradients that were not zeroed."""
    steps = steps_of(models)
    _steps_of_models[models[0]] = steps + 1
    if steps and is_checked(steps) and any(bool(grad.any()) for grad in _some_gradients(models)):
        warn(_NOT_ZEROED.format("model.zero_grad_buffer() and " * ddp + "optimizer.zero_grad()"))
    if ddp:
        watch_optimizers()
        for model in models:
            trained = model.params_with_grad if isinstance(model, DistributedDataParallel) else model.parameters()
            for parameter in trained:
                parameter.grad = None


def warn_of_left_gradient(output: Tensor) -> None:
    """Warn of a `grad` left before the first backward, by the parameter nearest to the output."""
    parameter = next((weight for weight in _nearest(output) if getattr(weight, "main_grad", None) is not None), None)
    if parameter is None:
        return
    main_grad, grad = parameter.main_grad, parameter.grad  # type: ignore[attr-defined]
    if bool(main_grad.any()):
        warn(_NOT_ZEROED.format("model.zero_grad_buffer() and optimizer.zero_grad()"))
    elif grad is not None and (grad.data_ptr() == main_grad.data_ptr() or bool(grad.any())):
        warn(
            "an earlier step's gradient is still in `grad`, and Megatron's DDP adds it to this step's; before each step "
            "call optimizer.zero_grad() and model.zero_grad_buffer()"
        )


def check_owner(output: Tensor, model: torch.nn.Module) -> None:
    """Raise ValueError if the parameter nearest to `output` in its graph is not one of `model`."""
    nearest = next(iter(_nearest(output)), None)
    if nearest is not None and all(nearest is not weight for weight in model.parameters()):
        raise ValueError(
            "head is the fused head of another model; give what `fuse_head` returned for this one, or no head="
        )


def check_normalised(logits: Tensor) -> None:
    """Raise ValueError for the log_softmax of a tensor rank's shard, by its first rows; the host waits."""
    rows = logits.detach().flatten(0, -2)[:_NORMALISED_ROWS].float()
    if rows.shape[-1] > 1 and bool((rows.logsumexp(-1).abs() < _NORMALISED).all()):
        raise ValueError(
            "the model's output is normalised over this tensor rank's columns alone (its exponentials sum to 1), so the ranks' "
            "parts do not fit together; return logits, without log_softmax"
        )


def _nearest(output: Tensor) -> Iterator[Tensor]:
    """Yield the parameters in the first nodes of the graph behind `output`, the nearest first."""
    nodes = [output.grad_fn]
    for node in nodes:
        if len(nodes) < _NODES and node is not None:
            nodes += [source for source, _ in node.next_functions]
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            yield parameter


def warn_of_factor(loss: Tensor, factor: float, config: TransformerConfig) -> None:
    """Warn, in backward, if the schedule multiplies the loss by more than `factor` and the loss scale."""
    if not loss.requires_grad:
        warn(
            "the loss requires no gradient, so nothing learns: all parameters are frozen, or the model ran under "
            "torch.no_grad()"
        )
        return

    def look(gradient: Tensor) -> None:
        ratio = float(gradient) / loss_scale(config) / factor
        if abs(ratio - 1) > _ROUNDING:
            warn(
                f"the callback's loss is multiplied by {ratio:.6g} on its way to backward, and so are all gradients: return "
                "what the callback of megatron_loss_func returns as it is, and give it the schedule's num_microbatches"
            )

    loss.register_hook(look)


def remember_gradients(models: Sequence[torch.nn.Module]) -> None:
    """Record the size of a few finalized gradients; nothing may enlarge them before the optimizer's step."""
    if gradients := _some_gradients(models):
        _finalized[:] = [(gradients, _size(gradients))]


def _size(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.detach().double().square().sum() for x in gradients]).sum()


def watch_optimizers() -> None:
    """Warn of a torch optimizer that steps on DDP's parameters without a gradient, or on zeros."""
    if not _optimizer_hook:
        _optimizer_hook.append(register_optimizer_step_pre_hook(_before_optimizer_step))


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for finalized, size in _finalized:
        if _size(finalized) > size * (1 + _ROUNDING):
            warn(
                "the gradients grew between the step's backward and the optimizer: forward_backward and Megatron's schedule "
                "have summed them over ranks, so do not call finalize_model_grads again, or multiply main_grad"
            )
    _finalized.clear()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [getattr(p, "decoupled_grad", None) if p.grad is None else p.grad for p in parameters]
    if any(gradient is not None for gradient in gradients):
        steps = _steps_of_optimizers.get(optimizer, 0)
        _steps_of_optimizers[optimizer] = steps + 1
        if is_checked(steps) and not any(bool(gradient.any()) for gradient in gradients if gradient is not None):
            warn(
                f"{type(optimizer).__name__} steps on gradients that are all 0. Look for gradients that were zeroed after "
                "backward, a schedule with forward_only=True, a loss that was detached, an optimizer of another model, or a "
                "step without a valid token or advantage"
            )
    elif any(getattr(parameter, "main_grad", None) is not None for parameter in parameters):
        _optimizer_hook.pop().remove()
        warn(
            f"{type(optimizer).__name__} steps without a gradient, so no weight moves: Megatron's DDP keeps gradients in "
            "`main_grad`. Use Megatron's get_megatron_optimizer, or call copy_main_grads(model) before optimizer.step()"
        )


def _some_gradients(models: Sequence[torch.nn.Module]) -> list[Tensor]:
    """List the gradients of each chunk's first and last trained parameter, under DDP its `main_grad`."""
    gradients = []
    for model in models:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained[:1] + trained[1:][-1:]:
            grad = getattr(parameter, "main_grad", None)
            gradients.append(parameter.grad if grad is None else grad)
    return [grad for grad in gradients if grad is not None]


def inner_loss(loss_fn: object) -> object:
    loss_fn = getattr(loss_fn, "func", loss_fn)
    return getattr(loss_fn, "loss_fn", loss_fn)


def facts_of_loss(loss_fn: object, head: object, config: TransformerConfig) -> dict[str, int]:
    """Return a checksum of the loss (class, config, options), whether it has a head, and the loss scale."""
    loss_fn = inner_loss(loss_fn)
    options = [
        getattr(getattr(loss_fn, "options", None), name, None) for name in ("temperature", "vocab_size", "cp_layout")
    ]
    text = f"{type(loss_fn).__module__}.{type(loss_fn).__qualname__} {getattr(loss_fn, 'config', None)!r} {options}"
    checksum = zlib.crc32(re.sub(r" at 0x[0-9a-f]+", "", text).encode())
    scale = loss_scale(config)
    millionths = round(scale * 1e6) if math.isfinite(scale) else 0
    return {_OF_LOSS: checksum, "whether head= is given (1, or 0)": int(head is not None), _OF_SCALE: millionths}


def loss_scale(config: TransformerConfig) -> float:
    """Return the factor of `config.grad_scale_func` on a loss; 1 without one, NaN if it is no function."""
    function = config.grad_scale_func
    if function is None:
        return 1.0
    scaled = function(torch.ones(())) if callable(function) else None
    return float(scaled) if isinstance(scaled, torch.Tensor) else math.nan


def fact_of_validation() -> dict[str, int]:
    return {"set_validation (0: never, 1: auto, 2: always)": ("never", "auto", "always").index(get_validation())}


def facts_of_weights(models: Sequence[torch.nn.Module]) -> dict[str, int]:
    """Return a checksum of a few values of each weight that data ranks share, without experts."""
    weights = [weight for model in models for weight in model.parameters() if getattr(weight, "allreduce", True)]
    return {_OF_WEIGHTS: _checksum(weights, weights)}


def facts_of_replicas(models: Sequence[torch.nn.Module]) -> dict[str, int]:
    """Return a checksum of the shared weights, and of which weights train; 0 in mode "never"."""
    if get_validation() == "never":
        return {_OF_REPLICAS: 0}
    weights = [weight for model in models for weight in model.parameters() if getattr(weight, "allreduce", True)]
    return {_OF_REPLICAS: _checksum(weights, [w for w in weights if not getattr(w, "tensor_model_parallel", False)])}


def _checksum(trained: Sequence[Tensor], weights: Sequence[Tensor]) -> int:
    few = [weight.detach().flatten()[:: max(weight.numel() // 4, 1)].double().cpu() for weight in weights]
    crc = zlib.crc32(bytes(weight.requires_grad for weight in trained))
    return zlib.crc32(torch.cat(few).numpy().tobytes(), crc) if few else crc
