"""Parameters by their place in the whole model: names, shards and weights independent of the layout."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
# an expert's number on its rank, as Megatron's and Transformer Engine's parameters spell it
_EXPERT = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")
_FUSED = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$")

_TO_RESIDUAL = re.compile(r"\.linear_(proj\.weight|fc2\.weight\d*)$")
_HEAD = re.compile(r"mtp\.layers\.(\d+)\.")
_SINKS = "softmax_offset"  # a learnable logit per head, `softmax_type="learnable"`


def global_parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Parameter]]:
    """Iterate over this rank's parameters with their names in a one-process model.

    Layers and experts are numbered over all stages and expert ranks; the last stage's copy of tied embeddings has the
    embedding's name.

    >>> next(global_parameters([model]))[0]
    'embedding.word_embeddings.weight'
    """
    for model in models:
        whole_name = _namer(model)
        for name, parameter in _module(model).named_parameters():
            yield whole_name(name), parameter


def global_buffers(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Iterate over this rank's persistent buffers with the names that a one-process model gives them.

    >>> [name for name, buffer in global_buffers([model])]
    []
    """
    for model in models:
        module, whole_name = _module(model), _namer(model)
        persistent = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if name in persistent:
                yield whole_name(name), buffer


def _module(model: torch.nn.Module) -> torch.nn.Module:
    module: torch.nn.Module = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    return module


def _namer(model: torch.nn.Module) -> Callable[[str], str]:
    """Return the function from a name in this rank's chunk to the name in a one-process model."""
    module = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    layers = {
        name: _number(name, layer) for name, layer in module.named_modules() if isinstance(layer, TransformerLayer)
    }
    experts = (module.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()
    tied = module.share_embeddings_and_output_weights
    return lambda name: shift_expert(_global_name(name, layers, tied), first_expert)


def _number(name: str, layer: TransformerLayer) -> int:
    """Return a layer's number from 0; in MTP the head's, which Megatron's versions number differently."""
    head = _HEAD.match(name)
    return layer.layer_number - 1 if head is None else int(head[1])


def _global_name(name: str, layers: dict[str, int], tied: bool) -> str:
    if tied and name == HEAD:
        return EMBEDDING
    for prefix, number in layers.items():
        if name.startswith(prefix + "."):
            return f"{prefix.rpartition('.')[0]}.{number}{name[len(prefix) :]}"
    return name


def shift_expert(name: str, by: int) -> str:
    """Add `by` to the expert's number in a parameter's name; other names stay.

    >>> shift_expert("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", 4)
    'decoder.layers.0.mlp.experts.local_experts.5.linear_fc2.weight'
    """
    match = _EXPERT.search(name)
    return name if match is None else f"{name[: match.start(2)]}{int(match[2]) + by}{name[match.end(2) :]}"


def spelled_locally(name: str) -> str:
    """Return a parameter's name in the spelling of Megatron's local layers.

    Transformer Engine fuses a norm into the linear layer after it and holds all experts of a layer in one module.

    >>> spelled_locally("decoder.layers.3.mlp.experts.linear_fc1.weight7")
    'decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight'
    """
    for fused, local in _FUSED:
        name = name.replace(fused, local)
    return _GROUPED.sub(r"experts.local_experts.\2.\1.weight", name)


def mark_parameters(model: torch.nn.Module) -> None:
    """Mark how a new model's parameters are cut, where Megatron does not."""
    mark_sinks([model])
    config = get_attr_wrapped_model(model, "config")
    # without expert ranks Megatron treats experts as dense and does not sum over their tensor replicas
    replicas = config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    for name, parameter in global_parameters([model]):
        if ".experts." in name:
            parameter.of_expert = True  # type: ignore[attr-defined]
            if replicas:
                parameter.allreduce = False  # type: ignore[attr-defined]
            _mark_expert(name, parameter)
        if config.gated_linear_unit and ".linear_fc1." in name:
            # a rank holds its part of both halves; not every version marks it
            parameter.partition_stride = 2  # type: ignore[attr-defined]


def mark_sinks(models: Sequence[torch.nn.Module]) -> None:
    """Mark attention sinks as cut over tensor ranks, before Megatron's optimizer copies the marks."""
    for model in models:
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] == _SINKS:
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
                parameter.partition_dim, parameter.partition_stride = 0, 1  # type: ignore[attr-defined]


