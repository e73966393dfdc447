"""Experts are drawn and named by their place in the whole model, whatever ranks hold them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from parallel_rl.config.architecture import Experts
from parallel_rl.testing.pool import run_world
from tests.megatron.hf.cases import Layout, layout, round_trip
from tests.megatron.hf.golden import write_folder

pytest.importorskip("megatron.core")

from parallel_rl.megatron.weights import mark_parameters


@pytest.mark.slow
def test_drawn_experts_are_the_same_on_every_layout() -> None:
    """Where fewer ranks share a matrix than there are tensor ranks, it was given another size."""
    [[expected]] = run_world(1, _drawn, [Layout()])
    layouts = [Layout(tp=2, sp=True), Layout(tp=2, etp=2, sp=True), Layout(ep=2), Layout(tp=2, ep=2, sp=True)]
    for kind in ("local", "stamped", "grouped"):
        for rank in run_world(2, _drawn, layouts, kind):
            for sizes, found in zip(layouts, rank, strict=True):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), sizes


def _stamped(model: torch.nn.Module) -> None:
    """What Transformer Engine says of experts' matrices: that the rows of each are cut."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.partition_dim = 0  # type: ignore[attr-defined]
    mark_parameters(model)


def _drawn(rank: int, layouts: list[Layout], kind: str = "local") -> list[dict[str, Tensor]]:
    """On layers of Megatron's, with parameters "stamped" as Transformer Engine's, or with experts in one module as there."""
    from parallel_rl import megatron as M
    from parallel_rl.megatron import model as building
    from parallel_rl.megatron.hf import export_tensors
    from tests.megatron.grouped import grouped_experts

    results = []
    marked = _stamped if kind == "stamped" else mark_parameters
    experts = grouped_experts if kind == "grouped" else contextlib.nullcontext
    for sizes in layouts:
        with layout(sizes), mock.patch.object(building, "mark_parameters", marked), experts():
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


@pytest.mark.slow
def test_experts_in_one_module_are_transformers_ones(tmp_path: Path) -> None:
    """As Transformer Engine holds all experts of a layer: they are read, computed with, exported and written as any others."""
    folder = write_folder("qwen3_moe", tmp_path / "qwen3_moe")
    layouts = [Layout(ep=2), Layout(tp=2, etp=2, sp=True), Layout(tp=2, ep=2, sp=True)]
    for wrong in run_world(2, _round_trip, [("qwen3_moe", str(folder))], str(tmp_path / "out"), layouts):
        assert wrong == []


def _round_trip(rank: int, folders: list[tuple[str, str]], out: str, layouts: list[Layout]) -> list[str]:
    from tests.megatron.grouped import grouped_experts

    with grouped_experts():
        return round_trip(rank, folders, out, layouts)


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
