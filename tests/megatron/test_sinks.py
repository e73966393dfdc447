"""Attention sinks (`softmax_type="learnable"`) are cut over tensor ranks, though Megatron does not mark them as such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from parallel_rl.testing.pool import preload, run_world

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

VOCAB, WIDTH, CLIP = 32, 8, 0.5


def _model() -> GPTModel:
    """Megatron's own layers, as gpt-oss has them; ours refuse sinks by name."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    import parallel_rl.megatron as M

    config = M.build_config(
        num_layers=2, hidden_size=16, num_attention_heads=4, init_std=0.5, overrides={"softmax_type": "learnable"}
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, VOCAB, WIDTH, position_embedding_type="rope")
    M.initialize_weights([model], seed=0, vocab_size=VOCAB)
    return model


def _sinks(model: torch.nn.Module) -> dict[str, Tensor]:
    import parallel_rl.megatron as M

    return {name: M.whole_tensor(p).clone() for name, p in M.global_parameters([model]) if "softmax_offset" in name}


def _step(rank: int, tp: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Loss, our norm, and the norm that Megatron's optimizer clips by; the whole sinks before and after its step."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss

    M.initialize(tp=tp)
    model = M.wrap_model(_model())
    settings = OptimizerConfig(optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=CLIP)
    optimizer = get_megatron_optimizer(settings, [model])
    sinks = {f"{name} before": p for name, p in _sinks(model).items()}
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (3, WIDTH), generator=g)
    data = {"input_ids": ids, "token_mask": torch.ones(3, WIDTH), "sample_mask": torch.ones(3)}
    model.zero_grad_buffer()
    report = M.forward_backward(model, NLLLoss(vocab_size=VOCAB), [data])
    numbers = {"loss": report.floats()["loss"], "norm": M.grad_norm(model).item()}
    numbers["norm of the optimizer"] = float(optimizer.step()[1])
    sinks |= {f"{name} after": p for name, p in _sinks(model).items()}
    M.destroy()
    return numbers, sinks


def test_sinks_are_the_same_on_every_tensor_layout() -> None:
    """Each tensor rank drew other sinks, the norm counted rank 0's part alone, and clipping was too weak."""
    [(numbers, sinks)] = run_world(1, _step, 1)
    assert numbers["norm"] > 2 * CLIP and len(sinks) == 4
    assert all(before.shape == (4,) and before.abs().min() > 0 for before in sinks.values())
    for here, cut in run_world(2, _step, 2):
        for name, value in here.items():
            assert value == pytest.approx(numbers[name], rel=1e-5), name
        for name, whole in cut.items():
            assert torch.allclose(whole, sinks[name], rtol=1e-4, atol=1e-6), name
