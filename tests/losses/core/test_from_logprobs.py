"""The call on log-probs: its forms in one process, what it refuses, and that ranks refuse alike."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_rl import (
    ClippedPGLossFn,
    ComponentsLossFn,
    DPOLossFn,
    FullDistillationLossFn,
    LossFn,
    NLLLoss,
    PolicyLossFn,
    ValueLossFn,
    count_valid,
    reduce_metrics,
)
from parallel_rl.losses.core.log_probs_source import warn_of_precision
from parallel_rl.testing.pool import preload, run_world

preload("parallel_rl", "tests.losses.core.test_from_logprobs")

LENGTHS = (5, 3, 1, 4)
FIELDS = ("logprobs", "prev_logprobs", "advantages", "reference_policy_logprobs")


def responses() -> dict[str, list[Tensor]]:
    """Ragged responses, a masked token in the middle of one and a response without any valid token."""
    g = torch.Generator().manual_seed(3)
    data = {name: [torch.randn(n, generator=g, dtype=torch.float64) / 3 - 1 for n in LENGTHS] for name in FIELDS}
    data["response_mask"] = [torch.ones(n) for n in LENGTHS]
    data["response_mask"][0][2] = 0
    data["response_mask"][2][:] = 0
    return data


def padded(data: dict[str, list[Tensor]], fill: float = math.nan) -> dict[str, Tensor]:
    """Rows [B, A], `fill` behind a response and at masked tokens, 0 in the mask."""
    rows = {}
    for name, values in data.items():
        rows[name] = torch.nn.utils.rnn.pad_sequence(
            values, batch_first=True, padding_value=0 if "mask" in name else fill
        )
    for name in FIELDS:
        rows[name] = torch.where(rows["response_mask"] > 0, rows[name], fill)
    return rows


def with_column(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole sequences [B, 1 + A], garbage in column 0 of every field and a 1 in the mask's."""
    found = {
        name: torch.nn.functional.pad(x, (1, 0), value=1.0 if "mask" in name else math.inf) for name, x in rows.items()
    }
    found["token_mask"] = found.pop("response_mask")
    return found


def flat(data: dict[str, list[Tensor]], tail: int = 0) -> dict[str, Tensor]:
    """One flat row, NaN in `tail` positions that belong to no sequence."""
    return {name: torch.nn.functional.pad(torch.cat(x), (0, tail), value=math.nan) for name, x in data.items()}


def ppo_by_hand(rows: dict[str, Tensor]) -> Tensor:
    """PPO with clips 0.2 and 0.28, mean over 11 tokens; of rows whose masked places hold 0."""
    ratio = (rows["logprobs"] - rows["prev_logprobs"]).exp()
    term = torch.maximum(-rows["advantages"] * ratio, -rows["advantages"] * ratio.clamp(0.8, 1.28))
    return (term * rows["response_mask"]).sum() / 11


PPO = {"surrogate": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}}
COUNTS = {"global_valid_seqs": torch.tensor(4), "global_valid_toks": torch.tensor(11)}
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0)


def called(loss_fn: LossFn, data: dict, **more: object) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """The loss, the gradient of each response's log-probs, and the metrics."""
    leaves = data["logprobs"]
    leaves = [leaves] if isinstance(leaves, Tensor) else leaves
    for leaf in leaves:
        leaf.requires_grad_()
    rest = {name: x for name, x in data.items() if name != "logprobs"}
    loss, metrics = loss_fn.from_logprobs(data["logprobs"], data=rest, **{**COUNTS, **more})
    loss.backward()
    numbers = {name: x.item() for name, x in reduce_metrics([metrics]).items()}
    return loss.detach(), [leaf.grad for leaf in leaves], numbers


