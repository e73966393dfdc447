"""Parameters by their place in the whole model: names, shards and weights that do not depend on the layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.nn import Parameter

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


def global_parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Parameter]]:
    """Iterate over this rank's parameters with the names that a one-process model gives them.

    Layers count from the first pipeline stage on, and the copy of tied embeddings on the last stage has the
    embedding's name.

    >>> next(global_parameters([model]))[0]
    'embedding.word_embeddings.weight'
    """
    for model in models:
        module = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
        layers = {
            name: layer.layer_number - 1
            for name, layer in module.named_modules()
            if isinstance(layer, TransformerLayer)
        }
        for name, parameter in module.named_parameters():
            yield _global_name(name, layers, module.share_embeddings_and_output_weights), parameter


def _global_name(name: str, layers: dict[str, int], tied: bool) -> str:
    if tied and name == HEAD:
        return EMBEDDING
    for prefix, number in layers.items():
        if name.startswith(prefix + "."):
            return f"{prefix.rpartition('.')[0]}.{number}{name[len(prefix) :]}"
    return name


def whole_shape(parameter: Parameter) -> tuple[int, ...]:
    """The shape of the parameter over all tensor parallel ranks."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()  # type: ignore[attr-defined]
    return tuple(shape)


def local_shard(whole: Tensor, parameter: Parameter) -> Tensor:
    """Cut this tensor rank's part out of a whole tensor (a weight, a gradient), as Megatron cuts `parameter`.

    A gated linear layer (stride 2) is cut in each half. Rows that `whole` lacks at the end, vocabulary padding, are
    zero.

    >>> local_shard(torch.zeros(7, 16), unwrap(model).output_layer.weight).shape  # a row of padding is added
    torch.Size([8, 16])

    Raises:
        ValueError: a tensor that does not fit the parameter.
    """
    shape = whole_shape(parameter)
    if whole.shape[1:] != shape[1:] or whole.shape[0] > shape[0]:
        raise ValueError(
            f"a tensor of shape {list(whole.shape)} does not fit the parameter's whole shape {list(shape)}"
        )
    if whole.shape[0] < shape[0]:
        whole = torch.cat((whole, whole.new_zeros(shape[0] - whole.shape[0], *shape[1:])))
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    pieces = whole.chunk(size * stride, dim=dim)
    return torch.cat(pieces[rank::size], dim=dim)


@torch.no_grad()
def initialize_weights(models: Sequence[torch.nn.Module], seed: int, vocab_size: int) -> None:
    """Draw each weight matrix from a generator keyed by (seed, name), so that every layout starts from the same model.

    Normal with the config's `init_method_std`; the projections that write to the residual stream get std /
    √(2·layers). Biases are 0, norms as they were built. Rows of the vocabulary padding are 0.

    >>> initialize_weights([model], seed=0, vocab_size=8)
    """
    for model in models:
        config = get_attr_wrapped_model(model, "config")
        for name, parameter in global_parameters([model]):
            if parameter.dim() < 2:
                continue
            shape = whole_shape(parameter)
            if name in (EMBEDDING, HEAD):
                shape = (min(vocab_size, shape[0]), *shape[1:])
            std = config.init_method_std
            if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                std /= math.sqrt(2.0 * config.num_layers)
            key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(key[:7], "big"))
            whole = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
            parameter.copy_(local_shard(whole, parameter))
