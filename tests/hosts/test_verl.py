"""Losses in verl's call: against its arithmetic over ranks and micro-batches, and against the installed registry."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from parallel_rl import PolicyLossFn, TokenBatch, register_objective
from parallel_rl.hosts import verl
from tests.hosts.rows import A, B, clean, gspo, ppo, same, step

TOKENS = 17
PPO = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}
MODES = {
    "token-mean": {}, "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": {"aggregation": "constant-length", "max_length": A},
    "token-sum": {"aggregation": "token-sum"},
}  # fmt: skip


@register_objective("doc_verl_weighted", token_fields=("advantages",))
def Weighted(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    return -batch["advantages"] * logprobs


def config(ranks: int = 1, **more: object) -> SimpleNamespace:
    info = {"dp_size": ranks, "batch_num_tokens": TOKENS, "global_batch_size": B}
    return SimpleNamespace(global_batch_info={**info, **more})


def by_hand(x: Tensor, mask: Tensor, mode: str) -> Tensor:
    x = x * mask
    if mode in ("token-mean", "token-sum"):
        return x.sum() / (TOKENS if mode == "token-mean" else 1)
    if mode == "seq-mean-token-mean":
        return (x.sum(1) / mask.sum(1).clamp(min=1)).sum() / B
    return x.sum() / B / (A if mode.endswith("norm") else 1)


def call(
    loss_fn: PolicyLossFn, new: Tensor, data: dict[str, Tensor], mode: str, settings: object, weighted: bool
) -> Tensor:
    weights = data["weights"] if weighted else None
    return verl.policy_loss(loss_fn)(data["old"], new, data["advantages"], data["mask"], mode, settings, weights)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_verls_arithmetic_over_ranks_and_micro_batches(mode: str, weighted: bool) -> None:
    """Two ranks of two micro-batches, whose mean over ranks (FSDP) is the sum over the step."""
    data, plain = step(), clean(step())
    for ours, theirs in (({"surrogate": PPO}, ppo), ({"surrogate": PPO, "ratio_level": "sequence-mean"}, gspo)):
        loss_fn = PolicyLossFn({**ours, **MODES[mode]})

        def hosted(new: Tensor, loss_fn: PolicyLossFn = loss_fn) -> Tensor:
            parts = [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6)]
            shares = [
                call(loss_fn, new[at], {k: x[at] for k, x in data.items()}, mode, config(ranks=2), weighted)
                for at in parts
            ]
            return torch.stack(shares).sum() / 2

        own = plain["weights"] if weighted else torch.ones(B, A)
        same(hosted, lambda new, f=theirs, w=own: by_hand(f(new, plain) * w, plain["mask"], mode), data["new"])


def test_the_installed_registry() -> None:
    """Value and gradient of verl's own losses, and ours under our names; both through its registry."""
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl, which is not installed")

    settings = pytest.importorskip("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28
    )
    settings.global_batch_info.update(config(ranks=2).global_batch_info)
    dual = {"surrogate": {**PPO, "dual_clip": 3.0}, "log_ratio_clamp": 20.0}
    level = {"ratio_level": "sequence-mean", "ratio_gradient": "token", "aggregation": "seq-mean-token-mean"}
    cases = {
        "vanilla": (dual, "token-mean"), "gpg": ({"surrogate": {"name": "reinforce"}}, "token-mean"),
        "gspo": ({"surrogate": PPO, **level}, "seq-mean-token-mean"),
        "sapo": ({"surrogate": {"name": "sapo"}, "aggregation": "seq-mean-token-mean"}, "seq-mean-token-mean"),
        "cispo": ({"surrogate": {"name": "cispo", "clip_low": 0.2, "clip_high": 0.28}}, "token-mean"),
    }  # fmt: skip
    data, plain = step(1), clean(step(1))
    for name, (options, mode) in cases.items():
        theirs = algos.get_policy_loss_fn(name)
        same(
            lambda new, o=options, m=mode: call(PolicyLossFn(o), new, data, m, settings, False),
            lambda new, f=theirs, m=mode: f(plain["old"], new, plain["advantages"], plain["mask"], m, settings)[0],
            data["new"], 1e-6,
        )  # fmt: skip
    assert verl.register("dapo", "GSPO") == ["parallel_rl:dapo", "parallel_rl:gspo"]
    loss, metrics = algos.get_policy_loss_fn("parallel_rl:dapo")(
        old_log_prob=data["old"], log_prob=data["new"], advantages=data["advantages"], response_mask=data["mask"],
        loss_agg_mode="token-mean", config=settings, rollout_is_weights=None,
    )  # fmt: skip
    assert loss.isfinite() and {"actor/pg_clipfrac", "actor/approx_kl"} <= set(metrics)


