"""Configs: what ships loads, overrides reach their key, and whatever does not fit is named."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from parallel_rl.cli import main
from parallel_rl.config.strict import configure
from parallel_rl.config.yaml_files import override
from parallel_rl.training.config.load import as_mapping, load_config
from parallel_rl.training.config.sections import ParallelConfig, data_parallel_size
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.models.learner import learning_rate
from tests.training.helpers import CONFIGS, DATA, run


def load(config: str = "grpo_arithmetic.yaml", **overrides: object):  # type: ignore[no-untyped-def]
    path, *arguments = run(config, **overrides)
    return load_config(path, arguments)


def test_the_paths_of_overrides_start_at_the_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Written out whole: config.yaml in the folder of the run, from which an export reads them, has another beginning."""
    monkeypatch.chdir(tmp_path)
    tree: dict[str, object] = {"model": {"hf": "/elsewhere"}}
    override(
        tree,
        ["--model.hf=m", "--tokenizer", "{hf: ../t}", "--data.train", "[a.jsonl, /b]", "--data.columns.prompt", "q"],
    )
    assert tree["model"] == {"hf": f"{tmp_path}/m"} and tree["tokenizer"] == {"hf": f"{tmp_path.parent}/t"}
    assert tree["data"] == {"train": [f"{tmp_path}/a.jsonl", "/b"], "columns": {"prompt": "q"}}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_what_ships_loads_and_says_what_it_is(path: Path) -> None:
    config = load_config(str(path))
    assert path.read_text().startswith("# ") and f"train configs/{path.name}" in path.read_text()
    for name in ("train", "held_out", "examples", "pairs"):
        file = getattr(config.data, name)
        assert file is None or Path(file).is_file()
    # what a run writes down can be read again
    written = yaml.safe_load(yaml.safe_dump(as_mapping(config)))
    assert configure(TrainConfig, written) == config


