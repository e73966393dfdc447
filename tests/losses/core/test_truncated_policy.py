"""A policy loss under the sampler's truncation, on every layout of four ranks, against dense rows that are sorted whole."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import (
    ClippedPGLossFn,
    NLLLoss,
    ParallelGroups,
    SequenceLayout,
    SequencePackingLossWrapper,
    count_valid,
    reduce_metrics,
    register_objective,
    token_logprobs,
)
from parallel_rl.losses import DPOLossFn, PolicyLossFn
from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from tests.vocab.sorted_rows import kept_by_sorting
from tests.watch import Watch

B, S, V = 3, 8, 12
RULE: dict = {"top_k": 7, "top_p": 0.8, "temperature": 0.9}
KL = {"coefficient": 0.3, "estimator": "k3", "gradient": "plain"}
CONFIGS: dict[str, dict] = {
    "token": {"surrogate": {"name": "ppo"}, "kl": KL},
    "sequence": {"surrogate": {"name": "ppo"}, "ratio_level": "sequence-mean", "aggregation": "seq-mean-token-mean"},
}


def make() -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and data; token by token the targets are likely, or not kept; some old log-probs are −inf."""
    g = torch.Generator().manual_seed(3)
    z = 2 * torch.randn(B, S, V, generator=g, dtype=torch.float64)
    ids = torch.randint(V, (B, S), generator=g)
    ids[:, 1:] = torch.where(torch.rand(B, S - 1, generator=g) < 0.7, z[:, :-1].argmax(-1), ids[:, 1:])

    def noise() -> Tensor:
        return 0.1 * torch.randn(B, S, generator=g, dtype=torch.float64)

    kept_ids = torch.stack([torch.randperm(V, generator=g)[:4] for _ in range(B * S)]).view(B, S, 4)
    kept_ids[..., 3] = torch.where(torch.rand(B, S, generator=g) < 0.5, kept_ids[..., 3], -1)
    data = {
        "input_ids": ids,
        "token_mask": torch.ones(B, S, dtype=torch.int64),
        "sample_mask": torch.ones(B),
        "advantages": 10 * noise(),
        "prev_logprobs": -1 + noise(),
        "generation_logprobs": -1 + noise(),
        "reference_policy_logprobs": -2 + noise(),
        "kept_ids": kept_ids,
    }
    data["token_mask"][1, 6:] = 0
    data["prev_logprobs"][0, 3] = data["prev_logprobs"][2, 5] = -math.inf
    data["prev_logprobs"][1, 7] = -math.inf  # masked anyway
    return z, data


def expected(z: Tensor, data: dict[str, Tensor], name: str, rule: dict) -> tuple[Tensor, int]:
    """(loss, dropped tokens), token by token."""
    heat = rule.get("temperature", 1.0)
    rows, total_tokens, dropped = [], 0, 0
    for i in range(B):
        kept = []
        for t in range(1, S):
            if not data["token_mask"][i, t]:
                continue
            total_tokens += 1
            row, y = z[i, t - 1], int(data["input_ids"][i, t])
            if "kept_sets" in rule:
                inside = torch.zeros(V, dtype=torch.bool)
                inside[[k for k in data["kept_ids"][i, t].tolist() if k >= 0] + [y]] = True
            else:
                inside = kept_by_sorting(row.detach()[None], **rule)[0]
            prev = data["prev_logprobs"][i, t]
            if not inside[y] or prev == -math.inf:
                dropped += 1
                continue
            logp = row[y] / heat - (row[inside] / heat).logsumexp(0)
            kept.append(
                (
                    logp,
                    (row / heat).log_softmax(0)[y],
                    prev,
                    data["advantages"][i, t],
                    data["reference_policy_logprobs"][i, t],
                )
            )
        rows.append(kept)
    loss = z.sum() * 0
    for kept in rows:
        mean = sum(new - prev for new, _, prev, *_ in kept) / max(len(kept), 1)
        for logp, whole, prev, advantage, reference in kept:
            ratio = torch.exp(logp - prev if name == "token" else mean)  # type: ignore[arg-type]
            term = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if name == "token":
                d = reference - whole
                term = (term + 0.3 * (d.exp() - 1 - d)) / total_tokens
            else:
                term = term / (B * len(kept))
            loss = loss + term
    return loss, dropped


