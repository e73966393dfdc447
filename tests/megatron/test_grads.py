"""Gradients of a model whose embedding is frozen, and what their norm takes while it is formed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_rl.testing.pool import preload, run_world

pytest.importorskip("megatron.core")
preload("megatron.core")

BLOCK = 24  # does not divide the sizes: a last block is shorter


class Doubles(TorchDispatchMode):
    """The sizes of the float64 tensors that operators give."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.sizes += [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and x.dtype == torch.float64]
        return out


def _norm(rank: int) -> tuple[int, int, float, float]:
    """The largest gradient, the largest float64 tensor, the norm, and what it should be."""
    import parallel_rl.megatron as M
    from parallel_rl.megatron import grads

    M.initialize()
    model = M.build_model(M.build_config(num_layers=1, hidden_size=8, num_attention_heads=2), 8, 4)
    for number, parameter in enumerate(model.parameters()):
        g = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=g)
    with mock.patch.object(grads, "_BLOCK", BLOCK), Doubles() as doubles:
        norm = M.grad_norm([model])
    every = [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]
    truth = sum(float(grad.square().sum()) for grad in every) ** 0.5
    M.destroy()
    return max(grad.numel() for grad in every), max(doubles.sizes), norm.item(), truth


def test_a_gradient_is_never_copied_whole_in_float64() -> None:
    """The copy of a large embedding's float32 gradient would be twice as large as it, in each step."""
    [(gradient, double, norm, truth)] = run_world(1, _norm)
    assert double == BLOCK < gradient
    assert norm == pytest.approx(truth, rel=1e-12)


def _frozen(rank: int) -> list[float]:
    """The gradient norm of a model over two stages whose tied embedding does not train, with Megatron's wrapper and without."""
    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss

    M.initialize(pp=2)
    norms = []
    for ddp in (True, False):
        config = M.build_config(num_layers=2, hidden_size=8, num_attention_heads=2)
        model = M.build_model(config, 8, 4, tie_embeddings=True)
        for name, parameter in M.global_parameters([model]):
            parameter.requires_grad_("embedding" not in name)
        ids = torch.arange(8).view(2, 4)
        rows = {"input_ids": ids, "token_mask": torch.ones(2, 4), "sample_mask": torch.ones(2)}
        model = M.wrap_model(model, ddp=ddp)
        M.forward_backward(model, NLLLoss(vocab_size=8), [rows])
        norms.append(M.grad_norm([model]).item())
    M.destroy()
    return norms


def test_a_frozen_embedding_has_no_gradient_to_sum_over_stages() -> None:
    """Without the wrapper the step ended in an AttributeError."""
    for wrapped, bare in run_world(2, _frozen):
        assert bare == pytest.approx(wrapped, rel=1e-5) and bare > 0
