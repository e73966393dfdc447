"""Losses in NeMo-RL's call on log-probs: the call's own numbers, its words, and what its split step needs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from parallel_rl import DPOLossFn, PolicyLossFn
from parallel_rl.hosts.nemo_rl import HostLoss
from tests.hosts.rows import B, clean, gspo, ppo, same, step

PPO = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}


def batch(data: dict[str, Tensor], at: slice = slice(None)) -> dict[str, Tensor]:
    """NeMo-RL's batch: token-aligned [B, S], the first column is never scored."""
    names = {"advantages": "advantages", "prev_logprobs": "old", "token_mask": "mask"}
    found = {name: torch.nn.functional.pad(data[ours][at], (1, 0)) for name, ours in names.items()}
    return found | {"sample_mask": torch.ones(B)[at], "input_lengths": torch.full((B,), 6)[at]}


@pytest.mark.parametrize(("options", "theirs"), [({}, ppo), ({"ratio_level": "sequence-mean"}, gspo)])
def test_nemo_rls_arithmetic_over_micro_batches(options: dict, theirs) -> None:  # type: ignore[no-untyped-def]
    """The whole loss of the rows on whoever holds them: NeMo-RL divides by context ranks itself."""
    data, plain = step(), clean(step())
    loss_fn = HostLoss(PolicyLossFn({"surrogate": PPO, **options}))

    def hosted(new: Tensor) -> Tensor:
        calls = [
            loss_fn(new[c], batch(data, c), torch.tensor(6), torch.tensor(17))[0] for c in (slice(0, 2), slice(2, 6))
        ]
        return calls[0] + calls[1]

    same(hosted, lambda new: (theirs(new, plain) * plain["mask"]).sum() / 17, data["new"])


def test_the_split_step() -> None:
    """With counts of 1 each metric, scaled by the advertised count, is that of the ordinary call; the loss by loss_type."""
    data = step()
    counts = {"tokens": 17.0, "sequences": 6.0, "none": 1.0}
    for options in ({}, {"aggregation": "seq-mean-token-mean"}):
        loss_fn = HostLoss(PolicyLossFn({"surrogate": PPO, **options}))
        loss, metrics = loss_fn(data["new"], batch(data), torch.tensor(6), torch.tensor(17))
        raw, sums = loss_fn(data["new"], batch(data), torch.tensor(1), torch.tensor(1))
        unit = {"token_level": 17.0, "sequence_level": 6.0}[str(loss_fn.loss_type)]
        torch.testing.assert_close(raw / unit, loss)
        scaled = {name: x / counts[str(loss_fn.metric_normalizations[name])] for name, x in sums.items()}
        assert scaled == pytest.approx(metrics) and metrics["loss"] == pytest.approx(loss.item())


def test_the_hosts_own_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL compares some of its members by identity, so that in its process they must be its own."""
    import enum

    host = ModuleType("nemo_rl.algorithms.loss.interfaces")
    for name in ("LossInputType", "LossType", "MetricNormalizer"):
        names = ("LOGPROB", "TOKEN_LEVEL", "SEQUENCE_LEVEL", "TOKENS", "SEQUENCES", "NONE")
        setattr(host, name, enum.Enum(name, {word: word.lower() for word in names}))
    monkeypatch.setitem(sys.modules, host.__name__, host)
    loss_fn = HostLoss(PolicyLossFn())
    assert loss_fn.input_type is host.LossInputType.LOGPROB and loss_fn.loss_type is host.LossType.TOKEN_LEVEL
    assert loss_fn.metric_normalizations["num_valid_samples"] is host.MetricNormalizer.NONE


def test_a_host_without_normalizers_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL 0.7 has the call on log-probs, and no MetricNormalizer yet."""
    import enum

    host = ModuleType("nemo_rl.algorithms.loss.interfaces")
    host.LossInputType = enum.Enum("LossInputType", {"LOGPROB": "logprob"})  # type: ignore[attr-defined]
    host.LossType = enum.Enum("LossType", {"TOKEN_LEVEL": "token_level"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, host.__name__, host)
    loss_fn = HostLoss(PolicyLossFn())
    assert loss_fn.loss_type is host.LossType.TOKEN_LEVEL and loss_fn.metric_normalizations["loss"] == "tokens"


@pytest.mark.parametrize(
    "correction",
    [
        {"importance": {"mode": "seq-mask-tis", "low": 0.999, "high": 1.002}},
        {"importance": {"mode": "icepop", "low": 0.99, "high": 1.01}, "aggregation": "seq-mean-token-mean"},
        {"rejection": {"rules": [{"statistic": "k3", "high": 1e-6}]}},
    ],
)
def test_corrections_within_narrow_bounds(correction: dict) -> None:
    """On the log-probs that tell what divides a loss they leave nothing, and the loss was refused as divided by nothing."""
    by_row = "aggregation" in correction
    assert str(HostLoss(PolicyLossFn(correction)).loss_type) == ("sequence_level" if by_row else "token_level")


def test_nothing_valid_is_an_exact_zero() -> None:
    data = step()
    new = data["new"].clone().requires_grad_()
    loss, _ = HostLoss(PolicyLossFn())(
        new, {**batch(data), "sample_mask": torch.zeros(B)}, torch.tensor(0), torch.tensor(0)
    )
    loss.backward()
    assert loss.item() == 0 and new.grad is not None and not new.grad.any()


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = step()
    with pytest.raises(ValueError, match=r"must be \[B, S − 1\] = \[6, 5\] for token_mask \[6, 6\], got \[6, 4\]"):
        HostLoss(PolicyLossFn())(data["new"][:, 1:], batch(data), torch.tensor(6), torch.tensor(17))
    with pytest.raises(ValueError, match="reads segment_ids, which NeMo-RL does not hand over"):
        HostLoss(PolicyLossFn({"ratio_level": "turn-mean"}))
    assert str(HostLoss(DPOLossFn()).loss_type) == "sequence_level"
    for name in ("nemo_rl", "nemo_rl.algorithms.loss_functions"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ValueError, match=r"passes logits to its losses, .* Install its source since March 2026"):
        HostLoss(PolicyLossFn())