RULES = {"truncated": RULE, "recorded": {"kept_sets": True, "temperature": 0.9}}


def on_layouts(rank: int, name: str, which: str, both: bool) -> dict[str, tuple]:
    found = {}
    for tp, cp in ((4, 1), (2, 2), (1, 4)):
        if S % (2 * cp):
            continue
        tensor = [dist.new_group([r * tp + i for i in range(tp)]) for r in range(4 // tp)][rank // tp]
        context = [dist.new_group([i + r * tp for r in range(cp)]) for i in range(tp)][rank % tp]
        z, data = make()
        for packed in (False, True) if both or tp == 2 else (True,):
            bounds = torch.arange(B + 1, dtype=torch.int32) * S
            place = {"cp_size": cp, "cp_rank": rank // tp}
            if packed:
                layout = SequenceLayout.packed(bounds, seq_len=S, total=B * S, **place)
            else:
                layout = SequenceLayout.padded(B, S, **place)
            flat = torch.stack([layout.shard(z[..., v], shift=False) for v in range(V)], -1)
            width = V // tp
            local = flat[:, (rank % tp) * width : (rank % tp + 1) * width].contiguous().view(*layout.local_shape, width)
            # in the quick tests one rule uses the logits up where rows are packed, the other where they are padded
            for consume in (False, True) if both else (packed == (which == "truncated"),):
                leaf = local.clone().requires_grad_()
                loss_fn = PolicyLossFn(CONFIGS[name], consume_logits=consume, **RULES[which])
                call = SequencePackingLossWrapper(loss_fn, bounds) if packed else loss_fn
                loss, metrics = call(leaf * 1, data, *count_valid([data]), rank % tp, tensor, context)
                loss.backward()
                assert leaf.grad is not None
                grads = [layout.unshard(leaf.grad.view(-1, width)[:, v], context, shift=False) for v in range(width)]
                reduced = reduce_metrics([metrics], ParallelGroups(tensor=tensor, context=context))
                found[f"{tp} {cp} {packed} {consume}"] = (
                    loss.item(), torch.stack(grads, -1), rank % tp, reduced["dropped_tokens"].item(), tp
                )  # fmt: skip
        old = token_logprobs(flat[:, (rank % tp) * width : (rank % tp + 1) * width].view(*layout.local_shape, width), data,
                             rank % tp, tensor, context, layout=layout, **RULES[which])  # fmt: skip
        found[f"old {tp}"] = (old,)
    return found


@cache
def ranks_of(name: str, which: str, both: bool) -> list[dict[str, tuple]]:
    found: list[dict[str, tuple]] = run_world(4, on_layouts, name, which, both)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which", "both"),
    [
        ("token", "truncated", False),
        ("sequence", "recorded", False),
        ("token", "recorded", True),
        ("sequence", "truncated", True),
    ],
)
def test_on_layouts(name: str, which: str, both: bool) -> None:
    z, data = make()
    whole = z.clone().requires_grad_()
    want, dropped = expected(whole, data, name, RULES[which])
    want.backward()
    assert whole.grad is not None
    assert dropped == (2 if which == "recorded" else dropped) and 2 <= dropped < 15
    ranks = ranks_of(name, which, both)
    for key in ranks[0]:
        if key.startswith("old"):
            continue
        tp = ranks[0][key][4]
        share = sum(rank[key][0] for rank in ranks[::tp])
        assert share == pytest.approx(want.item(), rel=1e-12), key
        gradient = torch.cat([ranks[i][key][1] for i in range(tp)], -1)
        torch.testing.assert_close(gradient, whole.grad, rtol=1e-10, atol=1e-13, msg=key)
        assert all(rank[key][3] == dropped for rank in ranks), key


def test_old_logprobs_are_of_the_truncated_policy() -> None:
    z, data = make()
    data["token_mask"][:] = 1
    for name, which in (("token", "truncated"), ("sequence", "recorded")):  # the log-probs know nothing of the loss
        rule, ranks = RULES[which], ranks_of(name, which, False)
        inside = torch.zeros(B, S, dtype=torch.bool)
        want = torch.zeros(B, S, dtype=torch.float64)
        for i in range(B):
            for t in range(1, S):
                row, y = z[i, t - 1], int(data["input_ids"][i, t])
                if "kept_sets" in rule:
                    keep = torch.zeros(V, dtype=torch.bool)
                    keep[[k for k in data["kept_ids"][i, t].tolist() if k >= 0] + [y]] = True
                else:
                    keep = kept_by_sorting(row[None], **rule)[0]
                u = torch.where(keep, row / 0.9, -math.inf)
                want[i, t], inside[i, t] = u.log_softmax(0)[y], keep[y]
        for tp in (4, 2):
            for rank in ranks:
                torch.testing.assert_close(rank[f"old {tp}"][0], want, rtol=1e-12, atol=1e-12)
        assert which == "recorded" or not inside[:, 1:].all()


def test_a_policy_that_generates_and_trains_alike_keeps_every_ratio_at_one() -> None:
    z, data = make()
    old = token_logprobs(z, data, **RULE)
    data |= {"prev_logprobs": old, "generation_logprobs": old}
    loss, metrics = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0}, **RULE)(z, data, *count_valid([data]))
    outside = (old == -math.inf) & (data["token_mask"] != 0)
    assert metrics["dropped_tokens"].item() == outside[:, 1:].sum().item() > 0
    assert metrics["probs_ratio_min"].item() == metrics["probs_ratio_max"].item() == 1.0
    assert bool(loss.isfinite()) and all(bool(metrics[name].isfinite()) for name in metrics)


