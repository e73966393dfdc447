"""One optimizer step of a user's model on every layout: right models pass, planted faults are found and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from parallel_rl.testing import LawBroken, StepLayout, check_step
from parallel_rl.testing.pool import preload

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron", "parallel_rl.testing.whole_step.worlds")

from tests.testing.whole_step import planted  # noqa: E402  after the preload
from tests.testing.whole_step.models import dense_config, experts_config, provider  # noqa: E402

MEAN = {"per_token": False}


def test_a_right_model_passes() -> None:
    """The same on four layouts, one of them with virtual stages."""
    layouts = [StepLayout(packed=True, recompute=True), StepLayout(tp=2, sp=True, packed=True)]
    layouts += [StepLayout(cp=2, per_token=False), StepLayout(pp=2, vp=2)]
    report = check_step(provider, dense_config, layouts=layouts)
    assert report.ok and [row.error for row in report.rows] == [""] * 4, str(report)


@pytest.mark.slow
def test_a_right_dense_model_passes_on_ten_layouts() -> None:
    """Padded, packed, every parallel axis, recomputation, both settings of calculate_per_token_loss."""
    report = check_step(provider, dense_config)
    assert report.ok and len(report.rows) == 10 and not any(row.error for row in report.rows), str(report)
    assert report.seconds < 90 and "bf16 = True is turned off" in report.notes
    for row in report.rows:
        assert row.gradient < 1e-12 and row.loss < 1e-12 and row.weights < 1e-6, row.layout.name


@pytest.mark.slow
def test_a_right_mixture_of_experts_with_heads_passes_on_fourteen_layouts() -> None:
    report = check_step(provider, experts_config)
    assert report.ok and len(report.rows) == 14 and not any(row.error for row in report.rows), str(report)
    assert report.seconds < 240


@pytest.mark.parametrize(
    ("model", "more", "layouts", "shown", "says"),
    [
        pytest.param(
            planted.scaled_heads, {}, ("tp2", "cp2", "pp2"), ("tp2",),
            ("head_scale", "not marked", "the norm that clips is × 0.99", "set_tensor_model_parallel_attributes"),
            id="a weight that is not marked",
        ),
        pytest.param(
            planted.plain_norms, {}, ("tp2", "tp2 sp"), ("tp2 sp",),
            ("input_layernorm.weight", "left in parts on tensor ranks, whose sum is × 1", "sequence_parallel = True"),
            id="a norm that does not know sequence parallelism",
        ),
        pytest.param(
            planted.detached_neighbours, {}, ("cp2", "dp2"), ("cp2",),
            ("linear_qkv.weight", "a collective without its backward"), id="a gather without its backward",
        ),
        pytest.param(
            planted.contiguous_positions, {}, ("cp2", "dp2"), ("cp2",), ("context", "the forward pass differs"),
            id="positions of contiguous rows",
        ),
        pytest.param(
            planted.gathered_logits, {"loss_callback": planted.sums}, ("tp2", "pp2"), ("tp2",),
            ("all ", "log TP", "parallel_output = True"), id="logits that are gathered before the loss",
        ),
        pytest.param(
            provider, {"config": planted.no_context_sum, "loss_callback": planted.sums}, ("cp2", "dp2"), ("cp2",),
            ("all ", "left in parts on context ranks, whose sum is × 1"), id="a missing reduction over context ranks",
        ),
        pytest.param(
            provider, {"loss_callback": planted.local_mean}, ("dp2",), ("mb4",),
            ("all ", "tokens of micro-batch 3 weigh × 2.05", "its own count (1/4", "a local count"),
            id="a local mean in a callback",
        ),
        pytest.param(
            provider, {"forward_step": planted.of_first_context_rank}, ("cp2", "dp2"), ("cp2",),
            ("all ", "other tokens carry loss", "a mask or labels of another rank's part"), id="a mask of another rank",
        ),
        pytest.param(
            planted.dropped_experts, {"config": experts_config}, ("dp2", "dp2 ep2"), ("dp2 ep2",),
            ("experts.local_experts.3.linear_fc1.weight", "gradient × 0", "gradients of experts"),
            id="a dropped gradient of an expert",
        ),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_named(
    model: Callable[..., Any], more: dict[str, Any], layouts: Sequence[str], shown: Sequence[str], says: Sequence[str]
) -> None:
    """It is found on the layouts that show it alone, with its weight, its factor and the nearest known cause."""
    settings = {"config": dense_config, **more}
    report = check_step(model, layouts=[_layout(text) for text in layouts], **settings)
    wrong = {row.layout.name for row in report.rows if report.verdict(row) != "ok"}
    assert {_layout(text).name for text in shown} <= wrong, str(report)
    if shown != ("mb4",):
        assert wrong == {_layout(text).name for text in shown}, str(report)
    for text in says:
        assert text in str(report), f"{text!r} is not in\n{report}"
    with pytest.raises(LawBroken, match="differs from one process"):
        report.raise_if_broken()


def _layout(text: str) -> StepLayout:
    """Read "tp2 sp"; "mb4" is one process with four micro-batches."""
    if text == "mb4":
        return StepLayout()
    sizes = {word[:2]: int(word[2:]) for word in text.split() if word[2:].isdigit()}
    return StepLayout(sp="sp" in text.split(), **sizes)


def test_a_script_of_megatrons_own_is_right_with_per_token_loss_alone() -> None:
    """Its three values are right with calculate_per_token_loss; without, each shard divides by its own tokens."""
    layouts = [StepLayout(cp=2), StepLayout(dp=2, packed=True), StepLayout(cp=2, per_token=False)]
    report = check_step(provider, dense_config, loss_callback=planted.sums, layouts=layouts)
    verdicts = {row.layout.name: report.verdict(row) for row in report.rows}
    assert verdicts == {
        "padded.mb4": "ok", "padded.mb4.mean": "gradient", "cp2.padded.mb4": "ok", "dp2.packed.mb4": "ok",
        "cp2.padded.mb4.mean": "gradient",
    }  # fmt: skip
    first, second = report.findings
    assert first.factor == pytest.approx(41 / 4 / 5) and "#4590" in first.cause
    assert second.factor == pytest.approx(41 / 8 / 2) and "#7513" in second.cause and "context rank" in second.text


@pytest.mark.slow
def test_megatrons_own_loss_of_the_heads_is_found() -> None:
    """Each micro-batch and shard divides it by its own tokens; `forward_backward` divides by the step's."""
    settings = {"layouts": [StepLayout(dp=2, balance=False), StepLayout(cp=2, per_token=False, balance=False)]}
    assert check_step(provider, experts_config, **settings).ok
    report = check_step(provider, experts_config, loss_callback=planted.sums, **settings)
    assert not report.ok and "#7498" in str(report), str(report)


def test_a_rank_that_ends_is_named_and_nothing_hangs() -> None:
    report = check_step(provider, dense_config, forward_step=planted.leaves, layouts=[StepLayout(dp=2)], timeout=60)
    assert not report.ok and "rank 1: SystemExit: 3 on dp2.padded.mb4" in str(report)
    assert report.seconds < 60


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (planted.no_model, dense_config, "the provider returned NoneType; it must return a model"),
        (planted.engine, dense_config, "needs Transformer Engine.*layer_spec"),
        (provider, planted.no_model, "config is|missing 1 required"),
        (provider, planted.heterogeneous, "heterogeneous_block_specs = True describes each layer and cannot shrink"),
    ],
)
def test_bad_input(model: Callable[..., Any], config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step(model, config, layouts=[StepLayout()])


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (StepLayout(vp=2), "vp = 2 needs pp above 1"),
        (StepLayout(sp=True), "sp needs tp above 1"),
        (StepLayout(ep=2), "ep 2 × etp 1 does not divide the 1 ranks"),
        (StepLayout(dp=3), "micro = 4 must be a multiple of dp = 3"),
    ],
)
def test_layouts_that_do_not_divide(layout: StepLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step(provider, dense_config, layouts=[layout])
