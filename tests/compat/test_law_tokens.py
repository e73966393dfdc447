"""The law on log-probs of tokens: on two ranks, shares add up to what the class alone gives of the whole step."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from parallel_rl import ParallelGroups
from parallel_rl.compat import lightrft, openrlhf, openrlhf_article, trinity
from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from tests.compat.cases import responses
from tests.compat.law import Case, Data, floats, plain, run
from tests.watch import Watch


@functools.cache
def token_cases() -> dict[str, Case]:
    policy, value = (
        ("logprob", "old_logprob", "advantages", "action_mask"),
        ("values", "old_values", "returns", "action_mask"),
    )
    token, row = {"is_correction_level": "token"}, {"is_correction_level": "seq"}
    losses = {
        "openrlhf clip": {**token, "is_correction_mode": "clip", "is_correction_threshold": [0.8, 1.3]},
        "openrlhf token": {**token, "is_correction_threshold": [0.8, 1.3]},
        "openrlhf token tv": {**token, "is_correction_gating": "tv", "is_correction_threshold": [0, 0.1]},
        "openrlhf row": {**row, "is_correction_threshold": [0.8, 1.3], "token_level_loss": False},
        "openrlhf row kl": {**row, "is_correction_gating": "binary_kl", "is_correction_threshold": [0, 0.05]},
    }
    losses |= {
        "openrlhf ppo": {"dual_clip": 1.5},
        "openrlhf rows": {"token_level_loss": False},
        "openrlhf gspo": {"policy_loss_type": "gspo", **row},
    }
    cases = {
        name: Case(plain(openrlhf.PolicyLoss(**options), *policy, "rollout"), counts_empty_rows=False)
        for name, options in losses.items()
    }
    cases |= {
        "openrlhf value": Case(plain(openrlhf.ValueLoss(0.2, False), *value), ("values",), counts_empty_rows=False),
        "openrlhf sft": Case(plain(openrlhf.SFTLoss(), "logprob", "action_mask")),
        "openrlhf article": Case(plain(openrlhf_article.PolicyLoss(0.3), *policy)),
        "lightrft policy": Case(plain(lightrft.PolicyLoss(), *policy)),
        "lightrft cpgd": Case(plain(lightrft.PolicyLoss(use_cpg_loss=True), *policy)),
        "lightrft value": Case(plain(lightrft.ValueLoss(0.2), *value), ("values",)),
    }
    extra = {
        "ppo": {"enable_sequence_masking": True},
        "rec": {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"},
        "mix": {"train_batch_size_usual": 4, "train_batch_size_expert": 2},
        "mix_chord": {"mu_warmup_steps": 20, "mu_peak": 0.7, "use_dynamic_bsz": True},
    }
    for name, cls in trinity.POLICY_LOSS_FN.items():
        modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
        for mode in modes if "loss_agg_mode" in cls.default_args() else (None,):
            options = cls.default_args() | extra.get(name, {}) | ({"loss_agg_mode": mode} if mode else {})
            fn = cls(**options)
            collect = getattr(fn, "collect", None)
            cases[f"trinity {name} {mode}"] = Case(
                lambda data, fn=fn, **keywords: fn(**data, **keywords),
                collect=collect and (lambda data, collect=collect, **keywords: collect(**data, **keywords)),
            )
    return cases


def _part(data: Data, rows: slice, columns: slice) -> Data:
    return {key: x[rows, columns] if x.dim() == 2 else x[rows] for key, x in data.items()}


def _token_world(rank: int, split: str) -> dict[str, tuple]:
    data, world = responses(11), dist.group.WORLD
    mask, whole = data["action_mask"], slice(None)
    if split == "rows of a context":  # no counts: the rows of this call are the step
        groups, context = ParallelGroups(context=world), {"context_parallel_group": world}
        parts = [_part(data, whole, slice(0, 4) if rank == 0 else slice(4, 8))]
    elif split == "context":  # and two micro-batches
        groups, context = ParallelGroups(context=world), {"context_parallel_group": world}
        columns = slice(0, 4) if rank == 0 else slice(4, 8)
        parts = [_part(data, rows, columns) for rows in (slice(0, 2), slice(2, 6))]
    else:  # data ranks with two micro-batches, one of them without a row
        groups, context = ParallelGroups(data=world), {}
        rows = (slice(0, 2), slice(2, 4)) if rank == 0 else (slice(4, 6), slice(6, 6))
        parts = [_part(data, each, whole) for each in rows]
    answers = {}
    for name, case in token_cases().items():
        seqs = len(mask) if case.counts_empty_rows else int(mask.any(1).sum())
        counts = {"global_valid_seqs": torch.tensor(seqs), "global_valid_toks": mask.sum()}
        if split == "rows of a context":
            counts, case = {}, case._replace(collect=None)
        answers[name] = run(case, parts, counts, groups, context)
    return answers


@pytest.fixture(scope="module", params=["rows of a context", "context", "data"])
def token_world(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, tuple]]]:
    return request.param, run_world(2, _token_world, request.param)


@pytest.mark.parametrize("name", token_cases())
def test_losses_on_tokens(name: str, token_world: tuple[str, list[dict[str, tuple]]]) -> None:
    split, (first, second) = token_world
    case, data = token_cases()[name], responses(11)
    (leaf,) = case.leaves
    data[leaf] = data[leaf].clone().requires_grad_()
    loss, metrics = case.call(data)
    (grad,) = torch.autograd.grad(loss, data[leaf])
    (a, grads_a, reduced), (b, grads_b, again) = first[name], second[name]
    torch.testing.assert_close(a + b, loss.detach(), rtol=1e-12, atol=1e-12)
    rows = [torch.cat([part[0] for part in grads]) for grads in (grads_a, grads_b)]
    torch.testing.assert_close(torch.cat(rows, 0 if split == "data" else 1), grad, rtol=1e-12, atol=1e-12)
    assert floats(reduced) == pytest.approx(floats(metrics), rel=1e-10, abs=1e-12) and floats(reduced) == floats(again)


@pytest.mark.parametrize(
    "name",
    [name for name in token_cases() if "chord" not in name and not name.endswith((" seq-mean-token-mean", "norm"))],
)
def test_nothing_reads_a_value(name: str) -> None:
    """On the meta device there are no values; CHORD alone reads one, the number of its step. Each class in its first mode."""
    data = {key: value.to("meta") for key, value in responses(0).items()}
    counts = dict.fromkeys(("global_valid_seqs", "global_valid_toks"), torch.ones((), device="meta"))
    watch = Watch()
    with validation("never"), watch:
        run(token_cases()[name], [data], counts, ParallelGroups(), {})
    assert watch.syncs == []
