"""Recorded log-probs moved by one place, or of another temperature, are named in the first step; right ones never are."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from parallel_rl import ComponentsLossFn, PolicyLossFn, count_valid, token_logprobs
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


@pytest.mark.parametrize(
    ("sizes", "packed"),
    [
        pytest.param({"cp": 2}, True, id="cp2-packed"),
        pytest.param({"tp": 2}, False, id="tp2-padded", marks=pytest.mark.slow),
    ],
)
def test_a_moved_field_is_named_once_on_every_rank_and_a_right_one_never(sizes: dict[str, int], packed: bool) -> None:
    """A host that stores log-probs at their predictor trained on ratios of other tokens, and nothing said so."""
    for found in run_world(2, _warnings, sizes, packed):
        for slip, cure in SLIPS.items():
            # a reference may be of another temperature
            named = [] if cure is None else FIELDS[:2] if slip == "warm" else FIELDS
            assert [text.split(" looks ")[0] for text in found[slip]] == list(named), (slip, found[slip])
            assert all(cure is not None and cure in text for text in found[slip])
            assert slip == "warm" or all("most at row" in text for text in found[slip])


def test_every_way_to_call_a_loss_looks_at_its_first_micro_batches() -> None:
    """Logits, pre-shifted labels, a host's log-probs, and a component by its name; later micro-batches cost nothing."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 12, 32, generator=g)
    data = {"input_ids": torch.randint(32, (4, 12), generator=g), "token_mask": torch.ones(4, 12)}
    data |= {"sample_mask": torch.ones(4), "advantages": torch.ones(4, 12)}
    data["prev_logprobs"] = token_logprobs(logits, data).roll(-1, 1)
    shifted = {name: x.roll(-1, 1) if x.dim() == 2 else x for name, x in data.items()}
    shifted["shift_labels"] = shifted.pop("input_ids")
    shifted["token_mask"] = shifted["token_mask"] * (torch.arange(12) < 11)
    parts = {"policy": {"loss": {"name": "policy", "options": {"surrogate": {"name": "ppo"}}}}}
    counts = count_valid(data)
    cures = []
    for call in (
        lambda loss_fn: loss_fn(logits, data, *counts),
        lambda loss_fn: loss_fn(logits, shifted, *counts),
        lambda loss_fn: loss_fn.from_logprobs(
            token_logprobs(logits, data), data=data, global_valid_seqs=4, global_valid_toks=44
        ),
        lambda _: (each := ComponentsLossFn({"components": parts}))(logits, data, *counts, statistics=each.count(data)),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call(PolicyLossFn({"surrogate": {"name": "ppo"}}))
        cures.append([str(each.message) for each in said])
    assert [text.split(" looks ")[0] for texts in cures for text in texts] == ["prev_logprobs"] * 3 + [
        "policy/prev_logprobs"
    ]
    assert all("give prev_logprobs.roll(1, 1)" in text for texts in cures for text in texts)
    loss_fn = PolicyLossFn({"surrogate": {"name": "ppo"}})
    right = {**data, "prev_logprobs": token_logprobs(logits, data)}
    for _ in range(20):
        loss_fn(logits, right, *counts)
    assert loss_fn.recorded_check.left == 0
