"""Check a run before any work and without GPUs: layout, sizes, reward, folder, files and their first records."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from parallel_rl.config.hf_config import is_hf, read_hf
from parallel_rl.config.names import is_left
from parallel_rl.experience.rewards import reward_function
from parallel_rl.training.algorithms.phases import phases
from parallel_rl.training.batching.bin_packing import Capacity
from parallel_rl.training.batching.micro_batches import target_rows, width_unit
from parallel_rl.training.batching.prefix_trees import unit_rooms
from parallel_rl.training.checkpointing.resume import check_sources, nothing_left
from parallel_rl.training.checkpointing.run_folder import check_writable
from parallel_rl.training.config.data import FIELDS
from parallel_rl.training.config.model import AUTO
from parallel_rl.training.config.sections import data_parallel_size
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.checking import settle_alphabet
from parallel_rl.training.data.datasets import Files, find_data
from parallel_rl.training.data.examples import Pair
from parallel_rl.training.data.forms import find_forms, left_aside
from parallel_rl.training.data.parsers import parsers
from parallel_rl.training.data.reading import Record, Room
from parallel_rl.training.data.records.files import stretch
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.models.engine import Engine
from parallel_rl.training.tokenizer.protocol import Tokenizer, Vocabulary


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


def check_run(config: TrainConfig, world_size: int) -> str:
    """Check a run on `world_size` ranks within seconds; the run itself checks the rest of its data.

    Returns the layout and the folder, as in "TP 2 × CP 2 × PP 1 × DP 8, float32, writes to runs/grpo"; more lines if no
    step is left or if records were not parsed. ValueError if the world does not match the layout, the reward is
    missing, the folder is not writable, data files are missing or begin with a bad record, or checkpoints do not fit.
    """
    check_layout(config, world_size)
    if config.rl is not None and config.data.rollouts is None:
        length_check(config)(config.sampling.max_new_tokens + 1)  # of the shortest prompt; the run checks them all
    for reward in config.rewards.values():
        reward_function(reward)
    check_writable(Path(config.run.dir))
    lines = []
    if _is_left_to_ranks(config.data.map):  # the mapped records are not known here
        find_data(replace(config.data, map=None))
    else:
        files = find_data(config.data)
        if unknown := _unknown_sources(config, files):
            named = ", ".join(f"data.{name}" for name in unknown)
            lines.append(
                f"not checked: the records of {named}, whose fields the loss declares when the ranks import it"
            )
        files = {name: group for name, group in files.items() if name not in unknown}
        if files or config.tokenizer.alphabet != AUTO:
            config = settle_alphabet(config, files)
            tokenizer = config.tokenizer.build()
            check_vocabulary(config, tokenizer.vocabulary)
            check_first_records(config, tokenizer, files)
    check_sources(config)
    sizes, data = config.parallel, data_parallel_size(config.parallel, world_size)
    layout = f"TP {sizes.tensor} × CP {sizes.context} × PP {sizes.pipeline} × DP {data}"
    done = nothing_left(config, {phase.name: phase.steps for phase in phases(config)})
    return "\n".join([f"{layout}, {config.run.dtype}, writes to {config.run.dir}", *([done] if done else []), *lines])


def _unknown_sources(config: TrainConfig, files: Files) -> tuple[str, ...]:
    """List the sources that need the loss to be parsed: all, if the alphabet comes from one of them."""
    unknown = config.unknown_sources
    if config.tokenizer.alphabet == AUTO and not FIELDS.keys().isdisjoint(unknown):
        return tuple(files)
    return unknown


def _is_left_to_ranks(name: str | None) -> bool:
    """Return whether only the ranks import the module of `data.map`."""
    if name is None or name.partition(":")[0] in sys.modules:
        return False
    return is_left("data.map", name.replace(":", "."))


def check_first_records(config: TrainConfig, tokenizer: Tokenizer, files: Files) -> None:
    """Parse the first records of each file; ValueError with file and number for a malformed one."""
    parse = parsers(config, tokenizer, find_forms(config.data, files, config.user_fields))
    left_aside(config.data, files, config.user_fields)
    for name, data_files in files.items():
        for file in data_files:
            index = file.index(0, 0, 1, stretch(file.size))
            index = index[index["count"] > 0]
            if len(index):
                next(Records((file,), index, getattr(parse, name)).batches(0))
