"""Rollouts: the same tokens on every layout, and log-probs that the training forward agrees with."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_rl.testing.pool import run_world
from parallel_rl.vocab.shards import Truncation
from tests.training.helpers import LAYOUTS, run

PROMPTS = [[1, 4, 5, 13, 6, 14], [1, 8, 13, 8, 14], [1, 4, 13, 5, 3, 14], [1, 3, 14], [1, 9, 9, 13, 3, 3, 14]]


def _engine(arguments: list[str]):  # type: ignore[no-untyped-def]
    from parallel_rl.training.config.load import load_config
    from parallel_rl.training.models.engine import build_engine, start_world

    warnings.simplefilter("ignore")
    config = load_config(arguments[0], arguments[1:])
    start_world(config)
    return build_engine(config, config.tokenizer.build().vocabulary, 64)


def draw(rank: int, arguments: list[str], seed: int) -> tuple[torch.Tensor, ...]:
    from parallel_rl.training.rollouts.sampler import sample

    engine = _engine(arguments)
    before = engine.bare.config.sequence_parallel, engine.bare.config.context_parallel_size
    samples = sample(engine, PROMPTS, [3, 9, 11, 12, 700], seed, engine.config.sampling)
    assert (engine.bare.config.sequence_parallel, engine.bare.config.context_parallel_size) == before
    assert samples.generation_logprobs is not None
    prompt_lengths = samples.lengths - samples.response_lengths
    return samples.input_ids, samples.generation_logprobs, prompt_lengths, samples.lengths


def draw_to_any_end(rank: int, arguments: list[str], seed: int, ends: set[int]) -> list[list[int]]:
    """The completions with these end tokens in place of the tokenizer's, rows filled with token 9."""
    from parallel_rl.training.rollouts.sampler import sample

    engine = _engine(arguments)
    engine = replace(engine, vocabulary=replace(engine.vocabulary, ends=frozenset(ends), pad=9))
    samples = sample(engine, PROMPTS, [3, 9, 11, 12, 700], seed, engine.config.sampling)
    assert bool((samples.input_ids[~samples.attention_mask] == 9).all())
    return samples.responses()


def draw_greedily(rank: int, arguments: list[str]) -> torch.Tensor:
    from parallel_rl.training.rollouts.sampler import sample

    engine = _engine(arguments)
    return sample(engine, PROMPTS, [3, 9, 11, 12, 700], 5, engine.config.sampling, greedy=True).input_ids


def recompute(rank: int, arguments: list[str], seed: int) -> tuple[torch.Tensor, ...]:
    """Log-probs of the training forward and of the sampler on the same rows, and of the whole distribution there."""
    from parallel_rl.experience import padded_samples
    from parallel_rl.training.batching.micro_batches import in_order, micro_batches, width_unit
    from parallel_rl.training.models.scoring import token_scores_of
    from parallel_rl.training.rollouts.sampler import sample

    engine = _engine(arguments)
    config, sizes = engine.config, engine.config.parallel
    samples = sample(engine, PROMPTS, [3, 9, 11, 12, 700], seed, config.sampling)
    rows = padded_samples(PROMPTS, samples.responses())
    unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
    batches = micro_batches(rows, in_order(len(rows), 2), packing=config.batch.packing, unit=unit, device=engine.device)
    width = rows.input_ids.shape[1]

    def scored(*rule: Truncation) -> torch.Tensor:
        found = [x[0] for x in token_scores_of(engine, engine.model, batches, config.sampling.temperature, *rule)]
        return torch.cat([torch.nn.functional.pad(part, (0, width))[:, :width] for part in found])

    mask = rows.token_mask
    trained, whole = (torch.where(mask, x, 0) for x in (scored(config.sampling.truncation), scored()))
    return trained, samples.generation_logprobs[:, :width], whole


def _arguments(folder: Path, layout: str, **sampling: float) -> tuple[int, list[str]]:
    world, parallel, packing = LAYOUTS[layout]
    arguments = run(
        "grpo_arithmetic.yaml",
        run={"dir": str(folder), "dtype": "float64"},
        parallel=parallel,
        model={"layers": 2, "hidden": 32, "heads": 4, "init_std": 0.3, "vocab_multiple": 4},
        batch__packing=packing,
        sampling={"max_new_tokens": 6, "temperature": 0.7, **sampling},
    )
    return world, arguments


