"""One optimizer step of the user's model on this rank, in Megatron's schedule and with its optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from parallel_rl.agreement import gather_results, raise_on_all_ranks
from parallel_rl.groups import current_device
from parallel_rl.losses.nll import NLLLoss
from parallel_rl.megatron import (
    MicroBatch,
    forward_backward,
    global_parameters,
    gradient,
    initialize,
    packed_batch,
    unwrap,
    wrap_model,
)
from parallel_rl.megatron.weights import global_buffers
from parallel_rl.testing.whole_step.layouts import Rows, StepLayout, make_rows, micro_batches, packed_width
from parallel_rl.testing.whole_step.ranks import Inapplicable, refusal
from parallel_rl.testing.whole_step.script import run_script, wrap_for_script
from parallel_rl.testing.whole_step.shrink import for_layout
from parallel_rl.testing.whole_step.subject import Cut, Piece, RankResult, StepSubject, Truth, build_chunks, part
from parallel_rl.validation import validation


def keep_in_float32(model: torch.nn.Module, kinds: Sequence[str]) -> None:
    """Move modules of these classes to float32, with casts at their borders."""
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.float()
            module.register_forward_pre_hook(_to_single, with_kwargs=True)
            module.register_forward_hook(_to_double)


def _to_single(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return _cast(args, torch.float32), _cast(kwargs, torch.float32)


def _to_double(module: torch.nn.Module, args: object, out: object) -> object:
    return _cast(out, torch.float64)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return value


_RATE = 1.0  # of plain gradient descent: each weight moves by its clipped gradient


def run_layout(
    subject: StepSubject,
    config: TransformerConfig,
    layout: StepLayout,
    truth: Truth,
    dtype: torch.dtype,
    timeout: float,
) -> RankResult:
    """Run the step of one layout on this rank, from the weights of `truth`.

    Raises:
        Inapplicable: a rank refuses the layout by name.
        ValueError: the model's weights differ from those of the one-process model.
    """
    join(layout, timeout)

    def build() -> tuple[list[torch.nn.Module], TransformerConfig, dict[Parameter, Cut | None], str]:
        try:
            models, of_layout = _models(subject, config, layout, dtype)
        except Exception as error:
            if reason := refusal(error):
                return [], config, {}, reason
            raise
        return models, of_layout, _fill(models, truth, of_layout), ""

    models, config, cuts, reason = raise_on_all_ranks(build, [dist.group.WORLD])
    reasons = [text for text in gather_results(lambda: reason) if text]
    if reasons:
        raise Inapplicable(reasons[0])
    metrics, norm, gradients = _step(subject, models, config, layout, truth, truth.clip)
    pieces = tuple(
        Piece(
            name,
            gradients[parameter].cpu() if parameter in gradients else None,
            parameter.detach().cpu().clone(),
            cuts[parameter],
            bool(getattr(parameter, "tensor_model_parallel", False)),
            not getattr(parameter, "allreduce", True),
        )
        for name, parameter in global_parameters(models)
    )
    return RankResult(_place(layout), metrics, norm, pieces)


def run_truth(
    subject: StepSubject,
    config: TransformerConfig,
    layout: StepLayout,
    dtype: torch.dtype,
    timeout: float,
    tokens: Tensor | None = None,
    seed: int | None = None,
    single: Sequence[str] = (),
) -> Truth:
    """Run the step on one process, from weights that are keyed by name.

    Args:
        tokens: [B, S], the only tokens with loss; None: all that the rows' masks keep.
        seed: of the model's random numbers in the step; None: that of the layouts.
        single: classes of modules that stay in float32.

    Raises:
        ValueError: no weight trains, or the loss trains none.
    """
    join(layout, timeout)
    models, config = _models(subject, config, layout, dtype, single)
    [model] = models
    named = list(global_parameters(models))
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError("no weight of the model trains: requires_grad is False on all of them")
    for name, parameter in named:
        _draw(parameter, name)
    before = {name: parameter.detach().cpu().clone() for name, parameter in named}
    buffers = {name: buffer.cpu().clone() for name, buffer in global_buffers(models)}
    vocabulary = int(unwrap(model).vocab_size)
    start = Truth(layout.name, before, {}, {}, {}, 0.0, 0.0, vocabulary, buffers)
    if seed is not None:
        torch.manual_seed(seed)
    metrics, norm, gradients = _step(subject, models, config, layout, start, None, tokens)
    if not norm:
        raise ValueError("every gradient of one process is zero: the loss does not depend on the weights that train")
    return replace(
        start,
        gradients={name: gradients[parameter].cpu() for name, parameter in named if parameter in gradients},
        after={name: parameter.detach().cpu().clone() for name, parameter in named},
        metrics=metrics,
        norm=norm,
        clip=norm / 2,
        dropout=tuple(
            f"{name} (p = {module.p:g})"
            for name, module in unwrap(model).named_modules()
            if "dropout" in type(module).__name__.lower() and getattr(module, "p", None)
        ),
    )


def join(layout: StepLayout, timeout: float) -> None:
    """Set Megatron's groups to those of a layout, and clear the tracker of router losses."""
    logged: object = getattr(
        moe_utils, "get_moe_layer_wise_logging_tracker", dict
    )()  # Megatron sizes it by the first model
    if isinstance(logged, dict):
        logged.clear()
    initialize(
        layout.tp, layout.cp, layout.pp, ep=layout.ep, etp=layout.etp, timeout=timeout,
        virtual_pp=layout.vp if layout.vp > 1 else None,
    )  # fmt: skip


