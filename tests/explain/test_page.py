"""The page: its figures against plain numpy, its words, its size, two steps side by side; and the command."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel_rl import ClippedPGLossFn, NLLLoss, PolicyLossFn
from parallel_rl.cli import main
from parallel_rl.explain import Step, StepInfo
from parallel_rl.explain.measures import reasons
from parallel_rl.explain.page import page
from tests.explain.steps import Tables, dumped, of_loss, policy_batch

PPO = {"surrogate": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2}, "kl": {"coefficient": 0.1}}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    logits, data = policy_batch(rows=12, width=40)
    return dumped(tmp_path_factory.mktemp("step"), PolicyLossFn(PPO), logits, data, StepInfo("a step", str))


@pytest.fixture(scope="module")
def text(step: Step) -> str:
    """Its page with every sample."""
    return page([step], most_samples=10**6)


def test_the_figures_are_those_of_the_data(text: str) -> None:
    """Every table of numbers against numpy on the batch and plain log-softmax, not on the dump."""
    logits, data = policy_batch(rows=12, width=40)
    d = {name: x.numpy().astype(np.float64) for name, x in data.items()}
    z = logits.numpy()
    z = z - z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    logp = np.take_along_axis(log_p[:, :-1], data["input_ids"].numpy()[:, 1:, None], -1)[..., 0]
    entropy = -(np.exp(log_p) * log_p).sum(-1)[:, :-1]
    valid = (d["token_mask"] * d["sample_mask"][:, None])[:, 1:] > 0
    prev, generation, reference, advantages = (
        d[name][:, 1:] for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages")
    )
    found = Tables(text).found
    ratio = np.exp(logp - prev)[valid]
    table = found["The importance ratio"]
    assert table["largest"] == [pytest.approx(ratio.max())] and table["smallest"] == [pytest.approx(ratio.min())]
    assert table["1 %"] == [pytest.approx(np.quantile(ratio, 0.01))]
    assert table["effective sample size, tokens"] == [pytest.approx(ratio.sum() ** 2 / (ratio**2).sum())]
    bins = found["ρ: tokens in each bin that is not empty"]
    assert sum(x for row in bins.values() for x in row if x) == valid.sum()
    for sign, there in (("A > 0", advantages > 0), ("A < 0", advantages < 0), ("A = 0", advantages == 0)):
        rho = np.exp(logp - prev)[valid & there]
        low, high = rho < 0.8, rho > 1.2
        held = {"A > 0": high, "A < 0": low, "A = 0": low & False}[sign]
        wanted = [len(rho), low.mean(), high.mean(), held.mean()]
        assert found["Share of the tokens by the sign of the advantage"][sign] == pytest.approx(wanted)
    a = (prev - generation)[valid]
    table = found["Trainer against sampler"]
    assert table["effective sample size, tokens"] == [pytest.approx(np.exp(a).sum() ** 2 / np.exp(2 * a).sum())]
    rows = np.where(valid, prev - generation, 0).sum(1)[valid.any(1)]
    assert table["effective sample size, sequences"] == [
        pytest.approx(np.exp(rows).sum() ** 2 / np.exp(2 * rows).sum())
    ]
    assert table["sampling_logp_difference"] == [pytest.approx(np.abs(a).mean())]
    assert table["gen_kl_error"] == [pytest.approx((np.exp(a) - 1 - a).mean())]
    place = np.where(valid, valid.cumsum(1), 0)
    table = found["Means by position"]
    delta = reference - logp
    for first, row in table.items():
        low, _, high = first.partition("–")
        there = (place >= int(low)) & (place <= int(high or low))
        wanted = [
            there.sum(),
            entropy[there].mean(),
            (np.exp(delta) - 1 - delta)[there].mean(),
            (prev - logp)[there].mean(),
        ]
        assert row == pytest.approx(wanted), first
    masks, lengths = found["Who masked which token"], d["lengths"]
    inside = np.arange(40) < lengths[:, None]
    assert sum(row[0] for row in masks.values()) == lengths.sum()
    assert masks["the first token, which nothing predicts"][0] == 12
    assert masks["token_mask 0, before the response: the prompt"][0] == 3 * 12
    assert (
        masks["sample_mask 0: the whole sample is left out"][:1] == [lengths[2] - 4] and inside.sum() == lengths.sum()
    )
    bites = ((np.exp(logp - prev) > 1.2) & (advantages > 0)) | ((np.exp(logp - prev) < 0.8) & (advantages < 0))
    assert masks["held back by the clip"][0] == (bites & valid).sum()
    assert masks["held back by the clip"][3] > 0  # the KL still pulls
    parts, n = found["Parts of the loss"], valid.sum()
    surrogate = np.maximum(-advantages * np.exp(logp - prev), -advantages * np.clip(np.exp(logp - prev), 0.8, 1.2))
    assert parts["policy_loss"][0] == pytest.approx(surrogate[valid].sum() / n)
    assert parts["kl_penalty"][0] == pytest.approx(0.1 * (np.exp(delta) - 1 - delta)[valid].sum() / n)
    assert parts["policy_loss"][0] + parts["kl_penalty"][0] == pytest.approx(parts["the loss"][0])
    pull = np.abs(np.where(bites, 0, -advantages * np.exp(logp - prev)))[valid].sum() / n
    assert parts["policy_loss"][1] == pytest.approx(pull)


def test_a_chart_without_a_bar_says_none(tmp_path: Path) -> None:
    """On policy nothing is clipped; the axes stood empty."""
    logits, data = policy_batch(rows=4, width=12)
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    data["prev_logprobs"] = torch.nn.functional.pad(logp, (1, 0))
    text = page([dumped(tmp_path, PolicyLossFn(PPO), logits, data, StepInfo("a step", str))])
    assert "Here: none; every ratio lies inside of its range." in text
    assert "Chart: What the clip does" not in text and "Chart: Who masked which token" in text


def test_the_colours_are_of_the_gradient(step: Step, text: str) -> None:
    gradient, scored = step.tokens["gradient"], step.scored
    order = np.argsort([-np.abs(gradient[step.row == row]).sum() for row in range(12)], kind="stable")
    marks = re.findall(r'<span class="t ([a-z])\d?"', text.partition('class="sample"')[2])
    wanted = ["m" if not s else "z" if g == 0 else "p" if g > 0 else "n" for g, s in zip(gradient, scored, strict=True)]
    assert sorted(marks) == sorted(wanted) and len(order) == 12
    [first] = re.findall(r'id="s0-data">(.*?)</script>', text)
    shown = json.loads(first)
    column = shown["head"].index("∂L/∂log π")
    of_row = gradient[step.row == 0]
    for place, row in enumerate(shown["numbers"]):
        assert (row[column] is None) == (not scored[step.row == 0][place])
        assert row[column] is None or row[column] == pytest.approx(of_row[place], rel=1e-3)


def test_a_step_that_is_not_finite_shows_where(tmp_path: Path) -> None:
    """The step that one most wants to see; numbers that are none must not end in the page's data or break a chart."""
    logits, data = policy_batch()
    logits[1, 6] = torch.nan
    text = page([dumped(tmp_path, PolicyLossFn(PPO), logits, data)], most_samples=10**6)
    [row] = [part for part in text.split('class="sample"') if '<span class="t x">' in part and "Sample 101" in part]
    assert row.count('class="t x"') == 1 and not re.search(r"[:,\[](NaN|-?Infinity)", row)