def test_overrides() -> None:
    config = load(
        rl__optimizer__lr="1e-4", parallel="{tensor: 4}", evaluation="null", data__held_out="null", run__dir="a b"
    )
    assert config.rl.optimizer.lr == 1e-4 and config.rl.optimizer.warmup_steps > 0
    assert config.parallel == ParallelConfig(tensor=4)
    assert config.evaluation is None and config.run.dir == "a b"
    path = str(CONFIGS / "grpo_arithmetic.yaml")
    assert load_config(path, ["--run.seed", "7", "--batch.packing", "false"]).run.seed == 7
    elsewhere = str(Path.cwd() / "elsewhere.jsonl")  # from the working folder
    assert load_config(path, ["--data.train=elsewhere.jsonl"]).data.train == elsewhere
    assert load_config(path).data.train == str(DATA / "arithmetic_train.jsonl")  # from the config's folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rl__group_sise": 4}, r"unknown key rl.group_sise = 4 in RLConfig; did you mean 'group_size'\?"),
        ({"rl__loss__options__ratio_clip_mix": 0.1}, "rl.loss: unknown key options.ratio_clip_mix"),
        ({"rl__loss__options__ratio_clip_c": 0.5}, "rl.loss: options: ratio_clip_c = 0.5 must exceed 1"),
        ({"rl__steps": "many"}, "rl.steps = 'many' is not valid; a value of type int"),
        ({"rl__steps": 0}, "rl: steps = 0 must be at least 1"),
        ({"evaluation": "{samples: 1, passing: 0.5}"}, "evaluation: passing = 0.5 has no effect with samples = 1"),
        (
            {"run__dtype": "float16"},
            "run.dtype = 'float16' is not valid; choose one of 'float64', 'float32', 'bfloat16'",
        ),
        ({"model__hidden": 30}, "model: hidden = 30 is not divisible by heads = 4"),
        ({"model__dropout": 0.1}, "unknown key model.dropout = 0.1"),
        ({"parallel": "{sequence_parallel: true}"}, "sequence_parallel = True has no effect with tensor = 1"),
        ({"parallel__tensor": 3}, "model.heads = 4 is not divisible by parallel.tensor = 3"),
        ({"parallel__pipeline": 4}, "model.layers = 2 is not divisible by parallel.pipeline = 4"),
        ({"parallel__tensor": 0}, "parallel: tensor = 0 must be at least 1"),
        ({"objective": "rl"}, "unknown key objective = 'rl' in TrainConfig; valid: .*, preference, .*, rl, .*, sft"),
        ({"rl": "null"}, "exactly one of the sections rl, preference, sft, distillation is needed; none is given"),
        (
            {"sft": "{steps: 1, batch_size: 1, optimizer: {lr: 1}}"},
            "exactly one of the sections rl, preference, sft, distillation is needed; rl and sft are given",
        ),
        ({"data__pairs": "x"}, "data.pairs = '.*x' would not be read"),
        ({"data__examples": "null"}, "data.examples is missing; the supervised phase needs it"),
        ({"data__train": "null"}, "data.train is missing"),
        ({"data__rollouts": "x"}, "data.train = .* would not be read"),
        ({"rl__updates": 3}, "rl: prompts = 64 is not divisible by updates = 3"),
        (
            {"rl__loss__options__use_kl_in_reward": "true"},
            "loss.name = 'clipped_pg' with these options expects the KL in the reward",
        ),
        ({"rl__optimizer__lr": 0}, "rl.optimizer: lr = 0.0 must be a finite number above 0"),
        (
            {"rl__optimizer": "{lr: 1, final_fraction: 0.1}"},
            "final_fraction = 0.1 has no effect with schedule = 'constant'",
        ),
        ({"rl__optimizer__betas": "[0.9]"}, "betas = .* two numbers"),
        ({"sampling__temperature": 0}, "sampling: temperature = 0.0 must be a finite number above 0"),
        ({"sampling__temperature": ".inf"}, "sampling: temperature = inf must be a finite number above 0"),
        ({"sampling__temperature": ".nan"}, "sampling: temperature = nan must be a finite number above 0"),
        ({"sampling__top_k": 0}, "sampling: top_k = 0 must be an integer >= 1; None keeps all"),
        ({"sampling__top_k": "true"}, "sampling.top_k = True is not valid; a value of type int is needed"),
        ({"sampling__top_k": 2.5}, "sampling.top_k = 2.5 is not valid; a value of type int is needed"),
        ({"sampling__top_p": 0}, r"sampling: top_p = 0.0 must lie in \(0, 1\]"),
        ({"sampling__top_p": 1.01}, r"sampling: top_p = 1.01 must lie in \(0, 1\]"),
        ({"sampling__top_p": ".nan"}, r"sampling: top_p = nan must lie in \(0, 1\]"),
        ({"sampling__top_p": "true"}, "sampling.top_p = True is not valid"),
        ({"model__hidden__size": 4}, "--model.hidden.size: model.hidden = 64 is a value, not a section"),
    ],
)
def test_what_does_not_fit_is_named(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run.seed"], "the override --run.seed has no value"),
        (["--run.seed", "--run.dir", "x"], "the override --run.seed has no value"),
        (["run.seed", "3"], "'run.seed' is not an override"),
        (["--run.seed", "[1"], "is not valid YAML"),
    ],
)
def test_malformed_overrides(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(str(CONFIGS / "sft_arithmetic.yaml"), arguments)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 01", 1),
        (" ab ", " ab "),
        ("#abc", "#abc"),
        ("a #b", "a #b"),
        ("'#a' ", "#a"),
        ("null", None),
        ("", None),
        ("1e-4", "1e-4"),
    ],
)
def test_an_override_keeps_blanks_and_hashes(text: str, value: object) -> None:
    tree: dict[str, object] = {}
    override(tree, ["--tokenizer.alphabet", text])
    assert tree == {"tokenizer": {"alphabet": value}}


