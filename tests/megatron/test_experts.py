"""Experts are drawn and named by their place in the whole model, whatever ranks hold them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from parallel_rl.config.architecture import Experts
from parallel_rl.testing.pool import run_world
from tests.megatron.hf.cases import Layout, layout

pytest.importorskip("megatron.core")

from parallel_rl.megatron.weights import mark_parameters


def test_drawn_experts_are_the_same_on_every_layout() -> None:
    """Where fewer ranks share a matrix than there are tensor ranks, it was given another size."""
    [[expected]] = run_world(1, _drawn, [Layout()])
    layouts = [Layout(tp=2, sp=True), Layout(tp=2, etp=2, sp=True), Layout(ep=2), Layout(tp=2, ep=2, sp=True)]
    for engine in (False, True):
        for rank in run_world(2, _drawn, layouts, engine):
            for sizes, found in zip(layouts, rank, strict=True):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), sizes


def _stamped(model: torch.nn.Module) -> None:
    """What Transformer Engine says of experts' matrices: that the rows of each are cut."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.partition_dim = 0  # type: ignore[attr-defined]
    mark_parameters(model)


def _drawn(rank: int, layouts: list[Layout], engine: bool = False) -> list[dict[str, Tensor]]:
    """With `engine`, on layers whose parameters look like Transformer Engine's."""
    from parallel_rl import megatron as M
    from parallel_rl.megatron import model as building
    from parallel_rl.megatron.hf import export_tensors

    results = []
    for sizes in layouts:
        with layout(sizes), mock.patch.object(building, "mark_parameters", _stamped if engine else mark_parameters):
            config = M.build_config(
                num_layers=1,
                hidden_size=16,
                num_attention_heads=2,
                experts=Experts(4, 8),
                qk_norm=True,
                sequence_parallel=sizes.sp,
            )
            model = M.build_model(config, 7, 8)
            results.append({name: tensor.clone() for name, tensor in export_tensors(model)})
    return results


@pytest.mark.parametrize(
    ("sizes", "message"), [({"ep": 3}, "etp 1 × ep 3 × pp 1 = 3"), ({"etp": 0}, "etp = 0 must be")]
)
def test_groups_that_the_world_cannot_form(sizes: dict[str, int], message: str) -> None:
    for found in run_world(2, _refused, sizes):
        assert message in found


def _refused(rank: int, sizes: dict[str, int]) -> str:
    from parallel_rl import megatron as M

    try:
        M.initialize(**sizes)
    except ValueError as error:
        return str(error)
    return "was taken"