def test_every_form_gives_the_loss_by_hand() -> None:
    clean = padded(responses(), fill=0.0)
    clean["logprobs"].requires_grad_()
    want = ppo_by_hand(clean)
    [gradient] = torch.autograd.grad(want, clean["logprobs"])
    loss_fn, seen = PolicyLossFn(PPO), []

    rows = padded(responses())
    loss, [found], metrics = called(loss_fn, rows)
    torch.testing.assert_close((loss, found), (want.detach(), gradient))
    seen.append(metrics)

    whole = with_column(rows)
    loss, [found], metrics = called(loss_fn, {name: x.detach() for name, x in whole.items()})
    torch.testing.assert_close((loss, found[:, 1:]), (want.detach(), gradient))
    assert not found[:, 0].any()
    seen.append(metrics)

    loss, found, metrics = called(loss_fn, responses())
    torch.testing.assert_close(loss, want.detach())
    for i, n in enumerate(LENGTHS):
        torch.testing.assert_close(found[i], gradient[i, :n])
    seen.append(metrics)

    for tail in (0, 3):
        loss, [found], metrics = called(loss_fn, flat(responses(), tail), cu_seqlens=BOUNDS)
        torch.testing.assert_close(loss, want.detach())
        torch.testing.assert_close(found[:13], torch.cat([gradient[i, :n] for i, n in enumerate(LENGTHS)]))
        assert not found[13:].any()
        seen.append(metrics)

    assert all(metrics.keys() == seen[0].keys() for metrics in seen)
    assert all(metrics == pytest.approx(seen[0], rel=1e-12) for metrics in seen)


def test_the_entropy_is_read_where_a_term_needs_it_and_measured_where_it_is_given() -> None:
    """ClippedPG once needed the entropy for a metric alone, and failed in an assertion without."""
    rows = padded(responses())
    plain = ClippedPGLossFn({"reference_policy_kl_penalty": 0.1})
    without = called(plain, rows)
    given = called(plain, rows, entropy=torch.full((4, 5), 2.0, dtype=torch.float64))
    assert "entropy" not in without[2] and given[2]["entropy"] == pytest.approx(2.0)
    assert given[0] == without[0] and without[2].items() <= given[2].items()

    bonus = PolicyLossFn({**PPO, "entropy_bonus": 0.5})
    with pytest.raises(
        ValueError, match=r"PolicyLossFn in this configuration reads the entropy of the policy; give entropy="
    ):
        called(bonus, rows)
    entropy = torch.full((4, 5), 2.0, dtype=torch.float64, requires_grad=True)
    loss, _, _ = called(bonus, rows, entropy=entropy)
    torch.testing.assert_close(loss, called(PolicyLossFn(PPO), rows)[0] - 0.5 * 2.0)
    torch.testing.assert_close(entropy.grad, -0.5 * padded(responses())["response_mask"].double() / 11)


def test_external_weights_of_tokens() -> None:
    """Loss and statistics by hand: Σ w·ℓ over the number of tokens with a weight, for a host's own weights."""
    rows = padded(responses())
    weights = torch.where(rows["response_mask"] > 0, torch.arange(20.0).view(4, 5) % 3, math.nan)
    loss_fn = NLLLoss({"token_weights": "count"})
    data = {"response_mask": rows["response_mask"], "token_weights": weights}
    statistics = loss_fn.collect_from_logprobs(rows["prev_logprobs"], data=data, **COUNTS).reduce()
    clean = weights.nan_to_num(0.0)
    assert statistics["weighted_tokens"] == (clean > 0).sum()
    loss, _ = loss_fn.from_logprobs(rows["logprobs"], data=data, **COUNTS, statistics=statistics)
    torch.testing.assert_close(loss, -(clean * rows["logprobs"].nan_to_num(0.0)).sum() / (clean > 0).sum())


def test_dpo_pairs() -> None:
    rows, cut = padded(responses()), responses()
    loss_fn = DPOLossFn({"reference_policy_kl_penalty": 0.3})
    sums = ((rows["logprobs"] - rows["reference_policy_logprobs"]).nan_to_num(0.0)).sum(1)
    want = -torch.nn.functional.logsigmoid(0.3 * (sums[::2] - sums[1::2])).mean()
    for data in (rows, cut):
        torch.testing.assert_close(called(loss_fn, data)[0], want)


