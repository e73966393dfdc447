"""Check a config's sizes against its data and its world, before any work."""

from __future__ import annotations

from parallel_rl.config.hf_config import is_hf, read_hf
from parallel_rl.training.batching.bin_packing import Capacity
from parallel_rl.training.batching.micro_batches import target_rows, width_unit
from parallel_rl.training.batching.prefix_trees import unit_rooms
from parallel_rl.training.config.sections import data_parallel_size
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.examples import Pair
from parallel_rl.training.data.reading import Record, Room
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.tokenizer.protocol import Vocabulary


def check_layout(config: TrainConfig, world_size: int) -> None:
    """Raise ValueError if the world does not match the layout, or its data ranks do not divide a batch."""
    ranks = data_parallel_size(config.parallel, world_size)
    batches = [
        (f"{name}.batch_size", section.batch_size)
        for name, section in (("warmup", config.warmup), ("sft", config.sft), ("distillation", config.distillation))
        if section is not None
    ]
    if config.preference is not None:
        batches += [(f"preference.{config.preference.source}", config.preference.records)]
    if config.rl is not None:
        batches += [("rl.prompts / rl.updates", config.rl.prompts // config.rl.updates)]
        batches += [("rl.experts / rl.updates", config.rl.experts // config.rl.updates)]
    for name, size in batches:
        if size % ranks:
            raise ValueError(f"{name} = {size} is not divisible by the {ranks} data parallel ranks")


def check_vocabulary(config: TrainConfig, tokenizer: Vocabulary) -> Vocabulary:
    """Return the model's token ids; ValueError if the tokenizer, sampling or the teacher do not fit."""
    vocabulary = config.model.vocabulary(tokenizer)
    try:
        config.sampling.truncation.check(vocabulary.size)
    except ValueError as error:
        raise ValueError(f"sampling: {error}") from None
    if config.teacher is not None and is_hf(config.teacher):
        size = read_hf(config.teacher).architecture.vocab
        if size != vocabulary.size:
            raise ValueError(
                f"the teacher {config.teacher} has {size} vocabulary entries, padding included, and the policy has "
                f"{vocabulary.size}; cut or pad embed_tokens and lm_head of one: distillation needs equal vocabularies"
            )
    return vocabulary


def length_check(config: TrainConfig) -> Room:
    """Return a check that raises ValueError if the model or a micro-batch has no room for so many tokens.

    For preference losses a micro-batch needs room for all rows of a record, or for their prefix tree.
    """
    sizes, packing, most = config.parallel, config.batch.packing, config.model.max_positions
    unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
    capacity = Capacity.of_config(config.batch, sizes)
    rows = 1 if config.preference is None else config.preference.rows

    longest = config.data.max_length

    def check(tokens: int, record: Record | None = None) -> None:
        if longest is not None and tokens > longest:
            raise ValueError(f"data.max_length = {longest} is too few; the sequence takes {tokens}")
        needed = -(-tokens // unit) * unit + (unit * sizes.tensor if packing else 0)
        if needed > most:
            raise ValueError(f"model.max_positions = {most} is too few; the sequence takes {needed} with padding")
        if capacity is None or (room := rows * capacity.padded(tokens)) <= capacity.usable:
            return
        # a mismatched third row is not known before the step
        if config.batch.share_prefixes and isinstance(record, Pair) and rows == 2:
            pair = target_rows([record.prompt] * 2, [record.chosen, record.rejected])
            room = int(unit_rooms(pair, capacity, 2)[0])
        if room > capacity.usable:
            what = "the sequence takes" if rows == 1 else f"the {rows} rows of a record take up to"
            raise ValueError(
                f"batch.tokens = {capacity.tokens} is too few: a row holds {capacity.usable}, and {what} {room} with padding"
            )

    return check


def layout_text(config: TrainConfig, engine: Engine) -> str:
    """Describe a run's layout, its rows and its share of the weights, in a line."""
    sizes, batch = config.parallel, config.batch
    weights = sum(parameter.numel() for parameter in engine.bare.parameters())
    layout = f"TP {sizes.tensor} × CP {sizes.context} × PP {sizes.pipeline} × DP {engine.groups.dp_size}"
    kind = "prefix trees" if batch.share_prefixes else "packed" if batch.packing else "padded"
    rows = kind if batch.tokens is None else f"{kind} in {batch.tokens} tokens"
    parallel = ", sequence parallel" if sizes.sequence_parallel else ""
    return f"{layout}{parallel}, {rows}, {config.run.dtype}, {weights:,} weights on this rank"