def test_metrics_are_means_of_the_micro_batch() -> None:
    """verl averages them over micro-batches, so that a share of the step would come out too small."""
    data, plain = step(), clean(step())
    _, metrics = verl.policy_loss(PolicyLossFn({"surrogate": PPO}))(
        data["old"], data["new"], data["advantages"], data["mask"], "token-mean", config()
    )
    kl = ((plain["old"] - plain["new"]) * plain["mask"]).sum() / plain["mask"].sum()
    assert abs(metrics["actor/approx_kl"] - kl.item()) < 1e-9
    half = verl.policy_loss(PolicyLossFn({"surrogate": PPO}))(
        data["old"][:2], data["new"][:2], data["advantages"][:2], data["mask"][:2], "token-mean", config()
    )[1]
    kl = ((plain["old"] - plain["new"]) * plain["mask"])[:2].sum() / plain["mask"][:2].sum()
    assert abs(half["actor/approx_kl"] - kl.item()) < 1e-9


def test_what_does_not_fit() -> None:
    data = step()

    def run(options: dict, mode: str = "token-mean", settings: object = None, weighted: bool = False) -> None:
        call(PolicyLossFn(options), data["new"], data, mode, settings or config(), weighted)

    with pytest.raises(ValueError, match=r"'seq-mean-token-mean'; set actor.loss_agg_mode=seq-mean-token-mean"):
        run({"aggregation": "seq-mean-token-mean"})
    with pytest.raises(ValueError, match=r"max_length = 9, verl by 5: set actor.loss_scale_factor"):
        run({"aggregation": "constant-length", "max_length": 9}, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="loss_agg_mode = 'token-sum'"):
        run({}, "token-sum")
    with pytest.raises(ValueError, match="loss_agg_mode = 'token-sum', but Weighted is divided by tokens"):
        call(Weighted(), data["new"], data, "token-sum", config(), False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="global_batch_info must hold dp_size, batch_num_tokens"):
        run({}, settings=SimpleNamespace(global_batch_info={}))
    with pytest.raises(ValueError, match="rollout_is_weights multiply terms that scale with the advantages"):
        run({"surrogate": {"name": "topr", "advantage_threshold": 0.5}}, weighted=True)
    with pytest.raises(ValueError, match="PolicyLossFn reads reference_policy_logprobs, which verl does not hand over"):
        verl.policy_loss(PolicyLossFn({"kl": {"coefficient": 0.1}}))
    with pytest.raises(ValueError, match="needs statistics of the whole step"):
        verl.policy_loss(PolicyLossFn({"entropy_filter": 0.2}))
    with pytest.raises(ValueError, match="loss_agg_mode = 'token-mean', but Weighted is divided by sequences"):
        call(Weighted({"aggregation": "seq-mean-token-mean"}), data["new"], data, "token-mean", config(), False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"log-probs have \[6, 5\]"):
        verl.policy_loss(PolicyLossFn())(
            data["old"], data["new"], data["advantages"], data["mask"][:, :4], config=config()
        )