def test_the_complement_of_a_mask_ends_with_its_response() -> None:
    """What pads a list's or a flat row's responses on the way was a token of every component with "not ..."."""
    data = responses()
    tools = [torch.arange(n) % 2 == 0 for n in LENGTHS]
    loss_fn = ComponentsLossFn({"components": {"own": {"loss": {"name": "nll"}, "mask": "not tool_mask"}}})
    chosen = torch.cat(data["logprobs"])[~torch.cat(tools)]
    lists = {"logprobs": data["logprobs"], "response_mask": data["response_mask"], "tool_mask": tools}
    one_row = {name: torch.cat(x) for name, x in lists.items()}
    for form, more in ((lists, {}), (one_row, {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)})):
        logprobs, *_ = form.values()
        call = {"data": form, "global_valid_seqs": 4, "global_valid_toks": 11, **more}
        statistics = loss_fn.collect_from_logprobs(logprobs, **call).reduce()
        loss, metrics = loss_fn.from_logprobs(logprobs, **call, statistics=statistics)
        torch.testing.assert_close(loss, -chosen.mean(), rtol=1e-12, atol=0)
        assert metrics["own/num_unmasked_tokens"] == len(chosen) == 5


def test_a_response_without_a_token() -> None:
    """A rank of a host that lists responses may hold none of one, or none of all."""
    data = {"response_mask": [torch.ones(0), torch.ones(2)]}
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    one = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    counts = {"global_valid_seqs": 2, "global_valid_toks": 2}
    loss, _ = NLLLoss().from_logprobs([none, one], data=data, **counts)
    loss.backward()
    assert loss == 1.5 and one.grad.tolist() == [-0.5, -0.5]
    loss, _ = NLLLoss().from_logprobs([none, none], data={"response_mask": [torch.ones(0)] * 2}, **counts)
    loss.backward()
    assert loss == 0 and none.grad is not None


REFUSED: list[tuple[Callable[[], LossFn], dict, str]] = [
    (FullDistillationLossFn, {}, "FullDistillationLossFn reads more than log-probs: whole rows of logits"),
    (ValueLossFn, {}, "ValueLossFn reads more than log-probs: a scalar head's output"),
    (lambda: PolicyLossFn(PPO, top_p=0.9), {}, r"which tokens the truncated policy keeps"),
    (lambda: PolicyLossFn(PPO, temperature=0.7), {}, r"temperature = 0.7 has no effect on log-probs"),
    (lambda: PolicyLossFn(PPO, consume_logits=True), {}, "consume_logits = True has no effect on log-probs"),
    (NLLLoss, {"response_mask": None}, "it has neither"),
    (NLLLoss, {"token_mask": torch.ones(4, 5)}, "it has token_mask and response_mask"),
    (NLLLoss, {"response_mask": torch.ones(4, 6)}, r"response_mask has shape \[4, 6\]; the log-probs have \[4, 5\]"),
    (NLLLoss, {"response_mask": torch.ones(3, 5)}, r"response_mask has shape \[3, 5\]; the log-probs have \[4, 5\]"),
    (NLLLoss, {"response_mask": [torch.ones(5)] * 4}, r"response_mask must be a tensor, got list; .*one, \[B, S\]"),
    (NLLLoss, {"response_mask": torch.full((4, 5), 0.5)}, "token_mask = 0.5 at .* must be 0 or 1"),
    (NLLLoss, {"sample_mask": torch.ones(3)}, r"sample_mask has shape \[3\]; 4 sequences call for \[4\]"),
    (lambda: PolicyLossFn(PPO), {"advantages": None}, "data lacks the field 'advantages'"),
    (lambda: PolicyLossFn(PPO), {"advantages": torch.ones(4)}, r"advantages has shape \[4\]; the log-probs have \[4, 5\]"),
    (lambda: PolicyLossFn(PPO), {"advantages": torch.ones(4, 5).long()}, "advantages must be floating point"),
    (lambda: PolicyLossFn(PPO), {"advantages": torch.full((4, 5), math.nan)}, "advantages is NaN at .*, a valid place"),
    (NLLLoss, {"logprobs": torch.ones(4, 5).long()}, "log-probs must be floating point"),
    (NLLLoss, {"logprobs": torch.ones(4, 5, 2)}, r"log-probs must be \[B, S\], a list .* got \[4, 5, 2\]"),
    (NLLLoss, {"logprobs": torch.ones(13)}, "need cu_seqlens="),
    (NLLLoss, {"cu_seqlens": BOUNDS}, r"cu_seqlens goes with flat log-probs \[T\], got \[4, 5\]"),
    (lambda: DPOLossFn({"reference_logprobs_alignment": "predictor"}), {}, "which responses alone do not have"),
    (NLLLoss, {"statistics": 3}, "takes no statistics="),
]  # fmt: skip


