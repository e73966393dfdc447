"""The fused head as a device runs it, on the meta device: its products, its plan and its memory, without values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_rl import linear_token_stats
from parallel_rl.vocab.backends import choice
from parallel_rl.vocab.backends.choice import Backend
from parallel_rl.vocab.linear.plan import LinearMode, make_plan

N, D, V = 300, 64, 5000
MODES: list[LinearMode] = ["in_forward", "resident", "recompute"]


class Made(TorchDispatchMode):
    """The largest tensor of each dtype that an operator made anew, and the device of every tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[torch.dtype, int] = {}
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.numbers[x.dtype] = max(self.numbers.get(x.dtype, 0), x.numel())
                    self.devices.add(x.device.type)
        return out


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
    for rows in (8192, 32768) if backend == "triton" else (8192,):
        made, _ = step(mode, torch.bfloat16, backend, None, shape=(rows, size, vocab))
        one = mode != "in_forward" and rows == 8192 and (mode, backend) != ("resident", "eager")  # restored by chunks
        assert (made.numbers[torch.float32] < vocab * size) == one


@pytest.mark.parametrize(("parts", "width"), [(1, 131072), (1, 16384), (8, 16384), (1, 18992)])
def test_a_plan_keeps_to_its_budget(parts: int, width: int) -> None:
    hidden = torch.empty(8192 // parts, 4096, dtype=torch.bfloat16, device="meta")
    for budget in (1 << 26, 1 << 28, 448 << 20):
        plan = make_plan(hidden, width, False, parts, "recompute", budget, True)
        rows, columns = parts * plan.tile[0], plan.tile[1]
        assert parts * plan.size * width * 4 <= budget
        assert rows * (columns * (4 + 2) + 4096 * (2 + 4)) <= budget
        if parts == 1:
            assert plan.kept_together * 4096 * (2 + 4) <= budget
    assert rows == 8192, "the default writes the gradient of the weight once"
    assert make_plan(hidden, width, False, parts, "auto", 448 << 20).resident == (width < 20000)