def test_text_of_samples_is_text(tmp_path: Path) -> None:
    """Whatever a sample, a title or an option holds: none of it is markup or ends a script."""
    texts = ["<script>alert(1)</script>", "</script><b>", "&amp;", "<!--", "\"'", "\n", " ", "", "\u2028", "𝛑", "ok"]
    logits, data = policy_batch()
    info = StepInfo("<img src=x onerror=alert(1)>", text_of_token=texts.__getitem__)
    text = page([dumped(tmp_path, ClippedPGLossFn(), logits, data, info)], most_samples=10**6)
    assert "<script>alert" not in text and "<img" not in text and "<b>" not in text and "<!--" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "⟨7⟩" in text
    assert text.count("<script") == text.count("</script>") == 6 + 1  # data of each sample, and the page's own


def test_nothing_is_loaded(text: str) -> None:
    assert not re.search(
        r"""(?:src|href)\s*=\s*["'](?!#|data:,)|@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(""", text
    )
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "every id once"


@pytest.mark.slow
def test_thirty_two_thousand_tokens_take_five_megabytes(tmp_path: Path) -> None:
    logits, data = policy_batch(rows=32, width=1024, vocab=5)
    data["lengths"][:] = 1024
    data["token_mask"] = (torch.arange(1024) >= 4).double().expand(32, 1024)
    one = dumped(
        tmp_path, PolicyLossFn(PPO), logits, data, StepInfo("long", text_of_token=lambda token: f" word{token}")
    )
    assert int(one.lengths.sum()) == 32 * 1024
    assert len(page([one], most_samples=10**6).encode()) < 5e6
    assert len(page([one]).encode()) < 2e6