@pytest.mark.parametrize("layout", ["TP 2 × CP 2 × SP packed", "PP 2"])
def test_any_layout_draws_the_same_tokens(layout: str, tmp_path: Path) -> None:
    one, arguments = _arguments(tmp_path, "one process")
    [expected] = run_world(one, draw, arguments, 5)
    world, arguments = _arguments(tmp_path, layout)
    for tokens, logprobs, prompts, lengths in run_world(world, draw, arguments, 5):
        assert (
            torch.equal(tokens, expected[0]) and torch.equal(prompts, expected[2]) and torch.equal(lengths, expected[3])
        )
        torch.testing.assert_close(logprobs, expected[1], rtol=1e-10, atol=1e-12)
    completions = expected[0][:, 3:]
    assert (
        len(completions.unique()) > 4 and len(expected[3].unique()) > 1
    )  # drawn, not a constant; rows end on their own
    assert int(expected[0].max()) < 15  # never a padding column of the vocabulary


def test_a_row_ends_with_the_first_of_any_end_token(tmp_path: Path) -> None:
    """With more end tokens a row is what it was, up to the first of them: the draws are keyed by position."""
    _, arguments = _arguments(tmp_path, "one process")
    [none], [both] = (run_world(1, draw_to_any_end, arguments, 5, ends) for ends in (set(), {4, 12, 14}))
    assert {len(row) for row in none} == {6} and len({row[-1] for row in both} & {4, 12, 14}) >= 2
    for row, whole in zip(both, none, strict=True):
        cut = next((place for place, token in enumerate(whole) if token in (4, 12, 14)), 5)
        assert row == whole[: cut + 1]


def test_another_seed_draws_other_tokens(tmp_path: Path) -> None:
    _, arguments = _arguments(tmp_path, "one process")
    [first], [again], [other] = (run_world(1, draw, arguments, seed) for seed in (5, 5, 6))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    "layout", ["one process", pytest.param("TP 2 × CP 2 × SP packed", marks=pytest.mark.slow), "PP 2"]
)
def test_generation_logprobs_are_the_training_forwards(layout: str, tmp_path: Path) -> None:
    world, arguments = _arguments(tmp_path, layout)
    for trained, sampled, whole in run_world(world, recompute, arguments, 5):
        assert (sampled < 0).sum() >= 10 and torch.equal(trained, whole)
        torch.testing.assert_close(trained, sampled, rtol=1e-9, atol=1e-11)


RULES = {"top_k": {"top_k": 4}, "top_p": {"top_p": 0.6}, "both": {"top_k": 6, "top_p": 0.7}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        ("both", "TP 2 × CP 2 × SP packed"),
        ("top_k", "one process"),
        ("top_p", "TP 2"),
    ],
)
def test_truncated_logprobs_are_the_training_forwards(rule: str, layout: str, tmp_path: Path) -> None:
    world, arguments = _arguments(tmp_path, layout, **RULES[rule])
    for trained, sampled, whole in run_world(world, recompute, arguments, 5):
        torch.testing.assert_close(trained, sampled, rtol=1e-9, atol=1e-11)  # what was drawn is kept: no -inf
        drawn = whole < 0
        assert drawn.sum() >= 10
        assert (
            bool((trained >= whole).all()) and (trained - whole)[drawn].mean() > 0.02
        )  # -log of the mass that is kept


@pytest.mark.parametrize("layout", ["one process", pytest.param("TP 2", marks=pytest.mark.slow)])
def test_the_likeliest_token_is_drawn_under_any_rule(layout: str, tmp_path: Path) -> None:
    """top_k = 1 draws what the greedy evaluation takes, which no rule changes."""
    one, plain = _arguments(tmp_path, "one process")
    [expected] = run_world(one, draw_greedily, plain)
    for rule in ({"top_k": 1}, {"top_p": 1e-9}):
        world, arguments = _arguments(tmp_path, layout, **rule)
        for greedy, drawn in zip(
            run_world(world, draw_greedily, arguments), run_world(world, draw, arguments, 5), strict=True
        ):
            assert torch.equal(greedy, expected) and torch.equal(drawn[0], expected)
            assert not drawn[1].any()  # log 1