def _mark_expert(name: str, parameter: Parameter) -> None:
    """Mark an expert's matrix as Megatron's layers do; Transformer Engine marks all as cut by rows."""
    down = ".linear_fc2." in name
    if not (down and ".bias" in name):
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = int(down)  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cut:
    """How a parameter of the whole `shape` is cut over the ranks of `group` (None: each holds it whole).

    dim, stride: the cut dimension, and its separately cut parts (a gated layer: 2).
    """

    shape: tuple[int, ...]
    rank: int = 0
    group: ProcessGroup | None = None
    dim: int = 0
    stride: int = 1

    def ranges(self, rank: int | None = None) -> list[tuple[int, int]]:
        """Return [start, stop) along `dim` of the parts of this or another rank."""
        size = 1 if self.group is None else self.group.size()
        width = self.shape[self.dim] // (size * self.stride)
        starts = [((part * size) + (self.rank if rank is None else rank)) * width for part in range(self.stride)]
        return [(start, start + width) for start in starts]


def cut_of(parameter: Parameter) -> Cut:
    """Return how Megatron cuts `parameter` over tensor ranks, or an expert's over expert tensor ranks."""
    shape = list(parameter.shape)
    if not getattr(parameter, "tensor_model_parallel", False):
        return Cut(tuple(shape))
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if getattr(parameter, "of_expert", False)
        else parallel_state.get_tensor_model_parallel_group()
    )
    dim: int = parameter.partition_dim  # type: ignore[attr-defined]
    shape[dim] *= group.size()
    return Cut(tuple(shape), group.rank(), group, dim, parameter.partition_stride)  # type: ignore[attr-defined]


def local_shard(whole: Tensor, parameter: Parameter) -> Tensor:
    """Cut this tensor rank's part out of a whole tensor (weight, gradient), as Megatron cuts `parameter`.

    A gated linear layer (stride 2) is cut in each half. Rows missing at the end, vocabulary padding, are zero. ValueError for a
    tensor that does not fit the parameter.

    >>> local_shard(torch.zeros(7, 16), unwrap(model).output_layer.weight).shape  # a row of padding is added
    torch.Size([8, 16])
    """
    cut = cut_of(parameter)
    shape = cut.shape
    if whole.shape[1:] != shape[1:] or whole.shape[0] > shape[0]:
        raise ValueError(
            f"a tensor of shape {list(whole.shape)} does not fit the parameter's whole shape {list(shape)}"
        )
    if whole.shape[0] < shape[0]:
        whole = torch.cat((whole, whole.new_zeros(shape[0] - whole.shape[0], *shape[1:])))
    if cut.group is None:
        return whole
    return torch.cat([whole.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges()], dim=cut.dim)


@torch.no_grad()
def whole_tensor(parameter: Parameter) -> Tensor:
    """Gather a parameter with vocabulary padding over all tensor ranks: the inverse of `local_shard`.

    >>> whole_tensor(unwrap(model).output_layer.weight).shape
    torch.Size([8, 16])
    """
    cut, local = cut_of(parameter), parameter.detach().contiguous()
    if cut.group is None or cut.group.size() == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(cut.group.size())]
    torch.distributed.all_gather(parts, local, group=cut.group)
    whole = local.new_empty(cut.shape)
    for rank, part in enumerate(parts):
        ranges = cut.ranges(rank)
        for (start, stop), piece in zip(ranges, part.chunk(len(ranges), dim=cut.dim), strict=True):
            whole.narrow(cut.dim, start, stop - start).copy_(piece)
    return whole


@torch.no_grad()
def initialize_weights(models: Sequence[torch.nn.Module], seed: int, vocab_size: int) -> None:
    """Initialize each weight matrix by (seed, `spelled_locally` name): all layouts start from one model.

    Normal with the config's `init_method_std`, attention sinks too; projections to the residual stream get std / √(2·layers).
    Biases and vocabulary padding are 0, norms as built.

    >>> initialize_weights([model], seed=0, vocab_size=8)
    """
    mark_sinks(models)
    for model in models:
        config = get_attr_wrapped_model(model, "config")
        for name, parameter in global_parameters([model]):
            if parameter.dim() < 2 and not name.endswith(f".{_SINKS}"):
                continue
            shape = cut_of(parameter).shape
            if name in (EMBEDDING, HEAD):
                shape = (min(vocab_size, shape[0]), *shape[1:])
            std = config.init_method_std
            if _TO_RESIDUAL.search(name):
                std /= math.sqrt(2.0 * config.num_layers)
            key = hashlib.sha256(f"{seed}/{spelled_locally(name)}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(key[:7], "big"))
            whole = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
            parameter.copy_(local_shard(whole, parameter))
