"""Losses in the call of torchtitan's RL, against its arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_rl import PolicyLossFn
from parallel_rl.hosts.torchtitan import HostLoss

T, V = 12, 9
PPO = {"surrogate": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}, "log_ratio_clamp": 10.0}


def packed() -> dict[str, Tensor]:
    """Fields [T] of a packed row with shifted labels; one sampled token has no finite log-prob, prompts hold NaN."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=g, dtype=torch.float64) * 2
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]).bool()
    advantages = torch.where(mask, torch.randn(T, generator=g, dtype=torch.float64), 0)
    generator = torch.where(mask, -2 + torch.randn(T, generator=g, dtype=torch.float64) * 0.5, torch.nan)
    generator[3] = -torch.inf
    return {
        "logits": logits, "labels": torch.randint(0, V, (T,), generator=g), "generator_logprobs": generator,
        "advantages": advantages, "loss_mask": mask,
    }  # fmt: skip


def dapo(logits: Tensor, labels: Tensor, tokens: float, old: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    """torchtitan's: a token without a finite log-prob of the sampler is dropped, the log-ratio is within ±10."""
    keep = mask & old.isfinite()
    new = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    ratio = torch.where(keep, new - old.nan_to_num(0, 0, 0), 0).clamp(-10, 10).exp()
    return (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) * keep).sum() / max(tokens, 1)


def test_torchtitans_arithmetic_over_micro_batches() -> None:
    data = packed()
    logits = data["logits"].clone().requires_grad_()
    loss_fn, total = HostLoss(PolicyLossFn(PPO)), torch.zeros((), dtype=torch.float64)
    fields = {name: data[name] for name in ("generator_logprobs", "advantages", "loss_mask")}
    seen = []
    for part in (slice(0, 5), slice(5, T)):
        loss, metrics = loss_fn(logits[part], data["labels"][part], 6, **{name: x[part] for name, x in fields.items()})
        total = total + loss
        seen.append(metrics)
    want = dapo(logits, data["labels"], 6, data["generator_logprobs"], data["advantages"], data["loss_mask"])
    torch.testing.assert_close(total, want, rtol=1e-9, atol=1e-12)
    ours, theirs = torch.autograd.grad(total, logits)[0], torch.autograd.grad(want, logits)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert float(seen[0]["loss/mean"] + seen[1]["loss/mean"]) == pytest.approx(want.item())
    keep = data["loss_mask"] & data["generator_logprobs"].isfinite()
    entropy = torch.distributions.Categorical(logits=data["logits"]).entropy()
    assert float(seen[0]["loss/entropy"] + seen[1]["loss/entropy"]) == pytest.approx((entropy[keep].sum() / 6).item())
    assert {name for name in seen[0] if name.endswith("/max")} >= {"loss/probs_ratio/max"}


def test_no_count_and_no_token() -> None:
    """torchtitan divides by 1 then."""
    data = packed()
    logits, labels = data.pop("logits"), data.pop("labels")
    loss, _ = HostLoss(PolicyLossFn(PPO))(logits, labels, None, **data)
    want = dapo(logits, labels, 0, data["generator_logprobs"], data["advantages"], data["loss_mask"])
    assert loss.item() == pytest.approx(want.item())
    data["loss_mask"] = torch.zeros(T, dtype=torch.bool)
    assert HostLoss(PolicyLossFn(PPO))(logits, labels, 0, **data)[0].item() == 0


def test_what_does_not_fit() -> None:
    data = packed()
    logits, labels = data.pop("logits"), data.pop("labels")
    with pytest.raises(ValueError, match="looks beyond a token; torchtitan's rows have no bounds"):
        HostLoss(PolicyLossFn({"ratio_level": "sequence-mean"}))
    with pytest.raises(ValueError, match="must be divided by the step's tokens"):
        HostLoss(PolicyLossFn({"aggregation": "seq-mean-token-mean"}))
    with pytest.raises(ValueError, match=r"advantages has shape \[11\], labels \[12\]"):
        HostLoss(PolicyLossFn(PPO))(logits, labels, 6, **{**data, "advantages": data["advantages"][1:]})