def test_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.yaml does not exist"):
        load_config(str(tmp_path / "nowhere.yaml"))
    file = tmp_path / "config.yaml"
    for text, message in (
        ("a: [", "is not valid YAML"),
        ("- 1", "a mapping of sections is needed"),
        ("a: 1", "unknown key a = 1"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_config(str(file))


def test_the_world_must_match() -> None:
    assert data_parallel_size(ParallelConfig(tensor=2, context=2), 4) == 1
    assert data_parallel_size(ParallelConfig(tensor=2, data=3), 6) == 3
    with pytest.raises(
        ValueError, match=r"the world has 6 ranks; parallel.tensor 2 × context 2 × pipeline 1 needs 4 or a multiple"
    ):
        data_parallel_size(ParallelConfig(tensor=2, context=2), 6)
    with pytest.raises(ValueError, match=r"the world has 4 ranks; .* × data 1 needs exactly 2"):
        data_parallel_size(ParallelConfig(tensor=2, data=1), 4)


def test_learning_rate() -> None:
    config = load(rl__optimizer="{lr: 2.0, warmup_steps: 4, schedule: cosine, final_fraction: 0.5}").rl.optimizer
    rates = [learning_rate(config, step, 14) for step in range(14)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0
    assert rates[9] == pytest.approx(1.5) and all(a > b for a, b in pairwise(rates[4:])) and rates[13] > 1.0


def test_demonstrations_of_the_file_are_left_out_where_an_override_ends_the_warm_up() -> None:
    """`--warmup null` was refused for data.examples, which the file had set; a phase that reads them keeps them."""
    path, said = str(CONFIGS / "grpo_arithmetic.yaml"), list[str]()
    assert load_config(path, ["--warmup=null"], said.append).data.examples is None
    [line] = said
    assert line.startswith("data.examples = ") and line.endswith(" of grpo_arithmetic.yaml is not read: warmup = None")
    with pytest.raises(ValueError, match=r"data.examples = '.*mine.jsonl' would not be read; only a supervised phase"):
        load_config(path, ["--warmup=null", "--data.examples=mine.jsonl"], said.append)
    mixed = ["--warmup=null", "--rl.experts=4", "--rl.loss={name: mix}"]
    assert load_config(path, mixed, said.append).data.examples is not None and len(said) == 1


def test_held_out_prompts_of_the_file_are_left_out_where_an_override_ends_the_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a recipe's own base sets is not its user's mistake; what a user sets is."""
    assert main(["check", "--recipe", "grpo", "--world", "1", "--evaluation", "null"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("data.held_out = ") and first.endswith(" is not read: evaluation = None")
    assert second.startswith("ok: rl, 1 ranks")
    path = str(CONFIGS / "grpo_arithmetic.yaml")
    said: list[str] = []
    assert load_config(path, ["--evaluation=null"], said.append).data.held_out is None and len(said) == 1
    with pytest.raises(
        ValueError, match=r"data.held_out = '.*mine.jsonl' would not be read; only the section 'evaluation'"
    ):
        load_config(path, ["--evaluation=null", "--data.held_out=mine.jsonl"], said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, r"the section 'rl' with parallel.expert = 2 would use the trainer's own sampler"),
        (
            {"rl__server": "{url: 'http://x', model: m}"},
            r"the section 'evaluation' with parallel.expert = 2 would use",
        ),
        (
            {"batch": "{tokens: 64, packing: true}"},
            r"batch.tokens = 64 with parallel.expert = 2 may give data ranks different",
        ),
    ],
)
def test_experts_are_not_spread_over_ranks_that_would_wait_for_each_other(
    change: dict[str, object], words: str
) -> None:
    """Data ranks that ask experts together hung where one of them ended first."""
    experts = {"model__experts": "{number: 4, ffn_hidden: 16}", "parallel": "{expert: 2}", **change}
    given = run("grpo_arithmetic.yaml", **experts)
    with pytest.raises(ValueError, match=words):
        load_config(given[0], given[1:])
