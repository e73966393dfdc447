"""The fused head as a device runs it, on the meta device: its products, its plan and its memory, without values."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.linear_model import kernel_name, product_seconds, run_operator, step_seconds
from parallel_rl import linear_token_stats
from parallel_rl.vocab.backends import choice
from parallel_rl.vocab.backends.choice import Backend
from parallel_rl.vocab.linear.plan import HeadShape, LinearMode, budget_bytes, make_plan, rows_at_once

N, D, V = 300, 64, 5000
MODES: list[LinearMode] = ["in_forward", "resident", "recompute"]


class Made(TorchDispatchMode):
    """The largest tensor of each dtype that an operator made anew, and the device of every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[torch.dtype, int] = {}
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = run_operator(func, args, kwargs)
        if not func.is_view:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.numbers[x.dtype] = max(self.numbers.get(x.dtype, 0), x.numel())
                    self.devices.add(x.device.type)
        return out


def shape_of(rows: int, width: int, size: int = 4096, **given: int | bool) -> HeadShape:
    return HeadShape(rows, size, width, torch.bfloat16, torch.device("meta"), **given)  # type: ignore[arg-type]


@pytest.fixture(params=["eager", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """On the meta device Triton's operators run without their kernels."""
    if request.param == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(choice, "_INTERPRETED", True)  # or they are refused elsewhere than on CUDA
    return request.param


def step(
    mode: LinearMode,
    dtype: torch.dtype,
    backend: Backend,
    budget: int | None,
    rows: int | None = None,
    shape: tuple[int, int, int] = (N, D, V),
) -> tuple[Made, list[Tensor]]:
    tokens, size, vocab = shape
    hidden, weight = (torch.empty(n, size, dtype=dtype, device="meta", requires_grad=True) for n in (tokens, vocab))
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    made = Made()
    with made:
        stats = linear_token_stats(
            hidden, weight, targets, mode=mode, budget=budget, rows=rows, temperature=0.8, backend=backend,
            objective=(lambda s: s.logprobs.sum() + s.entropy.sum()) if mode == "in_forward" else None,
        )  # fmt: skip
        (stats.logprobs.sum() if stats.loss is None else stats.loss).backward()
    assert hidden.grad is not None and weight.grad is not None
    return made, [hidden.grad, weight.grad]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1 << 20, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_product_is_one_that_a_device_has(
    mode: LinearMode, dtype: torch.dtype, budget: int | None, backend: Backend
) -> None:
    if (mode, dtype) == ("in_forward", torch.float16):
        return  # refused
    for rows in (None, 200):
        made, gradients = step(mode, dtype, backend, budget, rows)
        assert [g.dtype for g in gradients] == [dtype, dtype] and made.devices == {"meta"}


@pytest.mark.parametrize("mode", MODES)
def test_a_float32_gradient_of_the_weight_is_made_only_where_it_is_a_sum(mode: LinearMode, backend: Backend) -> None:
    """At its default budget nothing else of a head is as large, and 8192 rows are one pass."""
    size, vocab = 4096, 131072
    for rows in (8192, 131072) if backend == "triton" else (8192,):
        made, _ = step(mode, torch.bfloat16, backend, None, shape=(rows, size, vocab))
        # eager kept logits are restored by chunks, and eager in_forward sums its chunks' gradients
        one = rows == 8192 and (backend == "triton" or mode == "recompute")
        assert (made.numbers[torch.float32] < vocab * size) == one


@pytest.mark.parametrize(("parts", "width"), [(1, 131072), (1, 16384), (8, 16384), (1, 18992)])
def test_a_plan_keeps_to_its_budget(parts: int, width: int) -> None:
    shape = shape_of(8192 // parts, width, parts=parts, in_place=True)
    for budget in (1 << 26, 1 << 28, 448 << 20, 1 << 31):
        plan = make_plan(shape, "recompute", budget)
        rows, columns = parts * plan.tile[0], plan.tile[1]
        assert parts * plan.size * width * 4 <= budget
        assert rows * (columns * (4 + 2) + 4096 * (2 + 4)) <= budget
        if parts == 1:
            assert plan.group * 4096 * (2 + 4) <= budget
    assert rows == 8192, "the default writes the gradient of the weight once"
    assert make_plan(shape, "auto", 448 << 20).resident == (width < 20000)


def test_chunks_are_alike_and_fill_waves() -> None:
    """512 rows gave the hidden states' gradient 64 tiles of 128 × 256 for 132 multiprocessors; 3 · 2560 + 512 made 8192."""
    for total, room, rows in (
        (8192, 2600, 2048),
        (8192, 1300, 1024),
        (8192, 4096, 4096),
        (5000, 2600, 2048),
        (700, 512, 352),
    ):
        assert rows_at_once(total, 10, 10 * room) == rows
    shape = shape_of(8192, 131072, in_place=True)
    assert make_plan(shape, "recompute", 1 << 31).tile == (8192, 4 * 8448)
    alone = replace(shape, in_place=False)
    for budget, rows in ((1 << 31, 2048), (1 << 30, 1024)):  # the defaults of an H200 and an H100
        assert make_plan(alone, "in_forward", budget).size == rows


@pytest.mark.parametrize("width", [131072, 151936, 128256, 16384, 18992, 5000])
@pytest.mark.parametrize("rows", [8192, 5000, 32768, 130])
def test_chunks_that_are_projected_alone_are_few_waves(rows: int, width: int) -> None:
    """Chunks of 1024 rows had 31.03 waves of tiles at V 131072, which a card makes in 32."""
    for budget in (448 << 20, 1 << 30, 1 << 31):
        size = make_plan(shape_of(rows, width, in_place=True), "recompute", budget).size
        most = min(rows, budget // (width * 6 + 4096 * 8), 4096)
        assert size <= most
        if 128 <= most < rows:
            chunks = -(-rows // size)
            whole = product_seconds(rows, 4096, width, 0)
            alike = product_seconds(-(-rows // chunks), 4096, width, 0)  # what no care would give
            last = product_seconds(max(rows % size, 256), 4096, width, 0) if rows % size else 0
            mine = rows // size * product_seconds(size, 4096, width, 0) + last
            assert mine <= chunks * alike * 1.001 and mine <= 1.1 * whole


@pytest.mark.parametrize("size", [2048, 2560, 3584, 4096, 5120, 8192])
@pytest.mark.parametrize("rows", [5000, 8192, 16384])
def test_groups_of_rows_are_few_waves_of_the_hidden_gradient(rows: int, size: int) -> None:
    """2048 rows of D 5120 were 2.42 waves, which a card makes in 3; at D 2560 1.21, in 2."""
    for budget in (1 << 30, 1 << 31):
        plan = make_plan(shape_of(rows, 131072, size, in_place=True), "in_forward", budget)

        def seconds(group: int) -> float:
            parts = rows // group * [group] + [rows % group]
            return sum(product_seconds(part, 131072, size, 0) for part in parts)

        assert plan.group >= 1024
        assert seconds(plan.group) <= min(seconds(group) for group in range(1024, plan.group + 1, plan.size)) * 1.001


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("width", [131072, 151936, 18992])
@pytest.mark.parametrize("budget", [1 << 26, 1 << 28, 448 << 20, 1 << 30, 1 << 31])
def test_groups_of_rows_keep_to_the_budget_and_what_they_save(
    budget: int, width: int, shared: bool, parts: int
) -> None:
    rows = 8192 // parts
    for spared in (0, 2 * 4096 * width):
        shape = shape_of(rows, width, shared=shared, parts=parts, in_place=True, spared=spared)
        plan, alone = (make_plan(one, "in_forward", budget) for one in (shape, replace(shape, in_place=False)))
        at_once = plan.group >= rows
        assert plan.group >= alone.size and plan.group % plan.size == 0
        assert plan.group % 1024 == 0 or plan.group < 1024 or at_once
        if plan.group > plan.size:
            kept = parts * min(plan.group, rows) * (2 * width + 4 * width / 128 + 4096 * (2 * 2 + 4))
            assert parts * plan.size * width * 4 + kept <= budget + (spared if at_once else 0)
    if not shared and parts == 1:
        assert at_once == (budget == 1 << 31 or (width < 20000 and budget >= 448 << 20))


def test_a_plan_is_one_at_any_shape_and_budget() -> None:
    """Of hidden states that are wide beside the logits, and of budgets that hold a row or two."""
    for size, width in ((8192, 4000), (5120, 4000), (64, 50000), (12, 37), (4096, 16032)):
        for rows in (1, 30, 4096, 100000):
            for parts, shared in ((1, False), (1, True), (8, True)):
                shape = shape_of(rows, width, size, shared=shared, parts=parts, in_place=True)
                buffers = 2 if shared else 1
                least = parts * buffers * (width * (4 + 2) + size * 2 * 4)
                for budget in (
                    least,
                    least + least // 3,
                    2 * least,
                    5 * least,
                    40 * least,
                    1 << 26,
                    448 << 20,
                    1 << 30,
                ):
                    if budget < least:
                        continue
                    plan = make_plan(shape, "in_forward", budget)
                    assert plan.group >= plan.size >= 1 and plan.group % plan.size == 0
                    row = parts * (2 * width + 4 * -(-width // 128) + buffers * size * 8)
                    chunk = parts * width * 4
                    if plan.group == plan.size:
                        chunk, row = least, 0
                    assert plan.size * chunk + min(plan.group, rows) * row <= budget
                    tile, columns = make_plan(shape, "recompute", budget).tile
                    assert tile >= 1 and columns >= 1 and (columns % 64 == 0 or columns >= width or columns < 64)


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(("mode", "most"), [("in_forward", 36.9), ("resident", 36.9), ("recompute", 48)])
def test_the_time_of_a_step_by_arithmetic(mode: LinearMode, most: float) -> None:
    """What no count of operators tells: chunks that leave multiprocessors idle, a pass more over the logits or the weight."""
    assert 1e3 * sum(step_seconds(mode, 8192, 4096, 131072).values()) <= most


def test_the_default_is_a_power_of_two_that_cards_of_a_kind_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, budget in ((139.8, 2 << 30), (139.7, 2 << 30), (79.1, 1 << 30), (93.1, 1 << 30), (23.6, 256 << 20)):
        memory = mock.Mock(total_memory=int(size * (1 << 30)))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, memory=memory: memory)
        assert budget_bytes(None, torch.device("cuda", 0)) == budget


class Kernels(TorchDispatchMode):
    """The products, and all operators that a card runs as kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.amax = self.all = self.merges = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if (name := kernel_name(func)) is not None:
            self.all += 1
            self.products += name in ("mm", "addmm", "addmm_")
            self.amax += name == "amax"
            self.merges += name in ("vocab_stats", "vocab_combine")  # of a shard's splits, and of the shards
        return run_operator(func, args, kwargs)


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    ("mode", "products", "kernels"), [("in_forward", 8, 80), ("resident", 6, 45), ("recompute", 16, 55)]
)
def test_a_step_has_few_products_and_kernels(
    mode: LinearMode, products: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the weight was made in 128 products of 1024 rows each, where one gives the same sums; a third pass over
    all logits found the row maximum that the statistics had; a row's splits were merged to be combined with nothing; and rows
    that lie one after another were gathered by indices, some 150 kernels of a few numbers."""
    monkeypatch.setattr(choice, "_INTERPRETED", True)
    with Kernels() as seen:
        step(mode, torch.bfloat16, "triton", None, shape=(8192, 4096, 131072))
    assert (seen.products, seen.amax, seen.merges) == (products, 0, 0) and seen.all <= kernels