@pytest.mark.slow
def test_two_steps_side_by_side(step: Step, tmp_path: Path) -> None:
    logits, data = policy_batch(rows=8, width=24, seed=3)
    other = dumped(tmp_path, ClippedPGLossFn(), logits, data, StepInfo("another"))
    found = Tables(page([step, other])).found
    a, b, difference = found["Facts of the step"]["loss"]
    assert (a, b) == (pytest.approx(step.shares["loss"]), pytest.approx(other.shares["loss"]))
    assert difference == pytest.approx(b - a)
    assert len(found["Share of the tokens by the sign of the advantage"]["A > 0"]) == 8
    bins = found["ρ: tokens in each bin that is not empty"]
    assert [sum(row[side] or 0 for row in bins.values() if row) for side in (0, 1)] == [
        step.scored.sum(),
        other.scored.sum(),
    ]


def test_a_loss_on_a_head_has_its_own_words(tmp_path: Path) -> None:
    text = page([of_loss(tmp_path, "value")])
    assert "∂L/∂output" in text and "Importance ratio" not in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logits, data = policy_batch()
    dumped(tmp_path / "run/dumps/rl_step_000001", ClippedPGLossFn(), logits, data)
    return tmp_path


def test_each_rule_that_rejects_a_token_is_named(tmp_path: Path) -> None:
    """In the table of who masked what a row each, and beside a token all rules that reject it."""
    rules = [{"statistic": "k1", "low": 0.7, "high": 1.4}, {"statistic": "k3", "high": 0.05, "level": "sequence-max"}]
    logits, data = policy_batch()
    loss_fn = PolicyLossFn({"rejection": {"rules": rules}})
    step = dumped(tmp_path, loss_fn, logits, data, StepInfo("rejected", pipeline=2))
    one, other = (
        f"trainer and sampler too far apart by {words}" for words in ("k1 in [0.7, 1.4], token", "k3 at most 0.05,")
    )
    found = {reason.words: reason for reason in reasons(step) if reason.words.startswith("rejected")}
    assert len(found) == 2 and any(one in words for words in found) and any(other in words for words in found)
    distance = (data["prev_logprobs"] - data["generation_logprobs"]).numpy()
    outside = (distance < np.log(0.7)) | (distance > np.log(1.4))
    first = next(reason for words, reason in found.items() if one in words)
    assert first.every.sum() == (outside & (data["token_mask"] * data["sample_mask"][:, None]).bool().numpy()).sum() > 0
    text = page([step])
    assert "by k1 in [0.7, 1.4], token; k3 at most 0.05, sequence-max" in text
    assert "TP 1 × CP 1 × PP 2 × DP 1" in text


def test_the_command_writes_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "page.html"
    assert main(["explain", str(folder / "run"), "--out", str(out), "--samples", "all"]) == 0
    assert f"wrote {out} (0." in capsys.readouterr().out
    assert out.read_text().count('class="sample"') == 6 and [*folder.glob("*.partial")] == []


