"""Dumps: what is in them, that they change nothing, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel_rl import (
    ClippedPGLossFn,
    ComponentsLossFn,
    LMHeadInput,
    PolicyLossFn,
    SequencePackingLossWrapper,
    SimPOLossFn,
    count_valid,
    get_loss,
)
from parallel_rl.explain import DumpError, StepInfo, dump_step, read_step
from parallel_rl.explain.page import page
from parallel_rl.losses import registry
from tests.explain.steps import dumped, of_loss, policy_batch

CLIPPED = {"ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.1}
BUILT_IN = [name for name, loss in registry.losses().items() if loss.__module__.startswith("parallel_rl.")]


# a page of each kind of loss: on tokens, pairs, rows, a head, components
SHOWN = {"policy", "dpo", "distillation", "full_distillation", "value", "prm", "components"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_loss_can_be_dumped(name: str, tmp_path: Path) -> None:
    """Parts add up to the loss for each, whatever it reads; no other test runs a page of a head, of rows or of pairs."""
    options = {
        "policy": {"loss": {"name": "policy"}},
        "observed": {"loss": {"name": "nll"}, "mask": "observation_mask"},
    }
    try:
        step = of_loss(tmp_path, name, {"components": options} if name == "components" else None)
    except ValueError as error:
        assert "teacher" in str(error) or "needs" in str(error), error  # a loss without default options
        return
    parts = [value for key, value in step.shares.items() if key.startswith("part/")]
    assert sum(parts) == pytest.approx(step.shares["loss"], rel=1e-10, abs=1e-14)
    assert step.shares["loss"] == pytest.approx(step.meta["metrics"].get("loss", step.shares["loss"]), rel=1e-10)
    assert step.scored.any()
    assert name not in SHOWN or f">{name}<" in page([step], most_samples=2)


def test_the_gradient_is_that_of_the_step(tmp_path: Path) -> None:
    """∂L/∂log π against the gradient of the logits: ∂L/∂z_y = ∂L/∂l·(1 − p_y) where no entropy is in the loss."""
    logits, data = policy_batch()
    config = {
        "surrogate": {"name": "ppo"},
        "kl": {"coefficient": 0.2},
        "importance": {"mode": "icepop", "low": 0.6, "high": 1.5},
    }
    loss_fn, leaf = PolicyLossFn(config), logits.clone().requires_grad_()
    with dump_step(tmp_path, loss_fn) as recording:
        loss, _ = recording(leaf, data, *count_valid(data))
    loss.backward()
    step = read_step(tmp_path)
    targets = data["input_ids"].roll(-1, 1)[..., None]
    own = leaf.grad.gather(-1, targets)[..., 0] / (1 - logits.softmax(-1).gather(-1, targets)[..., 0])
    wanted = own.roll(1, 1)
    wanted[:, 0] = 0
    keep = torch.arange(logits.shape[1]) < data["lengths"][:, None]
    np.testing.assert_allclose(step.tokens["gradient"], wanted[keep].numpy(), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(
        step.tokens["gradient"],
        step.tokens["gradient/policy_loss"] + step.tokens["gradient/kl_penalty"],
        rtol=1e-9,
        atol=1e-15,
    )
    gone = step.tokens["held/importance_weight_0"] | step.tokens["held/clipped"]
    assert gone.any() and (step.tokens["gradient/policy_loss"][gone] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_recording_loss_gives_the_same_bits(packed: bool, fused: bool, tmp_path: Path) -> None:
    """Loss, gradient and metrics with and without a dump, where the gradient is written over the logits too."""
    logits, data = policy_batch()
    logits, data = logits.float(), {name: x.float() if x.is_floating_point() else x for name, x in data.items()}
    bounds = torch.nn.functional.pad(data["lengths"].cumsum(0), (1, 0))
    keep = torch.arange(logits.shape[1]) < data["lengths"][:, None]
    given = logits[keep][None] if packed else logits
    found = []
    for record in (False, True):
        loss_fn = ClippedPGLossFn(CLIPPED, consume_logits=not fused)
        called = SequencePackingLossWrapper(loss_fn, bounds) if packed else loss_fn
        leaf = given.clone().requires_grad_()
        weight = torch.eye(logits.shape[2], requires_grad=True)
        output = LMHeadInput(leaf, weight, mode="in_forward") if fused else leaf * 1
        if record:
            with dump_step(tmp_path, called) as recording:
                loss, metrics = recording(output, data, *count_valid(data))
        else:
            loss, metrics = called(output, data, *count_valid(data))
        loss.backward()
        found.append((loss.detach(), leaf.grad, weight.grad, dict(metrics)))
    (loss, gradient, weight, metrics), (again, gradient_again, weight_again, metrics_again) = found
    assert torch.equal(loss, again) and torch.equal(gradient, gradient_again)
    assert not fused or torch.equal(weight, weight_again)
    assert metrics.keys() == metrics_again.keys() and all(torch.equal(x, metrics_again[k]) for k, x in metrics.items())
    step = read_step(tmp_path)
    assert step.lengths.tolist() == data["lengths"].tolist()
    assert step.shares["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_any_split_into_micro_batches_gives_one_dump(tmp_path: Path) -> None:
    logits, data = policy_batch()
    loss_fn = ClippedPGLossFn(CLIPPED)
    whole = dumped(tmp_path / "whole", loss_fn, logits, data)
    counts = count_valid(data)
    with dump_step(tmp_path / "parts", loss_fn) as recording:
        for rows in ([4, 1], [5], [0, 2, 3]):
            recording(logits[rows], {name: x[rows] for name, x in data.items()}, *counts)
    parts = read_step(tmp_path / "parts")
    assert parts.shares["loss"] == pytest.approx(whole.shares["loss"], rel=1e-12)
    assert parts.tokens.keys() == whole.tokens.keys()
    for name, x in whole.tokens.items():
        np.testing.assert_allclose(parts.tokens[name], x, rtol=1e-10, atol=1e-15, err_msg=name)


def test_a_component_keeps_its_names_and_coefficient(tmp_path: Path) -> None:
    logits, data = policy_batch()
    data["observation_mask"] = (torch.arange(20) >= 18).expand(6, 20).long()
    observed = {"loss": {"name": "nll"}, "mask": "observation_mask", "coefficient": 0.1}
    policy = {"loss": {"name": "policy", "options": {"kl": {"coefficient": 0.2}}}}
    loss_fn = ComponentsLossFn({"components": {"policy": policy, "observed": observed}})
    with dump_step(tmp_path, loss_fn) as recording:
        recording(logits, data, *count_valid(data), statistics=loss_fn.count(data))
    step = read_step(tmp_path)
    assert {key for key in step.shares if key != "loss"} == {
        "part/policy/policy_loss", "part/policy/kl_penalty", "part/observed/loss"
    }  # fmt: skip
    assert step.shares["part/observed/loss"] == pytest.approx(0.1 * step.meta["metrics"]["observed/loss"], rel=1e-12)
    seen = step.tokens["scored/observed"]
    assert (step.tokens["gradient/observed/loss"][seen] < 0).all() and not step.tokens["gradient/observed/loss"][
        ~seen
    ].any()


def test_a_computation_that_is_not_repeatable_is_refused(tmp_path: Path) -> None:
    """The page would show the gradient of another number than the step's."""
    from parallel_rl import NLLLoss

    class Drifting(NLLLoss):
        calls = 0

        def compute(self, batch):  # type: ignore[no-untyped-def]
            self.calls += 1
            loss, metrics = super().compute(batch)
            return loss * self.calls, metrics

    logits, data = policy_batch()
    with pytest.raises(RuntimeError, match=r"Drifting gave .* not repeatable"):
        dumped(tmp_path, Drifting(), logits, data)


