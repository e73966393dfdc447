"""FP8 of Transformer Engine, as far as it shows without a card: when weights are cast, and which rows a model is given."""

from __future__ import annotations

import pytest
import torch

from parallel_rl.testing.pool import preload, run_world

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")


def _told(rank: int) -> dict[str, list[bool]]:
    """What a linear layer finds in `is_first_microbatch`, which Transformer Engine's layers have and put down again."""
    import parallel_rl.megatron as M

    M.initialize()
    model = M.wrap_model(M.build_model(M.build_config(num_layers=1, hidden_size=8, num_attention_heads=2), 8, 4))
    model.config.fp8 = "hybrid"
    linear = M.unwrap(model).decoder.layers[0].mlp.linear_fc1
    linear.is_first_microbatch, found = True, []

    def forward(layer: torch.nn.Module, *_: object) -> None:
        found.append(layer.is_first_microbatch)
        layer.is_first_microbatch = False

    linear.register_forward_pre_hook(forward)
    inputs = M.padded_input(torch.zeros(1, 4, dtype=torch.int64))
    told = {}
    for _ in range(2):
        M.forward_logits(model, inputs)
    told["with gradient"], found = found, []
    with torch.no_grad():
        for _ in range(2):
            M.forward_logits(model, inputs)
    told["without"], found = found, []
    M.forward_only(M.forward_logits, [model], [inputs] * 2, lambda *_: None, seq_length=4, micro_batch_size=1)
    told["scheduled"] = found
    M.destroy()
    return told


def test_a_forward_outside_a_schedule_casts_weights_anew() -> None:
    """Sampling and scoring after an optimizer's step ran on the FP8 weights of the step's last micro-batch."""
    [told] = run_world(1, _told)
    assert told == {"with gradient": [True, False], "without": [True, True], "scheduled": [True, True]}


def _idle(rank: int, sp: bool, recipe: str) -> tuple[list[int], float]:
    """The sizes of the local inputs of a step in which the second data rank has no micro-batch, and the loss."""
    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss

    M.initialize(tp=2 if sp else 1)
    config = M.build_config(num_layers=1, hidden_size=8, num_attention_heads=2, sequence_parallel=sp)
    model = M.wrap_model(M.build_model(config, 8, 256))
    model.config.fp8, model.config.fp8_recipe = "hybrid", recipe
    sizes: list[int] = []
    M.unwrap(model).embedding.register_forward_pre_hook(
        lambda layer, args, given: sizes.append(given["input_ids"].numel()), with_kwargs=True
    )
    ids = torch.arange(512).view(2, 256) % 8
    rows = {"input_ids": ids, "token_mask": torch.ones(2, 256), "sample_mask": torch.ones(2)}
    alone = rank >= (2 if sp else 1)
    report = M.forward_backward(model, NLLLoss(vocab_size=8), [] if alone else [rows])
    M.destroy()
    return sizes, report.floats()["loss"]


@pytest.mark.parametrize(
    ("sp", "recipe", "unit"), [(False, "tensorwise", 16), (True, "tensorwise", 32), (True, "blockwise", 256)]
)
def test_rows_made_up_for_an_idle_rank_suit_fp8(sp: bool, recipe: str, unit: int) -> None:
    """Transformer Engine refused them, on one rank, while the others waited for its gradients."""
    for sizes, _ in run_world(4 if sp else 2, _idle, sp, recipe):
        assert sizes and all(size % unit == 0 for size in sizes)
