"""Head with one output a position, for values and rewards, in place of the vocabulary projection."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ScalarHead(torch.nn.Module):
    """v_t = w·h_t: [S, B, D] (sequence parallel [S/tp, B, D]) to [S, B, 1], alike on every tensor rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Replace the call of a `GPTModel`'s output layer; there is no bias."""
        if self.sequence_parallel:
            # every tensor rank computes the same, so its gradient must not be summed over them
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden, self.weight), None


def replace_head(model: GPTModel) -> None:
    if model.post_process:
        model.output_layer = ScalarHead(model.config)


@torch.no_grad()
def copy_trunk(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy all weights except the head's between two models of one layout; ValueError for other shapes.

    >>> critic = build_model(config, 8, 4, scalar_head=True)
    >>> copy_trunk(build_model(config, 8, 4), critic)
    """
    source_parameters = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if name.startswith("output_layer."):
            continue
        if name not in source_parameters or source_parameters[name].shape != parameter.shape:
            raise ValueError(f"the models differ in {name!r}: one cannot start as a copy of the other")
        parameter.copy_(source_parameters[name])
