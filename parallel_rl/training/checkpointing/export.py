"""Use a checkpoint outside a run: export it as a Hugging Face folder, or sample answers from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parallel_rl.agreement import gather_results, raise_on_all_ranks
from parallel_rl.megatron.hf import describe_model, save_hf
from parallel_rl.training.checkpointing.checkpoint import load_weights
from parallel_rl.training.checkpointing.contents import same_weights
from parallel_rl.training.config.sections import SamplingConfig
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.conversations import conversation
from parallel_rl.training.models.engine import build_engine, build_frozen, start_world
from parallel_rl.training.rollouts.sampler import ROWS_AT_A_TIME, sample


def export_checkpoint(checkpoint: Path, out: Path, config: TrainConfig) -> None:
    """Write a checkpoint's model and tokenizer to the new or empty folder `out`; every rank calls it.

    `config` is the run's, on any layout. ValueError on all ranks for a checkpoint that is missing, damaged or of
    another model, a model of no Hugging Face family, or files in `out`.
    """
    start_world(config)
    tokens = raise_on_all_ranks(config.tokenizer.build).vocabulary
    vocabulary = config.model.vocabulary(tokens)
    model = build_frozen(config, vocabulary)
    raise_on_all_ranks(lambda: describe_model(model))  # fails before tensors are read
    load_weights(
        checkpoint,
        model,
        same_weights(config, "the checkpoint", scalar_head=config.scalar_head),
        scalar_head=config.scalar_head,
    )
    ends = sorted(vocabulary.ends)
    entries: dict[str, object] = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    if config.model.hf is None:  # a model from a folder keeps its own padding token
        entries["pad_token_id"] = vocabulary.pad
    save_hf(model, out, companions=config.tokenizer.hf or config.model.hf, entries=entries)


def sample_prompts(
    config: TrainConfig,
    checkpoint: Path,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    *,
    samples: int,
    seed: int,
    greedy: bool,
) -> list[list[str]]:
    """Sample `samples` answers to each prompt, on every rank and alike for any layout.

    `config` is that of the checkpoint's run, on the layout to sample with; the run's system text precedes the prompts.
    ValueError on all ranks for a checkpoint that is missing, damaged or of another model, a model without logits, or a
    prompt that cannot be encoded or has no room.
    """
    start_world(config)
    tokenizer = raise_on_all_ranks(config.tokenizer.build)
    most = config.model.max_positions

    def render() -> list[list[int]]:
        if config.scalar_head:
            raise ValueError(f"{checkpoint} is of a reward model, which has no logits to sample from")
        tokens = [tokenizer.render(conversation({"prompt": text}, config.data.system)) for text in prompts]
        for text, ids in zip(prompts, tokens, strict=True):
            if len(ids) + sampling.max_new_tokens > most:
                raise ValueError(
                    f"the prompt {text[:40]!r} has {len(ids)} tokens; with {sampling.max_new_tokens} new ones these are more "
                    f"than model.max_positions = {most}; lower --max-new-tokens"
                )
        return tokens

    rendered = raise_on_all_ranks(render)
    engine = build_engine(config, config.model.vocabulary(tokenizer.vocabulary), most)
    load_weights(checkpoint, engine.model, same_weights(config, "the checkpoint"))
    groups, count = engine.groups, len(prompts) * samples
    mine = range(groups.dp_rank * count // groups.dp_size, (groups.dp_rank + 1) * count // groups.dp_size)
    texts: dict[int, str] = {}
    for first in range(mine.start, mine.stop, ROWS_AT_A_TIME):
        ids = mine[first - mine.start : first - mine.start + ROWS_AT_A_TIME]
        drawn = sample(engine, [rendered[number // samples] for number in ids], ids, seed, sampling, greedy=greedy)
        texts |= zip(ids, map(tokenizer.decode, drawn.responses()), strict=True)
    by_number = {number: text for part in gather_results(lambda: texts) for number, text in part.items()}
    return [[by_number[number * samples + k] for k in range(samples)] for number in range(len(prompts))]
