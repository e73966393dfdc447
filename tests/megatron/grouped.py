"""Transformer Engine's grouped linear layer by its interface, in torch: with it Megatron's TEGroupedMLP runs without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from parallel_rl.megatron import model


class _GroupedLinear(torch.nn.Module):
    """Experts' matrices by the engine's names, stamped as it stamps them: the rows of each are cut."""

    cut: int

    def __init__(
        self, count: int, columns: int, rows: int, *, config: TransformerConfig, pg_collection, init_method, **_: object
    ) -> None:
        super().__init__()
        shape = [rows, columns]
        shape[self.cut] //= pg_collection.expt_tp.size()
        for number in range(count):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            init_method(weight)
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, hidden: Tensor, sizes: list[int]) -> tuple[Tensor, None]:
        parts = zip(hidden.split(sizes), self.parameters(), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


class _Column(_GroupedLinear):
    cut = 0


class _Row(_GroupedLinear):
    cut = 1


@contextlib.contextmanager
def grouped_experts() -> Iterator[None]:
    """Models get their experts in one module, as with Transformer Engine."""
    local = model.layer_spec

    def spec(config: TransformerConfig, *, prefix_trees: bool) -> ModuleSpec:
        layer = local(config, prefix_trees=prefix_trees)
        submodules = MLPSubmodules(linear_fc1=_Column, linear_fc2=_Row)
        layer.submodules.mlp.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=submodules)
        return layer

    with mock.patch.object(model, "layer_spec", spec):
        yield