@pytest.mark.parametrize(("make", "change", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_what_is_refused(make: Callable[[], LossFn], change: dict, message: str) -> None:
    given = {**padded(responses()), **change}
    call = {name: given.pop(name) for name in ("logprobs", "cu_seqlens", "statistics") if name in given}
    data = {name: x for name, x in given.items() if x is not None and (name in change or name not in call)}
    with pytest.raises(ValueError, match=message):
        make().from_logprobs(call.pop("logprobs"), data=data, **COUNTS, **call)


def test_values_that_no_log_prob_has_are_named() -> None:
    """The same numbers under another sign or without their logarithm trained in silence, some in the wrong direction."""
    right, mask = padded(responses())["logprobs"], padded(responses())["response_mask"]
    rows = {"probabilities": right.exp(), "with the sign changed": -2 * right, "without their normaliser": right + 1.0}
    for probably, values in rows.items():
        with pytest.raises(ValueError, match=rf"logprobs is [\d.]+ at \[0, \d\], above 0; .*{probably}"):
            NLLLoss().from_logprobs(values, data={"response_mask": mask}, **COUNTS)
    rounded = right.float().clamp(max=0).nan_to_num(1e-6) + 1e-6
    NLLLoss().from_logprobs(rounded, data={"response_mask": mask}, **COUNTS)


def test_responses_under_the_name_of_whole_sequences_are_named() -> None:
    """Their first token was dropped; a first token without a log-prob, as `token_logprobs` leaves it, is none of these."""
    rows, lists, bounds = padded(responses()), responses(), {"cu_seqlens": BOUNDS}
    for data, more in ((rows, {}), (lists, {}), (flat(responses()), bounds)):
        logprobs, mask = data["logprobs"], data["response_mask"]
        with pytest.raises(
            ValueError, match=r"token_mask is 1 at \[0, 0\], .* is -[\d.]+. Name the mask response_mask if"
        ):
            NLLLoss().from_logprobs(logprobs, data={"token_mask": mask}, **COUNTS, **more)
    for fill in (0.0, math.nan, -math.inf):
        whole = torch.nn.functional.pad(rows["logprobs"], (1, 0), value=fill)
        data = {"token_mask": torch.nn.functional.pad(rows["response_mask"], (1, 0), value=1.0)}
        assert NLLLoss().from_logprobs(whole, data=data, **COUNTS)[0].isfinite()


def test_an_entropy_bonus_without_the_entropys_gradient_is_refused() -> None:
    rows = padded(responses())
    entropy = torch.full((4, 5), 2.0, dtype=torch.float64)
    bonus = {"surrogate": "reinforce", "entropy_bonus": 0.1}
    parts = {"components": {"all": {"loss": {"name": "policy", "options": bonus}}}}
    for loss_fn in (PolicyLossFn(bonus), ComponentsLossFn(parts)):
        call = {"data": {name: rows[name] for name in ("response_mask", "advantages")}, **COUNTS, "entropy": entropy}
        statistics = (
            loss_fn.collect_from_logprobs(rows["logprobs"], **call).reduce() if loss_fn.needs_statistics else None
        )
        with pytest.raises(ValueError, match=r"entropy has no gradient, the log-probs have one, and .* trains on both"):
            loss_fn.from_logprobs(rows["logprobs"].clone().requires_grad_(), **call, statistics=statistics)
        loss_fn.from_logprobs(rows["logprobs"], **call, statistics=statistics)  # of an evaluation


def test_log_probs_of_16_bits_are_warned_of_once() -> None:
    rows = padded(responses())
    code = {name: rows[name] for name in ("response_mask",)}
    warn_of_precision.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
            NLLLoss().from_logprobs(rows["logprobs"].to(dtype), data=code, **COUNTS)
    assert ["log-probs in torch.bfloat16 change the gradient" in str(each.message) for each in seen] == [True]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (torch.tensor([0, 5, 3, 9, 13]), "must start at 0 and not decrease"),
        (torch.tensor([1, 5, 8, 9, 13]), "must start at 0 and not decrease"),
        (torch.tensor([0, 5, 8, 9, 14]), "ends at 14, beyond the 13 log-probs"),
        (torch.tensor([0.0, 13.0]), "must be integers"),
        (torch.tensor([13]), r"must be integers \[B \+ 1\] with B ≥ 1"),
    ],
)
def test_bounds_that_do_not_fit(bounds: Tensor, message: str) -> None:
    data = flat(responses())
    with pytest.raises(ValueError, match=message):
        NLLLoss().from_logprobs(data.pop("logprobs"), data=data, **COUNTS, cu_seqlens=bounds)


