"""A user's own scheduled loss is stepped and checkpointed by the trainer, which knows no loss by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel_rl import LossFn, Mean, Metrics, Sum, TokenBatch, register_loss, register_objective
from parallel_rl.experience import register_reward
from parallel_rl.losses import NoConfig
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.metrics import Metric
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.training.config.load import load_config
from parallel_rl.training.data.datasets import find_data
from parallel_rl.training.data.examples import parse_rollout
from parallel_rl.training.data.reading import read_datasets
from tests.training.helpers import DATA, LAYOUTS, assert_near, cut, run, train_rows


@register_loss("doc_warming")
class Warming(LossFn[NoConfig]):
    """NLL whose weight grows by one with each optimizer step."""

    config_class = NoConfig
    steps = 0

    def after_step(self, metrics: Mapping[str, float]) -> None:
        assert metrics["weight"] == self.steps + 1
        self.steps += 1

    def state_dict(self) -> dict[str, float]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.steps = int(state["steps"])

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        weight = self.steps + 1
        loss = batch.weighted_sum(-weight * batch.logprobs, (1 / batch.counts.toks).expand(len(batch.sequence_mask)))
        return loss, Metrics({"loss": Metric("share", loss), "weight": Metric("max", torch.full_like(loss, weight))})


LOSS = "{name: doc_warming}"
RUNS = {
    "rl": (
        "grpo_arithmetic.yaml",
        {"warmup": "null", "data": f"{{rollouts: {DATA / 'arithmetic_rollouts.jsonl'}}}", "reward": "exact_match",
         "rl__steps": 3, "rl__prompts": 4, "rl__group_size": 4, "rl__updates": 2, "rl__loss": LOSS},
        [1.5, 3.5, 5.5],  # the mean over two updates
    ),
    "sft": ("sft_arithmetic.yaml", {"sft__steps": 3, "sft__batch_size": 8, "sft__loss": LOSS}, [1.0, 2.0, 3.0]),
}  # fmt: skip


def train_here(rank: int, arguments: list[str]) -> list[dict[str, float | int | str]]:
    """As a function of this module it has the rank import it, and the loss with it."""
    return train_rows(rank, arguments)


@pytest.mark.parametrize("objective", RUNS)
def test_a_scheduled_loss_moves_and_its_state_goes_on(objective: str, tmp_path: Path) -> None:
    config, options, weights = RUNS[objective]
    small = {"model__hidden": 16, "evaluation": "null", "data__held_out": "null", "parallel": "{}"}
    small |= {"run__checkpoint_every": 1, "run__keep_checkpoints": 5}
    [rows] = run_world(1, train_here, run(config, run__dir=tmp_path / "whole", **small, **options))
    assert [row["weight"] for row in rows] == weights
    cut(tmp_path / "whole", tmp_path / "stopped", 2)
    [later] = run_world(1, train_here, run(config, run__dir=tmp_path / "stopped", **small, **options))
    assert later == rows[2:]


@register_objective("doc_row_weighted", sequence_fields=("row_weight",))
def row_weighted(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Mean]]:
    """NLL times a weight of the row."""
    weight = batch.expand(batch.per_sequence("row_weight"))
    return -weight * logprobs, {"row_weight": Mean(weight)}


@register_objective(
    "doc_bonus",
    token_fields=("bonus",),
    sequence_fields=("row_weight", "row_kind"),
    integer_fields=("row_kind",),
)
def bonus(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Mean]]:
    """NLL times a weight of the token and of rows of kind 1."""
    weight = batch["bonus"] * batch.expand(batch.per_sequence("row_weight") * (batch.per_sequence("row_kind") == 1))
    return -weight * logprobs, {"weight": Mean(weight)}


@register_objective("doc_pair_weighted", level="pair", token_fields=("bonus",), sequence_fields=("row_weight",))
def pair_weighted(sums: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Mean]]:
    """Logistic loss of pairs whose answers have weights."""
    weight = batch.per_sequence("row_weight") * batch.segment_mean(batch["bonus"])
    margin = (weight * sums)[::2] - (weight * sums)[1::2]
    return -torch.nn.functional.logsigmoid(margin), {"weight": Mean(weight[::2] - weight[1::2])}


@register_objective("doc_labelled", token_fields=("bonus",), sequence_fields=("preference_labels", "row_weight"))
def labelled(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Mean]]:
    """NLL times a weight of labelled answers, and of the answer of each mismatched row."""
    weight = batch["bonus"] * batch.expand(batch.per_sequence("row_weight"))
    return -weight * logprobs, {"weight": Mean(weight)}


@register_objective(
    "doc_expert",
    token_fields=("bonus",),
    sequence_fields=("row_weight", "row_kind", "expert_mask"),
    integer_fields=("row_kind", "expert_mask"),
)
def expert(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Mean]]:
    """NLL of demonstrations and samples, the sum of the former's bonus and their tokens."""
    of_experts = batch.expand(batch.per_sequence("expert_mask")).to(logprobs.dtype)
    return -batch["bonus"] * logprobs, {
        "bonus": Sum(batch["bonus"] * of_experts),
        "expert_tokens": Sum(of_experts),
    }