def broken(folder: Path, how: str) -> list[str]:
    """A fault in the dump, or another argument; returns the arguments."""
    dump = folder / "run/dumps/rl_step_000001"
    piece = dump / "piece_00000_of_00001.npz"
    whole = piece.read_bytes()
    logits, data = policy_batch()
    if how == "cut":
        piece.write_bytes(whole[: len(whole) // 2])
    elif how == "empty":
        piece.write_bytes(b"")
    elif how == "flipped":
        with zipfile.ZipFile(piece) as archive:
            place = archive.getinfo("token/gradient.npy").header_offset + 100
        piece.write_bytes(whole[:place] + bytes(byte ^ 255 for byte in whole[place : place + 8]) + whole[place + 8 :])
    elif how == "other program":
        np.savez(piece, meta=np.frombuffer(b'{"format": "x"}', np.uint8))
    elif how == "pickle":
        np.savez(piece, meta=np.array([{}], dtype=object))
    elif how == "newer":
        _rewrite(piece, lambda arrays, meta: meta.update(version=2))
    elif how == "short array":
        _rewrite(piece, lambda arrays, meta: arrays.update({"token/gradient": arrays["token/gradient"][1:]}))
    elif how == "missing":
        piece.rename(dump / "piece_00001_of_00002.npz")
    elif how == "another step":
        piece.rename(dump / "piece_00000_of_00002.npz")
        dumped(folder / "b", ClippedPGLossFn(), logits * 2, data)
        (folder / "b/piece_00000_of_00001.npz").rename(dump / "piece_00001_of_00002.npz")
    elif how == "two":
        dumped(folder / "run/dumps/rl_step_000002", ClippedPGLossFn(), logits, data)
    elif how == "kinds":
        dumped(folder / "sft", NLLLoss(), logits, {name: x for name, x in data.items() if name != "advantages"})
        return [str(dump), str(folder / "sft")]
    return {
        "nothing": [str(folder / "none")],
        "no dump": [str(folder)],
        "a file": [str(piece)],
        "--out": [str(dump), "--out", "/no/x.html"],
        "--samples": [str(dump), "--samples", "many"],
        "surplus": [str(dump), str(dump), str(dump)],
    }.get(how, [str(folder / "run")])


def _rewrite(piece: Path, change) -> None:  # type: ignore[no-untyped-def]
    with np.load(piece) as archive:
        arrays = dict(archive)
    meta = json.loads(arrays["meta"].tobytes())
    change(arrays, meta)
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(piece, **arrays)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", "is not a whole file of a dumped step"),
        ("empty", "is not a whole file of a dumped step"),
        ("flipped", "is not a whole file of a dumped step"),
        ("other program", "of another program"),
        ("pickle", "is not a whole file of a dumped step"),
        ("newer", "version is 2, this program reads 1"),
        ("short array", "token/gradient has"),
        ("missing", "missing piece_00000_of_00002.npz"),
        ("another step", "is of another step than piece_00000_of_00002.npz: they differ in"),
        ("two", "holds 2 dumped steps; choose one of"),
        ("kinds", "have nothing to lay side by side"),
        ("nothing", "there is no such folder"),
        ("no dump", "holds no dumped step"),
        ("a file", "is a file; give the folder"),
        ("--out", "there is no folder"),
        ("--samples", "--samples many is not valid"),
        ("surplus", "is not an argument"),
    ],
)
def test_bad_input_is_an_error_in_one_line(
    how: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = broken(folder, how)
    assert main(["explain", *arguments, *([] if how == "--out" else ["--out", str(folder / "x.html")])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("parallel-rl: error: ") and said in error and error.count("\n") == 1
    assert not (folder / "x.html").exists()


def test_a_missing_library_names_what_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["explain", str(folder / "run")]) == 2
    assert "needs matplotlib: pip install matplotlib jinja2" in capsys.readouterr().err
