"""The trainer's option `model.fused_head`: which configs it goes with, and how many rows it is told to project."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from parallel_rl.testing.pool import run_world
from parallel_rl.training.config.load import load_config
from tests.training.helpers import CONFIGS, LAYOUTS, run

LENGTHS = [(3, 5), (6, 1), (1, 9), (4, 2), (2, 7)]  # of prompts and completions
MASKED = 2  # a row that carries no loss


def count_rows(rank: int, arguments: list[str]) -> list[tuple[list[list[int]], list[int], str]]:
    """(carrying rows of each sequence parallel part of this rank, by counting; what the loss is told; a bound one too small)"""
    from megatron.core import parallel_state

    from parallel_rl import NLLLoss, SequencePackingLossWrapper, count_valid
    from parallel_rl.experience import padded_samples
    from parallel_rl.megatron import forward_logits
    from parallel_rl.training.batching.micro_batches import in_order, micro_batches, width_unit
    from parallel_rl.training.models.engine import build_engine, start_world
    from parallel_rl.training.models.scoring import fused_head

    warnings.simplefilter("ignore")
    config = load_config(arguments[0], arguments[1:])
    start_world(config)
    engine, sizes = build_engine(config, config.tokenizer.build().vocabulary, 64), config.parallel
    rows = padded_samples([[1] * prompt for prompt, _ in LENGTHS], [[4] * completion for _, completion in LENGTHS])
    rows = rows.with_fields(sample_mask=torch.arange(len(rows)) != MASKED)
    unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
    parts = sizes.tensor if sizes.sequence_parallel else 1
    cp, place = sizes.context, parallel_state.get_context_parallel_rank()
    found = []
    for bin in in_order(len(rows), 3):
        [batch] = micro_batches(rows, [bin], packing=config.batch.packing, unit=unit, device=engine.device)
        width = batch.data["input_ids"].shape[1]
        room = [width] * len(bin) if batch.packed is None else batch.packed.cu_seqlens_padded.diff().tolist()
        local = []  # row by row, the columns that this context rank holds: chunks `place` and 2·cp - 1 - `place`
        for row, size in zip(bin, room, strict=True):
            chunk = size // (2 * cp)
            columns = [
                *range(place * chunk, (place + 1) * chunk),
                *range(size - (place + 1) * chunk, size - place * chunk),
            ]
            prompt, completion = LENGTHS[row]
            local.append(
                [row != MASKED and prompt <= t + 1 < prompt + completion for t in (columns if cp > 1 else range(size))]
            )
        lines = local if batch.packed is None else [[x for row in local for x in row]]
        counted = [
            sum(sum(line[p * len(line) // parts : (p + 1) * len(line) // parts]) for line in lines)
            for p in range(parts)
        ]
        with fused_head(engine, engine.model) as head, torch.no_grad():
            output = forward_logits(engine.model, batch.input)
            told = batch.loss_input(output, head)
            call = NLLLoss(vocab_size=engine.vocab_size)
            if batch.packed is not None:
                call = SequencePackingLossWrapper(call, batch.packed.cu_seqlens, batch.packed.cu_seqlens_padded)
            groups, error = engine.groups, ""
            rest = batch.data, *count_valid([batch.data]), groups.tp_rank, groups.tensor, groups.context
            assert bool(call(told, *rest)[0].isfinite())
            try:
                call(head(output, told.rows - 1), *rest)
            except ValueError as caught:
                error = str(caught)
        found.append((counted, told.rows, error))
    return found


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", ["one process", "CP 2", "TP 2 × CP 2 × SP packed"])
def test_only_rows_that_carry_loss_are_projected(layout: str, packing: bool, tmp_path: Path) -> None:
    world, parallel, _ = LAYOUTS[layout]
    arguments = run(
        "grpo_arithmetic.yaml", run__dir=tmp_path, model__fused_head="true", parallel=parallel, batch__packing=packing
    )
    for batches in run_world(world, count_rows, arguments):
        for counted, told, error in batches:
            assert told == max(counted) > 0
            assert re.search(r"rows = \d+ is too few: \d+ rows of one rank's hidden states are scored", error)


def test_losses_on_log_probs_take_it() -> None:
    for name in ("grpo_arithmetic.yaml", "dpo_arithmetic.yaml"):
        assert load_config(str(CONFIGS / name), ["--model.fused_head=true"]).model.fused_head


def test_truncated_sampling_goes_with_it_but_for_a_kl_that_is_not_truncated() -> None:
    path, no_kl = str(CONFIGS / "grpo_arithmetic.yaml"), "--rl.loss.options.reference_policy_kl_penalty=0"
    for rule, words in (("top_k=3", "top_k = 3 with top_p = None"), ("top_p=0.9", "top_k = None with top_p = 0.9")):
        with pytest.raises(ValueError, match=f"sampling.{words} and a KL to the reference .* model.fused_head = True"):
            load_config(path, ["--model.fused_head=true", f"--sampling.{rule}"])
        assert load_config(path, ["--model.fused_head=true", f"--sampling.{rule}", no_kl]).sampling.truncation
        assert load_config(path, [f"--sampling.{rule}"]).sampling.truncation


def test_a_loss_that_is_not_of_a_sampler_s_policy_takes_no_truncation() -> None:
    path = str(CONFIGS / "grpo_arithmetic.yaml")
    with pytest.raises(ValueError, match=r"sampling.top_k = 3 .* is incompatible with rl.loss.name = 'nll'"):
        load_config(path, ["--sampling.top_k=3", "--rl.loss={name: nll}"])


def test_a_loss_that_reads_the_output_itself_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.fused_head = True is incompatible with preference.loss.name = 'preference'"
    ):
        load_config(
            str(CONFIGS / "dpo_arithmetic.yaml"),
            ["--model.fused_head=true", "--preference.loss.name=preference", "--preference.loss.options={}"],
        )