def _faults_of_a_rank(rank: int) -> list[str]:
    """What each rank of a context group hears when rank 1 alone is at fault; a rank that waits would time out."""
    import torch.distributed as dist

    said, group = [], dist.group.WORLD
    rows = padded(responses())
    short = {**rows, "response_mask": rows["response_mask"][:, :4]}
    fewer = {name: x[:2] for name, x in rows.items()}
    wild = {**rows, "advantages": torch.full((4, 5), math.nan)}
    for other in (short, fewer, wild):
        data = dict(other if rank == 1 else rows)
        try:
            PolicyLossFn(PPO).from_logprobs(data.pop("logprobs"), data=data, **COUNTS, context_parallel_group=group)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    turns = {"name": "policy", "options": {**PPO, "ratio_level": "turn-mean"}}
    for loss_fn in (
        PolicyLossFn({**PPO, "ratio_level": "turn-mean"}),
        DPOLossFn({"length_desensitization": 0.5}),
        ComponentsLossFn({"components": {"all": {"loss": turns, "fields": {"segment_ids": "other"}}}}),
    ):
        data = {**rows, "segment_ids": torch.zeros(4, 5, dtype=torch.int64)}
        data["other"] = data["segment_ids"]
        try:
            loss_fn.from_logprobs(data.pop("logprobs"), data=data, **COUNTS, context_parallel_group=group)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_fault_of_one_context_rank_is_an_error_of_all() -> None:
    first, second = run_world(2, _faults_of_a_rank, timeout=60)
    assert first == second
    for said, message in zip(
        first,
        (
            "has shape [4, 4]",
            "the number of sequences",
            "advantages is NaN",
            "needs each token's position",
            "needs each token's position",
            "needs each token's position",
        ),
        strict=True,
    ):
        assert message in said


def test_count_valid_agrees_with_column_0() -> None:
    """The counts of whole sequences leave out column 0, which from_logprobs does not read either."""
    whole = with_column(padded(responses()))
    whole["sample_mask"] = torch.ones(4)
    seqs, toks = count_valid(whole)
    assert (int(seqs), int(toks)) == (4, 11)
