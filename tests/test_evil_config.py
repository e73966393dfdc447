"""A stranger's config executes nothing: no name in it is imported, by any command that reads one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_rl.cli import main
from parallel_rl.config.names import ENVIRONMENT
from tests.training.helpers import CONFIGS

GRPO, DPO, SFT = (str(CONFIGS / f"{name}_arithmetic.yaml") for name in ("grpo", "dpo", "sft"))
EVIL = """from pathlib import Path

import parallel_rl
from parallel_rl.experience import register_reward

Path(__file__).with_suffix(".ran").touch()


@register_reward("evil_reward")
def evil_reward(prompt, completion, answer):
    return 0.0


@parallel_rl.register_objective("evil_loss", token_fields=("advantages",))
def evil_loss(logprobs, batch):
    return -logprobs
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is there once the module evil.py, beside the config and on the path, was imported."""
    from parallel_rl.experience import rewards
    from parallel_rl.losses import registry

    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    yield tmp_path / "evil.ran"
    sys.modules.pop("evil", None)
    rewards._CHECKERS.pop("evil_reward", None)
    registry._LOSSES.pop("evil_loss", None)


COMPONENTS = "{name: components, options: {components: {a: {loss: {name: 'evil:evil_loss'}, fields: {x: advantages}}}}}"
NAMES = [
    (GRPO, "--reward=evil:evil_reward"),
    (GRPO, "--reward=os:system"),
    (GRPO, "--reward={gsm8k: 'evil:evil_reward'}"),
    (GRPO, "--rl.loss={name: 'evil:evil_loss'}"),
    (GRPO, f"--rl.loss={COMPONENTS}"),
    (GRPO, "--rl.advantages={name: 'evil:Evil'}"),
    (GRPO, "--rl.critic={optimizer: {lr: 1e-3}, loss: {name: 'evil:evil_loss'}}"),
    (GRPO, "--run.loggers=['evil:Evil']"),
    (DPO, "--preference.loss={name: 'evil:evil_loss'}"),
    (SFT, "--sft.loss={name: 'evil:evil_loss'}"),
]


@pytest.mark.parametrize(
    "command", [["check", "--world=1"], ["data", "--steps=1"], ["train"], ["submit", "--nodes=1", "--dry-run"]]
)
@pytest.mark.parametrize(("config", "name"), NAMES)
def test_a_name_with_a_module_is_refused_and_never_imported(
    command: list[str], config: str, name: str, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([*command, config, "--parallel={}", f"--run.dir={ran.parent / 'run'}", name])
    if command[0] != "data" or "--reward" not in name:  # which `data` does not ask
        said = capsys.readouterr().err
        assert status == 2 and ("a config imports nothing" in said or "is not valid" in said), said
    assert not ran.exists() and not (ran.parent / "run").exists()


def test_an_evil_yaml_and_jsonl_run_no_program(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `reward: os:system` the prompt was a command: one YAML, one JSONL line, and no Python of the attacker's."""
    (ran.parent / "prompts.jsonl").write_text(json.dumps({"prompt": f"touch {ran}", "answer": "1"}) + "\n")
    overrides = [f"--data.train={ran.parent / 'prompts.jsonl'}", "--reward=os:system", "--parallel={}", "--warmup=null"]
    assert main(["train", GRPO, *overrides, f"--run.dir={ran.parent / 'run'}"]) == 2
    assert 'register it by @register_reward("system") and pass --import os' in capsys.readouterr().err
    assert not ran.exists()


