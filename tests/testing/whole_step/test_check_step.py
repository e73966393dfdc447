"""One optimizer step of a user's model on every layout: right models pass, planted faults are found and named."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from parallel_rl.testing import LawBroken, StepLayout, check_step
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.testing.whole_step.layouts import default_layouts

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron", "parallel_rl.testing.whole_step.worlds")

from tests.testing.whole_step import broken, planted  # noqa: E402  after the preload
from tests.testing.whole_step.models import dense_config, experts_config, provider  # noqa: E402


def test_a_right_model_passes() -> None:
    """The same on two layouts, one of them with virtual stages; on ten in the slow test."""
    layouts = [StepLayout(tp=2, sp=True, packed=True), StepLayout(pp=2, vp=2)]
    report = check_step(provider, dense_config, layouts=layouts)
    assert report.ok and not any(row.error for row in report.rows), str(report)


def test_a_model_that_refuses_float64_has_a_measured_bound() -> None:
    """The bound is a multiple of the rounding beside a run in float64 of all other modules."""
    layouts = [StepLayout(tp=2), StepLayout(cp=2, packed=True), StepLayout(pp=2)]
    report = check_step(planted.single_precision, dense_config, layouts=layouts)
    assert report.ok and not any(row.error for row in report.rows), str(report)
    [note] = [note for note in report.notes if "float64 fails" in note]
    assert "keeps SingleScale in float32" in note and 1e-6 < report.bound < 5e-4, str(report)


def test_noise_in_float32_is_no_rounding() -> None:
    """Two runs of one process differ by more than any rounding, so the bound stays and the model is called random."""
    report = check_step(planted.random_single_precision, dense_config, layouts=[StepLayout(tp=2)])
    assert not report.ok and report.bound == 2e-3, str(report)
    assert any("is not measured: one process in float32 is" in note for note in report.notes), str(report)


@pytest.mark.slow
def test_a_right_dense_model_passes_on_ten_layouts() -> None:
    """Padded, packed, every parallel axis, recomputation, both settings of calculate_per_token_loss."""
    report = check_step(provider, dense_config)
    assert report.ok and len(report.rows) == 10 and not any(row.error for row in report.rows), str(report)
    assert "bf16 = True is turned off" in report.notes
    for row in report.rows:
        assert row.gradient < 1e-12 and row.loss < 1e-12 and row.weights < 1e-6, row.layout.name


def _threads(rank: int) -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.slow
def test_a_right_mixture_of_experts_with_heads_passes() -> None:
    """On each layout of experts, with virtual stages, and with both settings of calculate_per_token_loss."""
    layouts = default_layouts(experts=True, balanced=True)
    assert len(layouts) == 14 and all(layout.ep == 2 for layout in layouts[10:])
    report = check_step(provider, experts_config, layouts=[*layouts[:2], layouts[8], *layouts[10:]])
    assert report.ok and len(report.rows) == 7 and not any(row.error for row in report.rows), str(report)
    assert max(run_world(4, _threads)) < 100, "the ranks keep the groups of models with experts, whose threads poll"


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
            id="a norm that does not know sequence parallelism", marks=pytest.mark.slow,
        ),
        pytest.param(
            planted.detached_neighbours, {}, ("cp2", "dp2"), ("cp2",),
            ("linear_qkv.weight", "a collective without its backward"), marks=pytest.mark.slow,
            id="a gather without its backward",
        ),
        pytest.param(
            planted.contiguous_positions, {}, ("cp2", "dp2"), ("cp2",), ("context", "the forward pass differs"),
            id="positions of contiguous rows", marks=pytest.mark.slow,
        ),
        pytest.param(
            planted.gathered_logits, {"loss_callback": planted.sums}, ("tp2", "pp2"), ("tp2",),
            ("all ", "log TP", "parallel_output = True"), id="logits that are gathered before the loss",
        ),
        pytest.param(
            provider, {"config": planted.no_context_sum, "loss_callback": planted.sums}, ("cp2", "dp2"), ("cp2",),
            ("all ", "left in parts on context ranks, whose sum is × 1"), marks=pytest.mark.slow,
            id="a missing reduction over context ranks",
        ),
        pytest.param(
            provider, {"loss_callback": planted.local_mean}, ("dp2",), ("mb4",),
            ("all ", "tokens of micro-batch 3 weigh × 2.05", "their own count (1/4", "a local count"),
            id="a local mean in a callback",
        ),
        pytest.param(
            provider, {"forward_step": planted.of_first_context_rank}, ("cp2", "dp2"), ("cp2",),
            ("all ", "other tokens carry loss", "a mask or labels of another rank's part"), id="a mask of another rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            planted.dropped_experts, {"config": experts_config}, ("dp2", "dp2 ep2"), ("dp2 ep2",),
            ("experts.local_experts.3.linear_fc1.weight", "gradient × 0", "gradients of experts"),
            id="a dropped gradient of an expert", marks=pytest.mark.slow,
        ),
        pytest.param(
            provider, {"loss_callback": planted.times_tensor_ranks}, ("cp2", "tp2"), ("tp2",),
            ("all ", "gradient × 2", "the whole loss is counted once for each of 2 tensor ranks"),
            id="a loss that is multiplied by the tensor ranks", marks=pytest.mark.slow,
        ),
        pytest.param(
            provider, {"loss_callback": planted.third_twice}, ("dp2",), ("mb4",),
            ("all ", "tokens of micro-batch 2 weigh × 2", "this part of the step is added 2 times"),
            id="a micro-batch that counts twice",
        ),
        pytest.param(
            planted.weight_twice, {}, ("cp2",), ("cp2",),
            ("linear_fc2.weight: the ", "tokens of micro-batch 2 weigh × 2", "this part of the step is added 2 times"),
            id="a weight that counts twice in a micro-batch", marks=pytest.mark.slow,
        ),
        pytest.param(
            planted.lost_biases, {"config": planted.biased_config}, ("tp2", "dp2"), ("tp2",),
            ("linear_proj.bias", "× 1 on tensor rank 0, × 0 on tensor rank 1", "lost on some of the ranks"),
            id="a bias whose gradient is lost on a rank", marks=pytest.mark.slow,
        ),
        pytest.param(
            planted.recomputed_otherwise, {}, ("mb4 recompute", "tp2"), ("mb4 recompute",),
            ("all ", "recompute", "the forward pass differs under recomputation"),
            id="a branch on the gradient mode", marks=pytest.mark.slow,
        ),
        pytest.param(
            planted.routers_times_ranks, {"config": experts_config}, ("dp2", "dp2 ep2"), ("dp2 ep2",),
            ("router.weight", "gradient × 2", "counted once for each of 2 expert ranks"),
            id="routers that count each expert rank", marks=pytest.mark.slow,
        ),
        pytest.param(
            planted.dropout, {}, ("mb4", "tp2"), ("mb4", "tp2"),
            ("one process: another seed changes the gradients", "mlp.noise (p = 0.1)", "by dropout or noise"),
            id="a dropout",
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
    causes = [finding.cause for finding in report.findings]
    assert len({*causes}) == len(causes), f"a cause has several findings\n{report}"
    with pytest.raises(LawBroken, match="differs from one process"):
        report.raise_if_broken()


def _layout(text: str) -> StepLayout:
    """Read "tp2 sp"; "mb4" is one process with four micro-batches."""
    if text == "mb4":
        return StepLayout()
    sizes = {word[:2]: int(word[2:]) for word in text.split() if word[2:].isdigit()}
    sizes.pop("mb", None)
    return StepLayout(sp="sp" in text.split(), recompute="recompute" in text.split(), **sizes)


@pytest.mark.slow
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
    layouts = [StepLayout(cp=2, per_token=False, balance=False)]
    report = check_step(provider, experts_config, loss_callback=planted.sums, layouts=layouts)
    assert not report.ok and "#7498" in str(report), str(report)


@pytest.mark.parametrize(
    ("model", "script", "message"),
    [
        pytest.param(
            provider,
            broken.leaves,
            r"rank 1: SystemExit: 3 at .*broken.py:\d+ \(leaves\) on dp2",
            marks=pytest.mark.slow,
        ),
        (
            broken.raises_on_one,
            None,
            r"every rank: rank 1: the provider .*broken:raises_on_one \(.*KeyError: 'hidden' at",
        ),
        (provider, broken.raises_on_all, r"every rank: this text supports nothing at .*\(raises_on_all\) on dp2"),
    ],
)
def test_a_rank_that_fails_is_named_and_nothing_hangs(model: Any, script: Any, message: str) -> None:
    """Also if it fails alike on all ranks, while other layouts are right."""
    report = check_step(model, dense_config, forward_step=script, layouts=[StepLayout(), StepLayout(dp=2)], timeout=300)
    assert not report.ok and [report.verdict(row) for row in report.rows][-2:] == ["ok", "error"], str(report)
    assert re.search(message, str(report)), str(report)  # after the timeout it would be another


def test_a_layout_that_is_refused_by_name_is_not_run() -> None:
    """Sizes that do not divide, attention that takes no context ranks or packed rows, a provider of whole models."""
    refused = [StepLayout(pp=2), StepLayout(tp=4), StepLayout(cp=2), StepLayout(packed=True)]
    report = check_step(broken.megatrons_layers, dense_config, layouts=refused)
    assert report.ok and [report.verdict(row) for row in report.rows] == ["ok", *["not run"] * 3], str(report)
    for text in ("num_query_groups = 2 at test size is not divisible by 4", "Context parallelism", "packed rows on"):
        assert text in str(report), str(report)
    report = check_step(broken.without_stages, dense_config, layouts=[StepLayout(), StepLayout(pp=2)])
    assert report.ok and "without_stages" in str(report) and "takes no pre_process" in str(report), str(report)


@pytest.mark.slow
def test_frozen_weights_and_buffers_are_those_of_one_process() -> None:
    layouts = [StepLayout(tp=2, sp=True, packed=True), StepLayout(pp=2), StepLayout(cp=2), StepLayout(recompute=True)]
    report = check_step(planted.half_frozen, dense_config, layouts=layouts)
    assert [report.verdict(row) for row in report.rows] == ["ok"] * 4, str(report)
    script = planted.forward_step
    report = check_step(planted.half_frozen, dense_config, forward_step=script, layouts=[StepLayout(recompute=True)])
    [finding] = report.findings
    assert finding.factor == 0 and "behind a frozen embedding" in finding.cause  # Megatron's own fault
    report = check_step(planted.frozen_under_tensor_ranks, dense_config, layouts=[StepLayout(tp=2)])
    [finding] = report.findings
    assert finding.weights == ("decoder.layers.0.mlp.linear_fc1.weight",) and "frozen on this layout" in finding.text


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (broken.no_model, dense_config, r"no_model \(.*broken.py:\d+\) returned NoneType; it must return a GPTModel"),
        (broken.two_models, dense_config, r"returned a list of 2 \(GPTModel, GPTModel\); it must return a GPTModel"),
        (broken.linear, dense_config, "returned Linear, which has no config, .*; it must return a GPTModel"),
        (
            broken.breaks,
            dense_config,
            r"broken:breaks \(.*\) raises KeyError: 'hidden' at .*broken.py:\d+ \(breaks\)",
        ),
        (broken.engine, dense_config, "needs Transformer Engine.*layer_spec"),
        (provider, broken.no_model, "config is|missing 1 required"),
        (provider, broken.heterogeneous, "heterogeneous_block_specs = True describes each layer and cannot shrink"),
    ],
)
def test_bad_input(model: Callable[..., Any], config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step(model, config, layouts=[StepLayout()])


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            broken.returns_none,
            r"broken:returns_none \(.*broken.py:\d+\) returned NoneType; .* takes \(loss, log\) or",
        ),
        (broken.returns_four, r"returns_four .* returned a tuple of 4 \(Tensor, Tensor, dict, int\)"),
        (broken.detaches, r"detaches .* returned a loss without a gradient; do not detach it"),
        pytest.param(broken.loops, r"no answer in 10 s, at .*broken.py:\d+ \(loops\)", marks=pytest.mark.slow),
    ],
)
def test_a_callback_that_gives_no_loss(callback: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step(
            provider,
            dense_config,
            loss_callback=callback,
            layouts=[StepLayout()],
            timeout=10 if callback is broken.loops else 60,
        )


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


def test_a_config_that_provides_its_model() -> None:
    """Megatron-Bridge's providers are configs with `provide()`."""
    report = check_step(planted.bridge_provider(), layouts=[StepLayout(tp=2, sp=True), StepLayout(pp=2)])
    assert report.ok and not any(row.error for row in report.rows), str(report)
    assert report.name == "BridgeProvider"