@register_reward("doc_graded")
def graded(prompt: str, completion: str, answer: str, tokens: list[int]) -> dict[str, object]:
    """Return fields of doc_bonus beside the reward, in the types that a checker may have."""
    bonus = 1.0 + torch.arange(len(tokens), dtype=torch.float64)
    return {
        "reward": len(completion) / 4,
        "bonus": bonus,
        "row_weight": int(answer) / 50,
        "row_kind": int(prompt[0]) % 2,
    }


@register_reward("doc_one_bonus")
def one_bonus(prompt: str, completion: str, answer: str) -> dict[str, object]:
    """Return a wrong number of values of the tokens."""
    return {"reward": 1.0, "bonus": [1.0] * 9, "row_weight": 1, "row_kind": 1}


TAKEN = ("kl", "truncated", "others", "tokens", "answer", "label", "servers")
for taken in TAKEN:
    register_objective(f"doc_{taken}", sequence_fields=(taken,))(row_weighted)


@register_loss("doc_predictor")
class AtPredictor(Warming):
    """Reads a field where the token is predicted."""

    requirements = Requirements((Field("bonus", alignment="predictor"),))


def own_run(objective: str, folder: Path, path: Path, **more: object) -> list[str]:
    small = {"model__layers": 1, "model__hidden": 16, "evaluation": "null", "data__held_out": "null"}
    small |= {"run__dtype": "float64", "run__loggers": "[]"}
    if objective == "sft":
        of_loss = {
            "sft__steps": 2,
            "sft__batch_size": 8,
            "sft__loss": "{name: doc_row_weighted}",
            "data__examples": path,
        }
        return run("sft_arithmetic.yaml", run__dir=folder, **{**small, **of_loss, **more})
    if objective in ("pairs", "answers"):
        loss = "doc_pair_weighted" if objective == "pairs" else "doc_labelled"
        of_loss = {
            "warmup": "null",
            "preference": f"{{steps: 2, {objective}: 8, loss: {{name: {loss}}}, optimizer: {{lr: 1.0e-3}}}}",
            "data": f"{{{objective}: {path}}}",
        }
        return run("dpo_arithmetic.yaml", run__dir=folder, **{**small, **of_loss, **more})
    of_loss = {**RUNS["rl"][1], "rl__steps": 2, "rl__loss": "{name: doc_bonus}", "data": f"{{rollouts: {path}}}"}
    if objective == "reward":
        of_loss |= {"data": f"{{train: {path}}}", "reward": "doc_graded", "rl__record": True}
    return run("grpo_arithmetic.yaml", run__dir=folder, **{**small, **of_loss, **more})


def with_own(source: str, path: Path, weight: float | None = None, **change: object) -> list[float]:
    """Write records with fields of the user's own, and return the weight of each."""
    given, weights = (DATA / f"arithmetic_{source}.jsonl").read_text().splitlines()[:32], []
    with path.open("w") as file:
        for number, line in enumerate(given):
            row = json.loads(line)
            own: dict[str, object] = {"row_weight": (number % 3) / 2 if weight is None else weight}
            if source == "rollouts":
                own |= {"bonus": [1.0 + place for place in range(len(row["logprobs"]))], "row_kind": number % 2}
            if source == "pairs":
                own |= {"bonus": {"chosen": 1 + number % 2, "rejected": [0.5]}}
                own |= {"row_weight": [own["row_weight"], 0.25]} if number % 2 else {}
            file.write(json.dumps({**row, **own, **change}) + "\n")
            weights.append((number % 3) / 2 if weight is None else weight)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "source"), [("sft", "train"), ("rl", "rollouts"), ("pairs", "pairs"), ("reward", "train")]
)
def test_fields_of_the_user_s_own_train_alike_on_every_layout(objective: str, source: str, tmp_path: Path) -> None:
    """Of each token and of each sequence, padded and packed, from records and from a reward function."""
    path = tmp_path / "records.jsonl"
    if objective == "reward":
        path.write_text((DATA / "arithmetic_train.jsonl").read_text())
    else:
        with_own(source, path)
    [one] = run_world(1, train_here, own_run(objective, tmp_path / "one", path, parallel="{}", batch__packing="false"))
    world, parallel, packing = LAYOUTS["TP 2 × CP 2 × SP packed"]
    more = {"parallel": parallel, "batch__packing": packing}
    assert_near(run_world(world, train_here, own_run(objective, tmp_path / "many", path, **more))[0], one)
    measured = "row_weight" if objective == "sft" else "weight"
    assert len({row[measured] for row in one} - {0, 1}) == 2
    if objective == "reward":  # recorded samples have the fields, and train alike
        again = own_run("rl", tmp_path / "again", tmp_path / "one" / "rollouts" / "*.jsonl", parallel="{}", rl__steps=1)
        [[replayed]] = run_world(1, train_here, again)
        assert {replayed[name] for name in ("weight", "reward")} == {one[0][name] for name in ("weight", "reward")}