def test_a_folder_that_cannot_be_written_is_an_error_after_the_step(tmp_path: Path) -> None:
    logits, data = policy_batch()
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match=r"could not be dumped to .*file"):
        dumped(tmp_path / "file", get_loss("nll")(), logits, data)


def test_an_earlier_dump_is_replaced_whole(tmp_path: Path) -> None:
    logits, data = policy_batch()
    dumped(tmp_path, get_loss("nll")(), logits, data)
    (tmp_path / "piece_00001_of_00002.npz").write_bytes((tmp_path / "piece_00000_of_00001.npz").read_bytes())
    step = dumped(tmp_path, get_loss("nll")(), logits, data, StepInfo("second"))
    assert step.meta["title"] == "second" and [file.name for file in tmp_path.iterdir()] == ["piece_00000_of_00001.npz"]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    logits, data = policy_batch()
    dumped(tmp_path, get_loss("nll")(), logits, data, StepInfo("x", text_of_token=str))
    with np.load(tmp_path / "piece_00000_of_00001.npz", allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    assert {x.dtype.kind for x in arrays.values()} <= set("biuf")
    meta = json.loads(arrays["meta"].tobytes())
    assert meta["texts"]["3"] == "3" and meta["loss"] == "nll"


def test_a_preference_and_its_nll_are_two_parts(tmp_path: Path) -> None:
    """They were one, "loss", from which nobody sees which of the two pulls at a token."""
    both = {"preference_loss_weight": 0.5, "sft_loss_weight": 0.3}
    for name, options, weights in (
        ("dpo", both, (0.5, 0.3)),
        ("cpo", {"sft_loss_weight": 0.2}, (1, 0.2)),
        ("orpo", None, (1, 1)),
    ):
        step = of_loss(tmp_path / name, name, options)
        for part, weight in zip(("preference_loss", "sft_loss"), weights, strict=True):
            assert step.shares[f"part/{part}"] == pytest.approx(weight * step.meta["metrics"][part], rel=1e-10), name


def test_the_shares_of_empty_answers_are_part_of_the_loss(tmp_path: Path) -> None:
    """A micro-batch of two empty answers is a pair: its share is in the step's loss, and in the parts."""
    loss_fn = SimPOLossFn()
    ids = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 2, 0], [1, 2, 0]])
    mask = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
    data = {"input_ids": ids, "token_mask": mask, "sample_mask": torch.ones(4)}
    logits = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    counts = count_valid(data)
    whole = float(loss_fn(logits, data, *counts)[0])
    with dump_step(tmp_path, loss_fn) as recording:
        for rows in (slice(0, 2), slice(2, 4)):
            recording(logits[rows], {name: field[rows] for name, field in data.items()}, *counts)
    step = read_step(tmp_path)
    assert step.shares["loss"] == pytest.approx(whole, rel=1e-6)
    assert step.meta["metrics"]["loss"] == pytest.approx(whole, rel=1e-6)


def test_tokens_of_a_component_behind_the_last_one_of_token_mask_are_kept(tmp_path: Path) -> None:
    components = {"observed": {"loss": {"name": "nll"}, "mask": "observation_mask"}}
    loss_fn = ComponentsLossFn({"components": components})
    data = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "token_mask": torch.tensor([[0, 1, 0, 0]])}
    data |= {"sample_mask": torch.ones(1), "observation_mask": torch.tensor([[0, 0, 0, 1]])}
    with dump_step(tmp_path, loss_fn) as recording:
        recording(torch.zeros(1, 4, 6), data, *count_valid(data), statistics=loss_fn.count(data))
    step = read_step(tmp_path)
    assert step.lengths.tolist() == [4]
    assert step.tokens["scored"].tolist() == [False, False, False, True]
