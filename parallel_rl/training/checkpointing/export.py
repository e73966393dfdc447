"""Export a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.megatron.hf import describe_model, save_hf
from parallel_rl.training.checkpointing.checkpoint import load_weights
from parallel_rl.training.checkpointing.contents import same_weights
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.models.engine import build_frozen, start_world


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