@pytest.mark.parametrize(
    ("given", "override", "name"),
    [
        ("--import", "--reward=evil_reward", "evil_reward"),
        ("environment", "--rl.loss={name: evil_loss, options: {beta: 1}}", "evil_loss"),
        ("--import", f"--rl.loss={COMPONENTS.replace('evil:', '')}", "evil_loss"),
        ("environment", "--rl.critic={optimizer: {lr: 1e-3}, loss: {name: evil_loss}}", "evil_loss"),
        ("--import", "--run.loggers=[evil_logger]", "evil_logger"),
    ],
)
def test_check_and_submit_do_not_import_and_say_what_they_did_not_look_at(
    given: str, override: str, name: str, ran: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login node runs nothing of the user's; the job gets what the command line and the environment name."""
    words = ["--import=evil"] if given == "--import" else []
    if not words:
        monkeypatch.setenv(ENVIRONMENT, "evil")
    line = f"{name!r}, which evil is to register when the ranks import it"
    overrides = ["--parallel={}", f"--run.dir={ran.parent / 'run'}", override]
    overrides += ["--rl.advantages=gae"] if "critic" in override else []
    assert main(["check", "--world=1", GRPO, *words, *overrides]) == 0
    assert line in capsys.readouterr().out
    submit = ["submit", GRPO, "--nodes=1", "--gpus-per-node=1", "--dry-run", *words, *overrides]
    assert main(submit) == 0
    said = capsys.readouterr().out
    assert line in said and "--import evil" in said
    assert not ran.exists()
    assert main(["check", "--world=1", GRPO, *words, *overrides, "--rl.stepz=3"]) == 2  # the rest is looked at
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert main(["check", "--world=1", GRPO, *overrides]) == 2  # nobody will know the name
    assert "is not valid" in capsys.readouterr().err and not ran.exists()


@pytest.mark.parametrize("name", ["evil_loss", COMPONENTS.replace("evil:", "")[len("{name: ") : -1]])
@pytest.mark.parametrize("source", ["examples", "solutions", "rollouts", "pairs"])
def test_records_with_fields_of_a_loss_that_the_ranks_import_are_not_parsed(
    source: str, name: str, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their fields are not known on a login node; other records are parsed as ever."""
    record, held_out = ran.parent / f"{source}.jsonl", ran.parent / "held_out.jsonl"
    record.write_text(json.dumps({"prompt": "1+1=", "answer": "2", "row_weight": 0.5}) + "\n")
    held_out.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    config, section = {"rollouts": (GRPO, "rl"), "pairs": (DPO, "preference")}.get(source, (SFT, "sft"))
    words = ["check", "--world=1", config, "--import=evil", "--parallel={}", f"--run.dir={ran.parent / 'run'}"]
    words += [f"--data={{{source}: {record}, held_out: {held_out}}}", f"--{section}.loss={{name: {name}}}"]
    words += ["--warmup=null"] if section != "sft" else []
    assert main(words) == 0
    assert f"not checked: the records of data.{source}, whose fields" in capsys.readouterr().out
    held_out.write_text(json.dumps({"prompt": "1+1=", "reply": "2"}) + "\n")
    assert main(words) == 2 and "unknown field 'reply'" in capsys.readouterr().err
    assert not ran.exists()


def test_a_module_that_the_user_names_is_imported(
    ran: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "evil")
    names = ["--reward=evil_reward", "--rl.loss={name: evil_loss}", "--rl.steps=1", "--parallel={}"]
    assert main(["data", GRPO, "--steps=1", *names]) == 0
    assert ran.exists()
    monkeypatch.setenv(ENVIRONMENT, "evil;touch x")
    assert main(["data", GRPO, *names]) == 2
    assert "is not a module's name" in capsys.readouterr().err


def test_secrets_of_addresses_reach_nothing_that_is_written(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """config.yaml, command.sh and what a terminal shows: a user, a password and a query are in none."""
    url = "http://me:hunter2@judge:8000/score?token=hunter3"
    for words in (
        [f"--reward={url}"],
        [f"--reward={{url: '{url}'}}"],
        [f"--reward={{a: '{url}'}}"],
        [f"--reward=['{url}']"],
        [f"--reward={{url: '{url}', timeoutt: 3}}"],
        [f"--reward={{url: 'http://judge', timeout: '{url}'}}"],
        [f"--rl.server={{url: '{url}', model: m}}"],
        [f"--rl.server={{url: ['{url}'], model: m}}"],
        [f"--rl.server={{urll: '{url}', model: m}}"],
        [f"--rl.server.url.x={url}", f"--rl.server={url}"],
        [f"--rl.serverr={url}"],
        [f"--reward=[{url}"],
        [f"stray-{url}"],
    ):
        for command in (["check", "--world=1"], ["submit", "--nodes=1", "--gpus-per-node=1"]):
            assert main([*command, GRPO, "--parallel={}", f"--run.dir={ran.parent / 'run'}", *words]) == 2
            said = "".join(capsys.readouterr())
            assert "hunter" not in said and "me:" not in said, (words, said)
    assert not (ran.parent / "run").exists()


def test_a_reward_server_and_its_options_go_through_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key's variable is in config.yaml, the key is not; what was written is read again."""
    import yaml

    from parallel_rl.training.config.load import as_mapping, load_config

    monkeypatch.setenv("JUDGE_KEY", "sk-1234567890")
    server = "{url: 'http://judge:8000/score', timeout: 5, retries: 7, api_key_env: JUDGE_KEY, headers: {X-Team: blue}}"
    for reward in (server, f"{{a: {server}, b: math_is_not_asked}}"):
        config = load_config(GRPO, [f"--reward={reward}", f"--run.dir={tmp_path}"])
        text = yaml.safe_dump(as_mapping(config))
        assert "JUDGE_KEY" in text and "sk-1234567890" not in text + repr(config)
        (tmp_path / "config.yaml").write_text(text)
        assert load_config(str(tmp_path / "config.yaml")) == config
    found = config.rewards["a"]
    assert not isinstance(found, str) and (found.timeout, found.retries, found.headers) == (5, 7, {"X-Team": "blue"})
