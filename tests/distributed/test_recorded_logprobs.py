"""Recorded log-probs moved by one place, or of another temperature, are named in the first step; right ones never are."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from parallel_rl import PolicyLossFn
from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import VOCAB, Case, make_data, make_model, split

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

FIELDS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
#: what is done to right log-probs [B, S], and the cure that the warning names; None: no warning
SLIPS: dict[str, str | None] = {
    "right": None,
    "near": None,  # off-policy by a little, as a sampler's are
    "random": None,
    "constant": None,
    "at the predictor": ".roll(1, 1)",
    "one late": ".roll(-1, 1)",
    "warm": " times the temperature of this loss",
}


def _slipped(slip: str, right: Tensor, warm: Tensor) -> Tensor:
    noise = torch.rand(right.shape, generator=torch.Generator().manual_seed(7), dtype=right.dtype)
    return {
        "right": right,
        "near": right + 0.1 * (noise - 0.5),
        "random": -3 * noise,
        "constant": torch.full_like(right, -3.0),
        "at the predictor": right.roll(-1, 1),
        "one late": right.roll(1, 1),
        "warm": warm,
    }[slip]


def _warnings(rank: int, sizes: dict[str, int], packed: bool) -> dict[str, list[str]]:
    """Warnings of two steps, of two micro-batches each, by slip."""
    from megatron.core import parallel_state

    import parallel_rl.megatron as M
    from parallel_rl import token_logprobs

    M.initialize(**sizes)
    model = M.wrap_model(make_model(Case(**sizes)))
    tensor = parallel_state.get_tensor_model_parallel_group()
    context = parallel_state.get_context_parallel_group()
    batches = [M.packed_batch(b, b["lengths"]) if packed else M.padded_batch(b) for b in split(make_data("ragged"), 2)]

    def recorded(batch: M.MicroBatch, temperature: float) -> Tensor:
        with torch.no_grad():
            logits = M.forward_logits(model, batch.input)
        return token_logprobs(
            logits, batch.data, None, tensor, context, layout=batch.input.layout, vocab_size=VOCAB,
            temperature=temperature,
        )  # fmt: skip

    right, warm = ([recorded(batch, t) for batch in batches] for t in (1.0, 1.4))
    found = {}
    for slip in SLIPS:
        loss_fn = PolicyLossFn({"surrogate": {"name": "ppo"}, "kl": {"coefficient": 0.1}}, vocab_size=VOCAB)
        fields = [_slipped(slip, *each) for each in zip(right, warm, strict=True)]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad_buffer()
                M.forward_backward(
                    model,
                    loss_fn,
                    [b.with_data(**dict.fromkeys(FIELDS, x)) for b, x in zip(batches, fields, strict=True)],
                )
        found[slip] = [str(each.message) for each in said if "logprobs" in str(each.message)]
    M.destroy()
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}], ids=["tp2", "cp2"])
def test_a_moved_field_is_named_once_on_every_rank_and_a_right_one_never(sizes: dict[str, int], packed: bool) -> None:
    """A host that stores log-probs at their predictor trained on ratios of other tokens, and nothing said so."""
    for found in run_world(2, _warnings, sizes, packed):
        for slip, cure in SLIPS.items():
            # a reference may be of another temperature
            named = [] if cure is None else FIELDS[:2] if slip == "warm" else FIELDS
            assert [text.split(" looks ")[0] for text in found[slip]] == list(named), (slip, found[slip])
            assert all(cure is not None and cure in text for text in found[slip])
            assert slip == "warm" or all("most at row" in text for text in found[slip])
