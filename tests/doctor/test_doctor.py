"""The doctor speaks of what is installed here, and finds what is planted."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from parallel_rl.cli import main
from parallel_rl.doctor import Finding, exit_status
from parallel_rl.doctor import faults as doctor_faults
from parallel_rl.doctor import packages as doctor_packages
from parallel_rl.doctor.faults import ask_contracts, ask_faults
from parallel_rl.doctor.packages import apex_kind, ask_ports, packages, settings
from parallel_rl.doctor.world import Sizes, _elsewhere, ask_groups, ask_world
from parallel_rl.testing.pool import run_world
from parallel_rl.testing.whole_step.known_faults import RunFacts, gate_line
from tests.forked import command, run_ranks

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parents[2]


def test_contracts_of_the_installed_megatron() -> None:
    """The known defects of 0.15 to 0.19, from running them; a version that fixes one fails here."""
    found = {each.subject: each for each in ask_contracts()}
    assert found["groups of tensor, context and data ranks"].severity == "ok"
    assert found["loss callback of two values at CP 2, 4 micro-batches"].severity == "ok"
    three = found["loss callback of three values without calculate_per_token_loss at CP 2"]
    assert three.severity == "warning" and "0.500, 0.167" in three.text
    smoothing = found["vocab_parallel_cross_entropy with label smoothing"]
    assert smoothing.severity == "warning" and "differ between tensor ranks" in smoothing.text
    for name in ("in float32", "with a padded vocabulary"):
        assert found[f"vocab_parallel_cross_entropy {name}"].severity == "warning"


#: shown by a small run of each version
_SHOWN = {
    "0.15": {"gathered logits", "loss of multi-token prediction", "attention sinks", "routers' own losses"},
    "0.16": {"gathered logits", "loss of multi-token prediction", "attention sinks", "routers' own losses"},
    "0.19": {"gathered logits", "loss of multi-token prediction", "attention sinks", "padding mask of experts"},
}


@pytest.mark.slow
def test_known_faults_of_the_installed_megatron() -> None:
    """Those that it has are seen in a run, with a number; those that it has not are not claimed."""
    import megatron.core

    expected = _SHOWN.get(megatron.core.__version__[:4])
    if expected is None:
        pytest.skip("no facts of this version")
    found = {each.subject.partition(" (")[0]: each for each in ask_faults()}
    shown = {name for name, each in found.items() if each.severity == "warning"}
    assert shown == expected | {"balance within packed sequences"}, found
    assert found["recomputed heads with distributed activations"].severity == "ok"
    assert "0.69 too large" in found["gathered logits"].text
    assert "not marked as cut" in found["attention sinks"].text
    for each in found.values():
        assert each.severity != "warning" or "parallel_rl: " in each.advice


def test_a_run_reaches_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its config alone; what it reaches and its step avoids is no warning."""
    monkeypatch.setattr(doctor_faults, "_CHECKS", dict.fromkeys(doctor_faults._CHECKS, lambda: "shown"))
    reached = RunFacts(tensor=2, sequence_parallel=True, sinks=True, balanced=True)
    found = {each.subject.partition(" (")[0]: each for each in ask_faults(reached)}
    assert {each.severity for each in found.values()} == {"note"}
    texts = {name: "avoided by its step" in each.text for name, each in found.items()}
    assert {name for name, avoids in texts.items() if avoids} == {"attention sinks", "routers' own losses"}
    assert "reaches 2 (attention sinks, routers' own losses)" in gate_line(reached)
    assert gate_line(RunFacts()).endswith("reaches none")


def test_the_unrelated_apex_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real folder on the path each: PyPI's has none of NVIDIA's parts."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = next(each for each in packages() if each.subject == "apex")
    assert wrong.severity == "error" and "pip uninstall apex" in wrong.advice and exit_status([wrong]) == 1
    (tmp_path / "apex/optimizers").mkdir()
    assert apex_kind(tmp_path / "apex") == "nvidia"
    assert next(each for each in packages() if each.subject == "apex").severity == "ok"