def test_a_users_objective_may_be_truncated() -> None:
    from parallel_rl.losses import registry

    @register_objective("truncated_test", token_fields=("advantages",))
    def Objective(logprobs, batch):  # type: ignore[no-untyped-def]
        return -batch["advantages"] * logprobs

    try:
        z, data = make()
        plain, whole = Objective()(z, data, *count_valid([data]))
        loss, metrics = Objective(top_p=0.5)(z, data, *count_valid([data]))
        assert "dropped_tokens" not in whole and metrics["dropped_tokens"] > 0 and loss != plain
    finally:
        del registry._LOSSES["truncated_test"]


@pytest.mark.parametrize(
    ("make_loss", "words"),
    [
        (lambda: NLLLoss(top_k=3), "NLLLoss is not a loss on a sampler's policy"),
        (lambda: DPOLossFn(top_p=0.5), "DPOLossFn is not a loss on a sampler's policy"),
        (lambda: PolicyLossFn(top_p=0.0), r"top_p = 0.0 must lie in \(0, 1\]"),
        (lambda: PolicyLossFn(top_k=3, kept_sets=True), "would have no effect"),
    ],
)
def test_options_that_do_not_fit(make_loss, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make_loss()


def test_data_that_does_not_fit() -> None:
    z, data = make()
    counts = count_valid([data])
    with pytest.raises(ValueError, match=f"top_k = {V + 1} exceeds vocab_size = {V}"):
        PolicyLossFn(top_k=V + 1)(z, data, *counts)
    with pytest.raises(ValueError, match="data lacks the field 'kept_ids'"):
        PolicyLossFn(kept_sets=True)(z, {k: v for k, v in data.items() if k != "kept_ids"}, *counts)
    data["kept_ids"][2, 4, 1] = V
    with pytest.raises(ValueError, match=rf"kept_ids = {V} at \[2, 4, 1\] lies outside the vocabulary"):
        PolicyLossFn(kept_sets=True)(z, data, *counts)
    with pytest.raises(ValueError, match="data lacks the field 'kept_ids'"):
        token_logprobs(z, {"input_ids": data["input_ids"]}, kept_sets=True)


@pytest.mark.parametrize("rule", [RULE, {"kept_sets": True}], ids=["truncated", "recorded"])
def test_nothing_waits_for_the_device(rule: dict) -> None:
    """On a device that has no values to look at: a CPU's are at hand, and top-p looks at them."""
    z, data = make()
    leaf, data = z.to("meta").requires_grad_(), {name: value.to("meta") for name, value in data.items()}
    with validation("never"):
        counts = count_valid([data])
        with Watch() as watch:
            loss, _ = PolicyLossFn(CONFIGS["token"], **rule)(leaf, data, *counts)
            loss.backward()
    assert watch.syncs == []
