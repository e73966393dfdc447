"""Gradients of a Megatron model: their sum without DDP, their norm, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch.nn import Parameter

from parallel_rl.megatron.weights import mark_sinks

_BLOCK = 1 << 22  # elements squared in float64 at once, so that no large gradient is copied


def gradient(parameter: Parameter) -> Tensor | None:
    """Return a parameter's `main_grad` of Megatron's DDP, if there is one, else `grad`.

    With the distributed optimizer only the data rank's own shard is valid; with `config.grad_scale_func` (fp16) it contains the
    loss scale until the optimizer's step.

    >>> gradient(unwrap(model).output_layer.weight).shape
    torch.Size([8, 16])
    """
    grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if grad is None else grad


@torch.no_grad()
def copy_main_grads(models: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Set each parameter's `grad` from `main_grad` for torch's optimizers, in its dtype, unscaled.

    Call it after `forward_backward` and clipping. If you call Megatron's schedule yourself, call `optimizer.zero_grad()` before
    the next step: DDP adds what is left in `grad` to `main_grad`. Without DDP parameters keep their `grad`.

    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model.zero_grad_buffer()
    >>> report = forward_backward(model, NLLLoss(vocab_size=8), [data])
    >>> copy_main_grads(model)
    >>> optimizer.step()

    Raises:
        ValueError: the distributed optimizer, where a data rank holds only the gradients of its own shard.
    """
    models = _listed(models)
    if any(_is_sharded(model) for model in models):
        raise ValueError(
            "use_distributed_optimizer = True: a data rank's main_grad is whole in its own shard only; use Megatron's "
            "get_megatron_optimizer, or wrap the model without it"
        )
    scale = None
    for _, parameter in _named(models):
        if (grad := getattr(parameter, "main_grad", None)) is not None:
            scale = _loss_scale(models, grad) if scale is None else scale
            parameter.grad = (grad if scale is None else grad / scale).to(parameter.dtype)