def _models(
    subject: StepSubject,
    config: TransformerConfig,
    layout: StepLayout,
    dtype: torch.dtype,
    single: Sequence[str] = (),
) -> tuple[list[torch.nn.Module], TransformerConfig]:
    """Build this rank's chunks in `dtype`, wrapped in Megatron's data parallelism, and their config."""
    config = for_layout(config, layout, dtype)
    if subject.setup is not None:
        subject.setup(config)
    chunks = build_chunks(subject.provider, config, layout)
    for chunk in chunks:
        chunk.to(device=current_device(), dtype=dtype)
        keep_in_float32(chunk, single)
        chunk.train()
    if subject.is_script:
        return [wrap_for_script(chunk) for chunk in chunks], chunks[0].config
    return [wrap_model(chunk) for chunk in chunks], chunks[0].config


def _step(
    subject: StepSubject,
    models: Sequence[torch.nn.Module],
    config: TransformerConfig,
    layout: StepLayout,
    truth: Truth,
    clip: float | None,
    tokens: Tensor | None = None,
) -> tuple[dict[str, float], float, dict[Parameter, Tensor]]:
    """Run the step; return metrics, the optimizer's norm, and the trained weights' unclipped gradients."""
    settings = OptimizerConfig(
        optimizer="sgd", lr=_RATE, min_lr=_RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, list(models))
    for model in models:
        model.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()
    whole = make_rows(truth.vocabulary)
    if tokens is not None:
        whole["token_mask"] = whole["token_mask"] * tokens
    rows = {name: field.to(current_device()) for name, field in whole.items()}
    rows["lengths"] = rows["lengths"].cpu()
    batches = micro_batches(rows, layout, parallel_state.get_data_parallel_rank())
    if subject.is_script:
        metrics = run_script(subject, models, config, batches, layout)
    else:
        prepared: list[MicroBatch | Rows] = list(batches)
        if layout.packed:
            prepared = [packed_batch(b, b["lengths"], total=packed_width(len(b["lengths"]))) for b in batches]
        loss_fn = NLLLoss(vocab_size=truth.vocabulary)
        heads = NLLLoss(vocab_size=truth.vocabulary) if config.mtp_num_layers else None
        with validation("never"):  # what differs is compared and named below
            report = forward_backward(models, loss_fn, prepared, mtp_loss=heads)
        metrics = report.floats()
    gradients = {}
    for _, parameter in global_parameters(models):
        if parameter.requires_grad:
            grad = gradient(parameter)
            gradients[parameter] = torch.zeros_like(parameter) if grad is None else grad.detach().clone()
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    scale = min(1.0, (norm / 2 if clip is None else clip) / (norm + 1e-6))
    with torch.no_grad():
        for parameter in gradients:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)  # in float64 too, which Megatron's own clipping refuses
    optimizer.step_with_ready_grads()
    return metrics, norm, gradients


def _place(layout: StepLayout) -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "context": parallel_state.get_context_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
        "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
        "expert": parallel_state.get_expert_model_parallel_rank(),
    }


@torch.no_grad()
def _draw(parameter: Parameter, name: str) -> None:
    """Draw matrices and random weights, and perturb constant vectors, so that every weight matters."""
    key = hashlib.sha256(name.encode()).digest()
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(int.from_bytes(key[:6], "big")))
    constant = bool((parameter == parameter.reshape(-1)[0]).all())
    if parameter.dim() >= 2:
        parameter.copy_(0.25 * noise)
    elif constant:
        parameter.add_(0.1 * noise.to(parameter))
    else:
        parameter.copy_(noise)


@torch.no_grad()
def _fill(models: Sequence[torch.nn.Module], truth: Truth, config: TransformerConfig) -> dict[Parameter, Cut | None]:
    """Copy this rank's part of each weight, and buffers of equal shape; return the weights' cuts."""
    cuts = {}
    for name, parameter in global_parameters(models):
        if name not in truth.before:
            raise ValueError(f"the model has the weight {name}, which the one-process model lacks")
        cuts[parameter] = _cut(parameter, name, truth.before[name].shape, config)
        parameter.copy_(part(truth.before[name], cuts[parameter], parameter.shape))
    for name, buffer in global_buffers(models):
        if name in truth.buffers and truth.buffers[name].shape == buffer.shape:
            buffer.copy_(truth.buffers[name])
    return cuts


def _cut(parameter: Parameter, name: str, whole: torch.Size, config: TransformerConfig) -> Cut | None:
    """Find how a weight is sharded, from its shape and not from Megatron's marks."""
    experts = ".experts." in name
    parts, rank = (
        (parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank())
        if experts
        else (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank())
    )
    dims = [dim for dim, (here, there) in enumerate(zip(parameter.shape, whole, strict=True)) if here != there]
    if not dims:
        return None
    if len(dims) > 1 or (dims[0] > 0 and parameter.shape[dims[0]] * parts != whole[dims[0]]):
        raise ValueError(
            f"{name} has the shape {list(parameter.shape)} on this rank and {list(whole)} on one process: not one of {parts} "
            "parts"
        )
    gated = config.gated_linear_unit and ".linear_fc1." in name
    return dims[0], int(getattr(parameter, "partition_stride", 1)) if not gated else 2, parts, rank
