"""Check a run from its config alone, without GPUs: layout, reward, folder, files and their first records."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from parallel_rl.config.names import is_left
from parallel_rl.experience.rewards import reward_function
from parallel_rl.training.algorithms.phases import phases
from parallel_rl.training.checkpointing.resume import check_sources, nothing_left
from parallel_rl.training.config.data import FIELDS
from parallel_rl.training.config.sections import data_parallel_size
from parallel_rl.training.config.tokenizer import AUTO
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.alphabet import settle_alphabet
from parallel_rl.training.data.datasets import Files, find_data
from parallel_rl.training.data.forms import find_forms, left_aside
from parallel_rl.training.data.parsers import parsers
from parallel_rl.training.data.records.index import stretch
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.preflight.run_folder import check_writable
from parallel_rl.training.preflight.sizes import check_layout, check_vocabulary, length_check
from parallel_rl.training.tokenizer.protocol import Tokenizer


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
    parse = parsers(config, tokenizer, find_forms(config.data, files, config.own_fields))
    left_aside(config.data, files, config.own_fields)
    for name, data_files in files.items():
        for file in data_files:
            index = file.index(0, 0, 1, stretch(file.size))
            index = index[index["count"] > 0]
            if len(index):
                next(Records((file,), index, getattr(parse, name)).batches(0))
