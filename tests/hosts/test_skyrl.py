"""Losses in SkyRL's call against its arithmetic: what is averaged over hides in the advantages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_rl import PolicyLossFn
from parallel_rl.hosts import skyrl
from tests.hosts.rows import A, B, clean, gspo, ppo, same, step

PPO = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}
CUTS = [slice(0, 1), slice(1, 4), slice(4, 6)]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_skyrls_arithmetic_over_micro_batches(reduction: str) -> None:
    data, plain = step(2), clean(step(2))
    n = plain["mask"].sum(1, keepdim=True).clamp(min=1)
    by = {"token_mean": plain["mask"].sum(), "sequence_mean": B * n, "seq_mean_token_sum_norm": B * A}[reduction]
    scaled = data["advantages"] / by
    for options, theirs in ({}, ppo), ({"ratio_level": "sequence-mean"}, gspo):
        call = skyrl.policy_loss(PolicyLossFn({"surrogate": PPO, **options}))

        def hosted(new: Tensor, call=call) -> Tensor:  # type: ignore[no-untyped-def]
            return sum(call(new[c], data["old"][c], scaled[c], None, data["mask"][c])[0] for c in CUTS)  # type: ignore[return-value]

        same(hosted, lambda new, f=theirs: (f(new, plain) / by * plain["mask"]).sum(), data["new"])


def test_an_importance_weight_reads_the_samplers_log_probs() -> None:
    data, plain = step(3), clean(step(3))
    call = skyrl.policy_loss(PolicyLossFn({"surrogate": PPO, "importance": {"mode": "tis", "high": 1.1}}))
    weight = (plain["old"] - plain["generation"]).exp().clamp(max=1.1)
    same(
        lambda new: call(new, data["old"], data["advantages"], None, data["mask"], data["generation"])[0],
        lambda new: (ppo(new, plain) * weight * plain["mask"]).sum(),
        data["new"],
    )
    with pytest.raises(ValueError, match="reads generation_logprobs, which this step of SkyRL does not have"):
        call(data["new"], data["old"], data["advantages"], None, data["mask"])


def test_the_registry() -> None:
    """Through SkyRL's own registry where it is installed; without it the error says what is supported."""
    try:
        from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    except ImportError:
        with pytest.raises(ValueError, match=r"SkyRL is not installed .*; supported is its source of August 2026"):
            skyrl.register("dapo")
        return
    assert skyrl.register("grpo") == ["parallel_rl:grpo"]
    loss, _ = PolicyLossRegistry.get("parallel_rl:grpo")(
        torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), config=None
    )
    assert loss.item() == -2.0


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="aggregation 'token-mean', which is a sum here"):
        skyrl.policy_loss(PolicyLossFn({"aggregation": "seq-mean-token-mean"}))
    with pytest.raises(ValueError, match="does not scale with its advantages"):
        skyrl.policy_loss(
            PolicyLossFn({"entropy_filter": None, "surrogate": {"name": "topr", "advantage_threshold": 1.0}})
        )
    with pytest.raises(ValueError, match="reads the entropy, which SkyRL does not hand over"):
        skyrl.policy_loss(PolicyLossFn({"entropy_bonus": 0.1}))