@pytest.mark.parametrize(
    ("version", "severity"), [("0.14.0", "error"), ("0.16.1", "ok"), ("0.19.2", "ok"), ("0.20.0", "warning")]
)
def test_versions_of_megatron(version: str, severity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor_packages._version
    monkeypatch.setattr(doctor_packages, "_version", lambda name: version if name == "megatron-core" else real(name))
    assert next(each for each in packages() if each.subject == "megatron-core").severity == severity


def test_settings_that_hurt() -> None:
    assert [each.severity for each in settings({})] == ["ok"]
    found = list(settings({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_DEBUG": "TRACE"}))
    assert {each.subject for each in found} == {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_DEBUG"}
    assert all(each.severity == "warning" and each.advice for each in found)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and JSON say the same; a config's layers are those that the trainer would build here."""
    monkeypatch.setattr(
        doctor_faults, "_CHECKS", dict.fromkeys(doctor_faults._CHECKS, lambda: "shown")
    )  # run in the slow test
    config = str(ROOT / "configs/grpo_arithmetic.yaml")
    assert main(["doctor", "--config", config, "--json"]) == 0
    found = [Finding(**each) for each in json.loads(capsys.readouterr().out)]
    layers = next(each for each in found if each.subject == "layers and attention")
    assert "SelfAttentionCore: there is no GPU" in layers.text
    assert any(each.subject == "optimizer" and "torch" in each.text for each in found)
    sinks = next(each for each in found if each.subject.startswith("attention sinks"))
    assert sinks.severity == "note" and "not triggered by this run" in sinks.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor", "2"], "have no effect without --world"),
        (["--world"], "RANK and WORLD_SIZE are not set"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--confg", "x"], "'--confg' is not an argument of `parallel-rl doctor`"),
    ],
)
def test_bad_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("parallel_rl.doctor.faults.ask_contracts", list)
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sizes_that_do_not_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, before any waits for another."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for sizes in (Sizes(3), Sizes(-2), Sizes(0), Sizes(16)):
        with pytest.raises(ValueError, match="8 ranks cannot be laid out as tensor"):
            next(ask_world(sizes))


def test_addresses() -> None:
    """A port of ours, listening and closed again: who answers, who is free, who is taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url, job = f"http://127.0.0.1:{port}", {"MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
        assert [one.severity for one in ask_ports([url], {**job, "RANK": "1"})] == ["ok", "ok"]
        [taken] = ask_ports([], job)
        assert taken.severity == "error" and "is taken" in taken.text
    assert [one.severity for one in ask_ports([url], {**job, "RANK": "1"})] == ["error", "warning"]
    assert [one.severity for one in ask_ports([], job)] == ["ok"]
    [unknown] = ask_ports([], {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500"})
    assert unknown.severity == "error" and "has no address" in unknown.text


def _of_its_host(rank: int) -> list[Finding]:
    same, other = Finding("torch", "ok", "2.13.0"), Finding("apex", "error", "the unrelated one", "uninstall it")
    older = Finding("triton", "ok", "3.4.0" if rank else "3.7.1")
    return list(_elsewhere(["a", "b", "b"], [same, older, *([other] if rank else [])]))


def test_what_is_wrong_on_another_host_is_told_on_the_first() -> None:
    """Its rank ended with status 1, and nobody had said why."""
    for found in run_world(3, _of_its_host):
        assert found == [
            Finding(
                "triton", "warning", "3.4.0 on b, and not on a", "hosts of one job need the same stack and settings"
            ),
            Finding("apex", "error", "the unrelated one on b, and not on a", "uninstall it"),
        ]


def _without_contracts(words: list[str]) -> None:
    """Run the command without the contracts, which start a pool of their own; one process does above."""
    doctor_faults.ask_contracts = list
    command(words)


def _groups(rank: int) -> list[Finding]:
    return list(ask_groups(Sizes(tensor=2, pipeline=2), ["a"] * 4, torch.device("cpu"), 60.0))


@pytest.mark.slow
def test_each_group_of_a_layout_is_timed() -> None:
    for found in run_world(4, _groups):
        texts = {each.subject: each.text for each in found}
        assert texts.keys() == {"tensor group", "pipeline group"}
        assert "all-reduce over 2 ranks" in texts["tensor group"]
        assert "neighbours' messages over 2 ranks" in texts["pipeline group"]


@pytest.mark.slow
def test_the_ranks_of_a_job(tmp_path: Path) -> None:
    """One host, two ranks, each group timed; one rank prints the report."""
    done = run_ranks(tmp_path, _without_contracts, ["doctor", "--world", "--json", "--pipeline", "2"])
    assert done.statuses == [0, 0], done.stderr[-2000:]
    found = {each["subject"]: each for each in json.loads(done.stdout)}
    assert "(2 ranks)" in found["hosts"]["text"] and found["clocks"]["severity"] == "ok"
    assert found["rendezvous"]["severity"] == "ok"
    assert "all-reduce over 2 ranks" in found["world"]["text"]
    assert "neighbours' messages over 2 ranks" in found["pipeline group"]["text"]
    assert not {"tensor group", "data group", "context group"} & found.keys()
