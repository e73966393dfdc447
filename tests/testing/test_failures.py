"""Losses that raise, die or hang end in a report, in time, and no rank stays behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_rl.testing import Limits, check_law, hugging_face, law_test, slime, verl
from parallel_rl.testing.report import LawBroken
from tests.testing import broken_losses
from tests.testing.planted import LocalTokens, Planted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (broken_losses.Raises, "KeyError"),
        pytest.param(broken_losses.RaisesOnOneRank, "only rank 1 is wrong", marks=pytest.mark.slow),
        (broken_losses.Dies, "exit code 7"),
        # by whom depends on which of its ranks is first at the end of its time
        pytest.param(broken_losses.Hangs, "gave no answer|did not come out of the loss", marks=pytest.mark.slow),
    ],
)
def test_what_goes_wrong_is_reported_in_time(loss: type, said: str) -> None:
    start = time.monotonic()
    report = check_law(loss, worlds=(1, 2), limits=Limits(timeout=15))
    assert time.monotonic() - start < 110 and not report.ok  # 120 without `limits`
    assert re.search(said, str(report))


def test_the_ranks_are_well_after_that() -> None:
    assert check_law(Planted, worlds=(2,)).ok


SCRIPT = """
import torch
from parallel_rl import register_objective
from parallel_rl.testing import check_law

@register_objective("mine", token_fields=("advantages",))
def Mine(logprobs, batch):
    return -batch["advantages"] * logprobs

def local(logits, data, seqs, toks, rank=None, tensor=None, context=None):
    picked = logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]) != 0
    return -torch.where(mask, picked, 0).sum() / mask.sum()

print("right:", check_law(Mine).ok)
from parallel_rl.testing import FunctionLoss
print("wrong:", check_law(FunctionLoss(local, axes=frozenset({"data", "micro-batches"})), worlds=(1, 2)))
import multiprocessing
print("children:", len(multiprocessing.active_children()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("from_file", [True, False], ids=["script without a guard", "notebook"])
def test_losses_of_a_script_and_of_a_notebook_reach_the_ranks(tmp_path: Path, from_file: bool) -> None:
    """A notebook's `__main__` has no file: nothing can be imported from it, so its ranks are forked."""
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = [str(tmp_path / "script.py")] if from_file else ["-"]
    done = subprocess.run(
        [sys.executable, *arguments], input=None if from_file else SCRIPT, text=True, capture_output=True, timeout=180,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "right: True" in done.stdout and "children: 0" in done.stdout
    assert "wrong: local breaks the law" in done.stdout


@law_test(worlds=(1, 2))
def test_a_line_makes_a_test() -> type:
    return Planted


def test_that_test_fails_with_the_diagnosis() -> None:
    with pytest.raises(LawBroken, match="local denominator"):
        law_test(worlds=(1,))(lambda: LocalTokens)()


@pytest.mark.slow
def test_the_plugin_has_a_fixture(tmp_path: Path) -> None:
    text = "from tests.testing.planted import LocalTokens, Planted\n\ndef test_right(law):\n    law(Planted, worlds=(1,))\n"
    (tmp_path / "test_user.py").write_text(text + "\ndef test_wrong(law):\n    law(LocalTokens, worlds=(1,))\n")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "parallel_rl.testing.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run([*run, str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=180)
    assert "1 failed, 1 passed" in done.stdout and "LawBroken: LocalTokens breaks the law" in done.stdout


def test_nothing_but_the_plugin_imports_pytest() -> None:
    """By name: a user's machine may lack it."""
    package = ROOT / "parallel_rl"
    importing = re.compile(r"^\s*(import|from) (_?pytest\b|.*\bpytest_plugin\b)", re.MULTILINE)
    found = [path for path in package.rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))]
    assert found == [package / "testing" / "pytest_plugin.py"]


def verl_policy(old, new, advantages, mask, mode, config):  # type: ignore[no-untyped-def]
    """In verl's manner, by its global counts."""
    ratio = (new - old).exp()
    loss = -(advantages * ratio * mask).sum() / config.global_batch_info["batch_num_tokens"]
    return loss, 0.0, 0.0, 0.0


def verl_local(old, new, advantages, mask, mode, config):  # type: ignore[no-untyped-def]
    return -(advantages * (new - old).exp() * mask).sum() / mask.sum().clamp(min=1), 0.0


def trainer_loss(outputs, labels, num_items_in_batch=None):  # type: ignore[no-untyped-def]
    """As the Trainer's own, by sum and count."""
    import torch

    z, y = outputs.logits[:, :-1], labels[:, 1:]
    z = torch.where((y >= 0)[..., None], z, 0).to(torch.promote_types(z.dtype, torch.float32))
    total = torch.nn.functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum")
    return total / num_items_in_batch


def _of_slime(batch, logits):  # type: ignore[no-untyped-def]
    """Per-token terms of all rows in a row."""
    import torch

    picked = [
        z.log_softmax(-1)[-1 - n : -1].gather(-1, y[-n:, None])[:, 0]
        for z, y, n in zip(
            logits[0].split(batch["total_lengths"]), batch["unconcat_tokens"], batch["response_lengths"], strict=True
        )
    ]
    ratio = (torch.cat(picked) - torch.cat(batch["log_probs"])).exp()
    return -ratio * torch.cat(batch["advantages"])


def slime_loss(args, batch, logits, sum_of_sample_mean):  # type: ignore[no-untyped-def]
    loss = sum_of_sample_mean(_of_slime(batch, logits))
    return loss, {"pg_loss": loss.detach()}


def slime_local(args, batch, logits, sum_of_sample_mean):  # type: ignore[no-untyped-def]
    """A mean over the micro-batch's tokens, which slime's later division does not fix."""
    import torch

    mask = torch.cat(batch["loss_masks"])
    return (_of_slime(batch, logits) * mask).sum() / mask.sum().clamp(min=1), {}


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_in_the_manner_of_slime(per_token: bool) -> None:
    """slime gives no counts: who divides by what the micro-batch holds is found, who uses its reducer is right."""
    import torch

    from parallel_rl.testing.batches import carries_loss, make_batch
    from parallel_rl.testing.cases import alone

    fields, args = ("advantages", "prev_logprobs"), SimpleNamespace(calculate_per_token_loss=per_token)
    subject = slime(slime_loss, args, fields)
    assert check_law(subject, worlds=(1,)).ok
    assert not check_law(slime(slime_local, args, fields), worlds=(1,)).ok
    batch = make_batch(5, False, "nll", torch.float64)
    mask = carries_loss(batch.data, subject.build())[:, :-1]
    picked = batch.logits[:, :-1].log_softmax(-1).gather(-1, batch.data["input_ids"][:, 1:, None])[..., 0]
    terms = -(picked - batch.data["prev_logprobs"][:, 1:]).exp() * batch.data["advantages"][:, 1:] * mask
    sums, counts = terms.sum(1), mask.sum(1)
    rows = (batch.data["sample_mask"] != 0).sum()
    want = sums.sum() / counts.sum() if per_token else (sums / counts.clamp(min=1)).sum() / rows
    loss, _ = alone(subject, batch.logits, batch.data)
    torch.testing.assert_close(loss, want)


def test_losses_in_the_manner_of_other_frameworks() -> None:
    assert check_law(verl(verl_policy), worlds=(1, 2)).ok
    report = check_law(verl(verl_local), worlds=(1, 2))
    assert [one.fault.name for one in report.findings] == ["local denominator"]
    report = check_law(hugging_face(trainer_loss), worlds=(1, 2))
    assert report.ok, report