@torch.no_grad()
def sum_gradients(models: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Sum gradients as `finalize_model_grads` does, for models without Megatron's DDP; `grad` is then ∇L.

    Sums over data × context ranks (experts: over their replicas); over tensor ranks for parts left by sequence parallelism or
    head norms; over first and last stage for tied embeddings. A missing gradient counts as zero.

    >>> bare = build_model(config, 8, 4)
    >>> forward_logits(bare, padded_input(data["input_ids"])).logsumexp(-1).sum().backward()
    >>> sum_gradients(bare)
    """
    models = _listed(models)
    config = get_model_config(models[0])
    dense: list[Tensor] = []
    experts: list[Tensor] = []
    parts: list[Tensor] = []
    for name, parameter in _named(models):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        (experts if _is_expert(parameter) else dense).append(parameter.grad)
        split = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        if split or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)):
            parts.append(parameter.grad)
    _sum_flat(dense, parallel_state.get_data_parallel_group(with_context_parallel=True))
    if experts:
        _sum_flat(experts, parallel_state.get_expert_data_parallel_group())
    _sum_flat(parts, parallel_state.get_tensor_model_parallel_group())
    # Megatron makes both copies equal at the start; equal gradients keep them so
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and embedding is not None:
        module = get_attr_wrapped_model(
            models[0 if parallel_state.is_pipeline_first_stage() else -1], "pre_process", return_model_obj=True
        )
        shared = module.share_embeddings_and_output_weights or config.mtp_num_layers  # MTP heads look tokens up
        if shared and parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
            weight = module.shared_embedding_or_output_weight()
            _sum_flat([weight.grad] if weight.requires_grad else [], embedding)


@torch.no_grad()
def grad_norm(models: torch.nn.Module | Sequence[torch.nn.Module]) -> Tensor:
    """Return ‖∇L‖₂ of the whole model, float64, with the same bits on every model parallel rank.

    Replicated parameters count on one tensor rank, tied embeddings on one stage, experts on the ranks that hold them, and with
    the distributed optimizer each data rank's own shard. Call it after `finalize_model_grads` or `sum_gradients`, before the
    optimizer's step: it divides by the loss scale of `config.grad_scale_func` (fp16).

    >>> model.zero_grad_buffer()
    >>> grad_norm(model)
    tensor(0., dtype=torch.float64)
    """
    models = _listed(models)
    mark_sinks(models)
    device = next(iter(models[0].parameters())).device
    squares = {expert: torch.zeros((), dtype=torch.float64, device=device) for expert in (False, True)}
    for parameter, grad in _own(models):
        expert = _is_expert(parameter)
        if param_is_not_shared(parameter) and not _is_duplicate(parameter, expert):
            for block in grad.reshape(-1).split(_BLOCK):
                squares[expert] += block.double().square().sum()
    total = _gathered_sum(squares[False], _data_group(models, "buffers"), parallel_state.get_model_parallel_group())
    if get_model_config(models[0]).num_moe_experts:
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        total = total + _gathered_sum(squares[True], _data_group(models, "expert_parallel_buffers"), group)
    norm, scale = total.sqrt(), _loss_scale(models, total)
    return norm if scale is None else norm / scale


@torch.no_grad()
def clip_grads_(models: torch.nn.Module | Sequence[torch.nn.Module], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients by min(1, max_norm / (norm + 1e-6)), in place, without a host sync.

    `norm` is from `grad_norm`. A loss scale (fp16) stays in the gradients, as Megatron's optimizer expects. ValueError for a
    max_norm not above 0.

    >>> clip_grads_(model, 1.0, grad_norm(model))
    """
    models = _listed(models)
    if not max_norm > 0:
        raise ValueError(f"max_norm = {max_norm} must be above 0")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in _own(models):
        grad.mul_(scale.to(grad))


def _listed(models: torch.nn.Module | Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
    return [models] if isinstance(models, torch.nn.Module) else models


def _loss_scale(models: Sequence[torch.nn.Module], like: Tensor) -> Tensor | None:
    """Return the factor of Megatron's schedule on the loss, on the device of `like`, or None."""
    scaled: Callable[[Tensor], Tensor] | None = get_model_config(models[0]).grad_scale_func
    return None if scaled is None else scaled(torch.ones((), device=like.device)).to(like).reshape(())


def _named(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Parameter]]:
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter


def _own(models: Sequence[torch.nn.Module]) -> Iterator[tuple[Parameter, Tensor]]:
    """List parameters with gradients on this rank; only its shards if they are sharded."""
    for model in models:
        if not _is_sharded(model):
            for _, parameter in _named([model]):
                if (grad := gradient(parameter)) is not None:
                    yield parameter, grad
            continue
        for buffer in (*model.buffers, *model.expert_parallel_buffers):  # type: ignore[misc]
            ranks, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // ranks
                first = bucket.offset + rank * size
                for parameter in bucket.params_list:
                    start, stop, _ = buffer.param_index_map[parameter]
                    start, stop = max(start, first), min(stop, first + size)
                    if start < stop:
                        yield parameter, buffer.grad_data[start:stop]


def _is_sharded(model: torch.nn.Module) -> bool:
    settings = getattr(model, "ddp_config", None)
    return settings is not None and settings.use_distributed_optimizer


def _data_group(models: Sequence[torch.nn.Module], buffers: str) -> dist.ProcessGroup | None:
    sharded = [buffer for model in models if _is_sharded(model) for buffer in getattr(model, buffers)]
    return sharded[0].data_parallel_group if sharded else None


def _is_expert(parameter: Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def _is_duplicate(parameter: Parameter, expert: bool) -> bool:
    if getattr(parameter, "tensor_model_parallel", False):
        return False
    state = parallel_state
    rank = state.get_expert_tensor_parallel_rank() if expert else state.get_tensor_model_parallel_rank()
    return rank != 0


def _gathered_sum(value: Tensor, *groups: dist.ProcessGroup | None) -> Tensor:
    """Sum over groups in rank order: an all-reduce may round differently on different ranks."""
    for group in groups:
        if group is not None:
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, value, group=group)
            value = torch.stack(parts).sum()
    return value


def _sum_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) == 1:
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.all_reduce(flat, group=group)
        for tensor, piece in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(piece.view_as(tensor))