def test_each_answer_of_a_pair_gets_its_values(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with_own("pairs", path, bonus={"chosen": 2, "rejected": [0.5]}, row_weight=1)
    [rows] = run_world(1, train_here, own_run("pairs", tmp_path / "run", path, parallel="{}"))
    assert [row["weight"] for row in rows] == [1.5, 1.5]


def test_values_of_tokens_that_are_cut_are_cut(tmp_path: Path) -> None:
    path, rows = tmp_path / "records.jsonl", []
    for number in range(8):
        row = {"prompt": "1+1=", "answer": "2" * (1 + number), "bonus": 1 + number, "row_weight": 1, "row_kind": 1}
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows))
    more = {"sft__loss": "{name: doc_bonus}", "sft__steps": 1, "data__too_long": "truncate", "data__max_length": 8}
    [[found]] = run_world(1, train_here, own_run("sft", tmp_path / "run", path, parallel="{}", **more))
    tokens = [2, *[3] * 7]
    assert found["weight"] == pytest.approx(sum((1 + n) * count for n, count in enumerate(tokens)) / sum(tokens))


def test_mismatched_rows_take_the_fields_of_their_answers(tmp_path: Path) -> None:
    """Each answer is in two rows, so that the mean over rows is that over answers."""
    path, rows = tmp_path / "answers.jsonl", []
    for number in range(8):
        row = {
            "prompt": "1+1=",
            "answer": "2" * (1 + number),
            "label": number % 2,
            "bonus": 2.0,
            "row_weight": number / 4,
        }
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows))
    [found] = run_world(1, train_here, own_run("answers", tmp_path / "run", path, parallel="{}"))
    tokens = [2 + number for number in range(8)]
    mean = sum(2 * number / 4 * count for number, count in enumerate(tokens)) / sum(tokens)
    assert [row["weight"] for row in found] == pytest.approx([mean, mean], rel=1e-12)


def test_a_reward_whose_fields_are_wrong_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    more = {"parallel": "{tensor: 2}", "reward": "doc_one_bonus"}
    with pytest.raises(
        WorldError, match=r"reward 'doc_one_bonus' of sample 0: 'bonus' has 9 values for \d tokens"
    ) as caught:
        run_world(2, train_here, own_run("reward", tmp_path / "run", DATA / "arithmetic_train.jsonl", **more))
    assert len(caught.value.errors) == 2


