"""Bounds that bound: no more bytes through a link than the ranks' places in their nodes force through it."""

from __future__ import annotations

from collections import Counter

import pytest

from parallel_rl.plan.memory import Layout, rank_parameters
from parallel_rl.plan.report import CARDS, NODE, bounds
from parallel_rl.plan.source import ModelShape

MODEL = ModelShape(36, 6144, 96, 48, 64, 12288, 151936)
H100 = CARDS["H100"]


def forced_seconds(layout: Layout, size: float) -> float:
    """Seconds in which the busiest node sends what its cards do not reduce, all its cards' networks at work."""
    shared, tp = layout.data * layout.context, layout.tensor
    nodes: dict[int, Counter] = {}
    for rank in range(layout.world):
        group = (rank // (tp * shared), rank % tp)  # tensor, context and data, pipeline: Megatron's order
        nodes.setdefault(rank // NODE, Counter())[group] += 1
    crossing = max(sum(1 - inside / shared for inside in groups.values()) for groups in nodes.values())
    return crossing * size / (min(NODE, layout.world) * H100.network)


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize(("context", "pipeline"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 4), (3, 3)])
def test_gradients_are_bounded_by_what_must_leave_a_node(tensor: int, context: int, pipeline: int) -> None:
    """Every rank has its place: never more than the cut around a node, and all of it where tensor ranks fill nodes evenly."""
    layout = Layout(12 * 1024, tensor, context, pipeline)
    size = 6 * rank_parameters(MODEL, layout)
    for bound in bounds(MODEL, layout, H100):
        at = Layout(12 * 1024, tensor, context, pipeline, bound.data)
        if bound.ranks > 600:
            break
        forced, shared = forced_seconds(at, size), bound.data * context
        card = size * (1 - 1 / shared) / (H100.link + (H100.network if tensor * shared > NODE else 0))
        assert card <= bound.gradient_collective <= max(forced, card) * (1 + 1e-9)
        if not NODE % tensor and not tensor * shared % NODE:
            assert bound.gradient_collective == pytest.approx(max(forced, card))


def test_a_node_of_data_ranks_shares_its_networks() -> None:
    """A hierarchical collective sends an eighth of the gradients over each of the eight networks of a node."""
    found = {bound.ranks: bound.gradient_collective for bound in bounds(MODEL, Layout(4096), H100)}
    size = 6 * MODEL.parameters
    assert found[8] == pytest.approx(7 / 8 * size / H100.link)
    assert found[64] == pytest.approx(7 / 8 * size / 8 / H100.network)
    assert max(found.values()) < size / 8 / H100.network


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("pipeline", [1, 4])
def test_tensor_ranks_exchange_the_hidden_states_of_every_layer(sequence_parallel: bool, pipeline: int) -> None:
    """Qwen3-8B, 16,384 tokens: four exchanges a layer and one of the LM head, each once over the wire.

    A ring takes 2·7/8 of the tensor each way, a switch that adds up takes it once.
    """
    model = ModelShape(36, 4096, 32, 8, 128, 12288, 151936)
    layout = Layout(16384, tensor=8, pipeline=pipeline, sequence_parallel=sequence_parallel)
    found = next(iter(bounds(model, layout, H100, micro_batches=3))).tensor_collectives
    once = 3 * (4 * 36 / pipeline + 1) * 16384 * 4096 * 2 / H100.link
    assert once <= found < 1.01 * once
    assert next(iter(bounds(model, Layout(16384), H100))).tensor_collectives == 0


def test_tensor_ranks_on_two_nodes_share_their_networks() -> None:
    """Of what enters a node, each card's network takes an eighth."""
    eight, sixteen = (next(iter(bounds(MODEL, Layout(16384, n), H100))).tensor_collectives for n in (8, 16))
    node = sixteen * NODE * H100.network
    assert eight * H100.link == pytest.approx(node, rel=0.01) and sixteen < 2 * eight