def test_a_mask_of_the_user_s_own_chooses_answers_of_a_component(tmp_path: Path) -> None:
    """Tokens whose mask is 0 count for the other component alone."""
    path, rows = tmp_path / "records.jsonl", []
    for number in range(8):
        rows.append({"prompt": "1+1=", "answer": "2" * (1 + number), "kept": number % 2 == 0, "hard": int(number > 3)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = "{kept: {loss: {name: nll}, mask: kept}, hard: {loss: {name: nll}, rows: not hard}}"
    loss = f"{{name: components, options: {{components: {parts}}}}}"
    more = {"sft__loss": loss, "sft__steps": 1, "parallel": "{}"}
    [[row]] = run_world(1, train_here, own_run("sft", tmp_path / "run", path, **more))
    assert row["kept/num_unmasked_tokens"] == 2 + 4 + 6 + 8 and row["hard/num_unmasked_tokens"] == 2 + 3 + 4 + 5
    path.write_text(json.dumps({**rows[0], "kept": 0.5}) + "\n")
    given = own_run("sft", tmp_path / "other", path, **more)
    config = load_config(given[0], given[1:])
    with pytest.raises(ValueError, match=r"line 1: 'kept' = .* is not valid; a mask is 0 or 1"):
        read_datasets(config, config.tokenizer.build(), find_data(config.data))


def test_demonstrations_beside_samples_have_the_fields(tmp_path: Path) -> None:
    """A loss reads them of both: of records and of a reward function."""
    path = tmp_path / "records.jsonl"
    row = {"prompt": "1+1=", "answer": "2", "bonus": 3.0, "row_weight": 1.0, "row_kind": 1}
    path.write_text((json.dumps(row) + "\n") * 8)
    data = f"{{train: {DATA / 'arithmetic_train.jsonl'}, examples: {path}}}"
    more = {"data": data, "rl__loss": "{name: doc_expert}", "rl__experts": 4, "rl__steps": 1, "parallel": "{}"}
    [[found]] = run_world(1, train_here, own_run("reward", tmp_path / "run", path, **more))
    assert found["bonus"] == 3 * float(found["expert_tokens"]) > 0


def test_the_loss_gets_the_values_of_the_records(tmp_path: Path) -> None:
    """Twice the weight is twice the loss, beside the columns of another framework's form, too."""
    path, first = tmp_path / "records.jsonl", []
    for weight in (1.0, 2.0):
        with_own("train", path, weight)
        if weight == 2:
            path.write_text(path.read_text().replace('"answer"', '"completion"'))
        [rows] = run_world(1, train_here, own_run("sft", tmp_path / str(weight), path, parallel="{}", sft__steps=1))
        first.append(float(rows[0]["loss"]))
        assert rows[0]["row_weight"] == weight
    assert first[1] == pytest.approx(2 * first[0], rel=1e-12) and first[0] > 0


def test_labels_and_masks_may_be_true_and_false() -> None:
    """Integers and floats may not, as they may not elsewhere."""
    row = {"tokens": [1, 4, 5], "logprobs": [-1.0, -1.0], "group": 0, "reward": 1.0, "good": True, "kept": [False, 1]}
    fields = Field("good", per="sequence", dtype="label"), Field("kept", dtype="mask")
    assert parse_rollout(row, 9, fields).user_values == (1, (0, 1))
    with pytest.raises(ValueError, match=r"kept\[0\] = False is not valid"):
        parse_rollout(row, 9, (fields[0], Field("kept")))


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("train", {"row_weight": "high"}, "line 1: row_weight = 'high' is not valid; a number that is finite"),
        ("train", {"row_weights": 1.0}, "line 1: unknown field 'row_weights'"),
        ("rollouts", {"bonus": [1.0] * 99}, "'bonus' has 99 values for . 'logprobs'; one for each"),
        ("rollouts", {"row_kind": 0.5}, "row_kind = 0.5 is not valid; an integer of 64 bits is needed"),
        (
            "pairs",
            {"bonus": [1.0, 2.0, 3.0]},
            r"line 1: 'bonus' = .* is not valid; \{chosen: ..., rejected: ...\}, a list",
        ),
        (
            "pairs",
            {"bonus": {"chosen": 1}},
            r"line 1: 'bonus' = .* is not valid; \{chosen: ..., rejected: ...\}, a list",
        ),
        (
            "pairs",
            {"bonus": [[1, 2], 1]},
            "'bonus' has 2 values for 1 learned answers; a number for all or one for each",
        ),
        ("pairs", {"row_weight": {"chosen": 1, "rejected": "x"}}, "line 1: row_weight = 'x' is not valid; a number"),
    ],
)
def test_values_that_do_not_do(source: str, change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with_own(source, path, **change)
    given = own_run({"train": "sft", "rollouts": "rl"}.get(source, source), tmp_path / "run", path)
    config = load_config(given[0], given[1:])
    with pytest.raises(ValueError, match=message):
        read_datasets(config, config.tokenizer.build(), find_data(config.data))


def test_where_a_field_of_one_s_own_has_no_place(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with_own("train", path)
    given = own_run("sft", tmp_path, DATA / "arithmetic_train.jsonl")
    config = load_config(given[0], given[1:])
    with pytest.raises(ValueError, match="the field 'row_weight' is missing; the loss declares it"):
        read_datasets(config, config.tokenizer.build(), find_data(config.data))
    for more, message in (
        ({"sft__loss": "{name: policy}"}, "reads 'advantages', which this section does not have"),
        ({"sft__loss": "{name: doc_predictor}"}, "declares the field 'bonus' with alignment 'predictor'"),
        *(({"sft__loss": f"{{name: doc_{name}}}"}, f"declares the field '{name}', a name that") for name in TAKEN),
    ):
        given = own_run("sft", tmp_path, path, **more)
        with pytest.raises(ValueError, match=message):
            load_config(given[0], given[1:])
    sampled = own_run("reward", tmp_path, path, reward="{a: doc_graded, b: exact_match}")
    with pytest.raises(
        ValueError, match=r"reads 'bonus', which reward = 'exact_match' does not return; name one that returns"
    ):
        load_config(sampled[0], sampled[1:])
