"""The data of a run: located, indexed and checked before any work, read when a step needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from parallel_rl.agreement import gather_results, raise_on_all_ranks
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.config.data import DataConfig
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.examples import Example, Pair, Prompt, Rollout
from parallel_rl.training.data.format import Row
from parallel_rl.training.data.forms import find_forms
from parallel_rl.training.data.parsers import parsers
from parallel_rl.training.data.records.check import TextSet, check, keys_of
from parallel_rl.training.data.records.paths import DataFile, find_files
from parallel_rl.training.data.records.source import Records, index_of
from parallel_rl.training.tokenizer.protocol import Tokenizer

RecordT = TypeVar("RecordT", Prompt, Example, Pair, Rollout)
Record = Prompt | Example | Pair | Rollout
Files = Mapping[str, tuple[DataFile, ...]]

SOURCES = ("held_out", "train", "examples", "pairs", "rollouts")


@dataclass(frozen=True)
class Datasets:
    """The sources that the config names; the others are empty.

    Attributes:
        seed: of the order of the records.
        longest: tokens of the longest sequence that a run can make of the records that were checked.
        checked: the part of each source that was.
        forms: of sources whose records are not of our own form, described.
    """

    train: Records[Prompt] = field(default_factory=Records)
    held_out: Records[Prompt] = field(default_factory=Records)
    examples: Records[Example] = field(default_factory=Records)
    pairs: Records[Pair] = field(default_factory=Records)
    rollouts: Records[Rollout] = field(default_factory=Records)
    seed: int = 0
    longest: int = 0
    checked: Mapping[str, float] = field(default_factory=dict)
    forms: Mapping[str, str] = field(default_factory=dict)

    def sources(self) -> Iterator[tuple[str, Records]]:
        """Sources that have records, by name."""
        for name in SOURCES:
            records: Records = getattr(self, name)
            if len(records):
                yield name, records

    def read(self, records: Records[RecordT], indices: Sequence[int]) -> list[RecordT]:
        """Records `indices` of a shuffled source.

        Args:
            records: one of the sources.
            indices: counted over all passes.

        Raises:
            ValueError: a record of any rank is malformed; on all ranks.
        """
        return raise_on_all_ranks(lambda: records.stream(indices, self.seed))

    def metadata(self) -> dict[str, str]:
        """The fingerprints of all that is read and the seed of its order, for a checkpoint."""
        return {
            "data_seed": str(self.seed),
            **{f"data_{name}": records.fingerprint for name, records in self.sources()},
        }

    def check_metadata(self, metadata: Mapping[str, object], where: object) -> None:
        """Refuses to go on from a checkpoint that was made with other records, or with another order of them.

        Raises:
            ValueError: the seed, the sources or a fingerprint differ; the message names what.
        """
        mine, then = self.metadata(), f"when {where} was written, so the run cannot go on with the next record"
        otherwise = "choose another run.dir, or set run.resume = 'never'"
        if (seed := metadata.get("data_seed")) != mine["data_seed"]:
            raise ValueError(f"run.seed = {self.seed} was {seed} {then} of the same order. Restore it, {otherwise}")
        for name in (f"data_{source}" for source in SOURCES):
            key = f"data.{name.removeprefix('data_')}"
            if name in mine and name in metadata and mine[name] != metadata[name]:
                raise ValueError(
                    f"{key} is not what it was {then} (its content or order, or data.buffer_megabytes). Restore it, {otherwise}"
                )
            # an evaluation may be added or left out: it takes no place in the order
            if name != "data_held_out" and (name in mine) != (name in metadata):
                there, here = ("left out", "given") if name in mine else ("given", "left out")
                raise ValueError(f"{key} is {here} and was {there} {then}. Restore it, {otherwise}")

    def describe_next(self, taken: Mapping[str, int]) -> str:
        """Describe the next record of each source after `taken` of it."""
        parts = []
        for name, number in taken.items():
            turn, place = divmod(number, len(getattr(self, name)))
            parts.append(f"; data.{name} goes on with record {place + 1:,} of pass {turn + 1:,}")
        return "".join(parts)

    def describe(self) -> list[str]:
        """A line for each source."""
        lines = []
        for name, records in self.sources():
            part = self.checked.get(name, 1.0)
            rest = "" if part == 1 else f"; {part:.1%} of it checked, the rest when it is read"
            files = f"{len(records.files):,} file{'s' * (len(records.files) > 1)}"
            lines.append(f"data.{name}: {len(records):,} records in {files}, {records.bytes / 1e6:,.1f} MB{rest}")
            lines += [f"data.{name}: {self.forms[name]}"] if name in self.forms else []
        return lines


def find_data(config: DataConfig) -> Files:
    """The files that the config names, by source.

    Raises:
        ValueError: see `find_files`.
    """
    named = {name: getattr(config, name) for name in SOURCES}
    return {name: find_files(value, f"data.{name}") for name, value in named.items() if value is not None}


def read_datasets(
    config: TrainConfig, tokenizer: Tokenizer, files: Files, room: Callable[[int], None] = lambda tokens: None
) -> Datasets:
    """Indexes the files and checks their records, each rank its part of them; called by every rank, with or without a world.

    Args:
        config: the run.
        tokenizer: of all text.
        files: from `find_data`.
        room: refuses a sequence of so many tokens where the model has no room for it.

    Raises:
        ValueError: on every rank: a malformed line or row (by file and number), one that has no room, a
            prompt in both `train` and `held_out`, recorded rollouts that do not fill
            steps with whole groups.
    """
    reader = _Reader(config, files, room)
    forms = raise_on_all_ranks(lambda: find_forms(config.data, files))
    parse = parsers(config, tokenizer, forms)
    held_out, held = reader.held_out(parse.held_out)

    def train(row: Row) -> Prompt:
        prompt = parse.train(row)
        if prompt.text in held:
            raise ValueError(
                f"the prompt {prompt.text!r} is in data.train and in data.held_out; held-out prompts must not be trained on"
            )
        return prompt

    data = Datasets(
        train=reader.source("train", train),
        held_out=held_out,
        examples=reader.source("examples", parse.examples),
        pairs=reader.source("pairs", parse.pairs),
        rollouts=reader.rollouts(parse.rollouts),
        seed=config.run.seed,
        forms={name: description for name, (_, description) in forms.items()},
    )
    return replace(data, longest=reader.longest, checked=reader.checked)


def check_cut(records: Records[Rollout], place: int, count: int) -> None:
    """A step of `count` recorded sequences that starts at `place` does not start within a group.

    Raises:
        ValueError: it does.
    """
    group = records[place].group
    if place and records[place - 1].group == group:
        raise ValueError(
            f"data.rollouts: group {group} lies in two steps of rl.prompts × group_size = {count} sequences (at sequence "
            f"{place + 1}, {records.name_of(place)}); a group must be whole in its step"
        )


class _Reader:
    """Opens and checks one source after the other, and keeps what is known of all."""

    def __init__(self, config: TrainConfig, files: Files, room: Callable[[int], None]) -> None:
        self.longest, self.checked = 0, dict[str, float]()
        self._config, self._files, self._room = config, files, room

    def source(self, name: str, parse: Callable[[Row], RecordT]) -> Records[RecordT]:
        records = self._open(name, parse)
        if len(records):
            self._check(name, records)
        return records

    def held_out(self, parse: Callable[[Row], Prompt]) -> tuple[Records[Prompt], TextSet]:
        """Held-out prompts, with the set of them all: each evaluation reads every one."""
        records, mine = self._open("held_out", parse), list[NDArray[np.uint64]]()
        if len(records):
            self._check("held_out", records, float("inf"), lambda _, batch: mine.append(keys_of(p.text for p in batch)))
        keys = gather_results(lambda: np.concatenate([np.empty(0, np.uint64), *mine]))
        return records, TextSet(np.concatenate(keys))

    def rollouts(self, parse: Callable[[Row], Rollout]) -> Records[Rollout]:
        """Checked for what concerns several of them, too."""
        records, rl = self._open("rollouts", parse), self._config.rl
        if rl is None or not len(records):
            return records
        count = rl.prompts * rl.group_size
        _check_number(len(records), count, rl.steps)
        first = gather_results(lambda: records[0])[0]
        _check_rewards(first, rl)
        uniform = partial(_uniform, parse=parse, rewarded=first.reward is not None, needs=rl.recorded_fields)
        records = self._open("rollouts", uniform, records)
        end = min(len(records), rl.steps * count)

        def cuts(place: int, batch: Sequence[Rollout]) -> None:
            for cut in range(-(-place // count) * count, min(place + len(batch), end), count):
                check_cut(records, cut, count)

        self._check("rollouts", records, None, cuts)
        return records

    def _open(
        self, name: str, parse: Callable[[Row], RecordT], known: Records[RecordT] | None = None
    ) -> Records[RecordT]:
        if name not in self._files:
            return Records()
        files, window = self._files[name], self._config.data.buffer_megabytes << 20

        def fitting(row: Row) -> RecordT:
            record = parse(row)
            self._room(self._longest(record))
            return record

        index = index_of(files, f"data.{name}") if known is None else known.index
        return Records(files, index, fitting, window)

    def _check(
        self,
        name: str,
        records: Records[RecordT],
        budget: float | None = None,
        each: Callable[[int, Sequence[RecordT]], None] = lambda place, batch: None,
    ) -> None:
        budget = self._config.data.check_gigabytes * 1e9 if budget is None else budget
        longest, self.checked[name] = check(records, self._longest, budget, each)
        self.longest = max(self.longest, longest)

    def _longest(self, record: Record) -> int:
        return max(lengths_of(record, self._config.sampling.max_new_tokens))


def lengths_of(record: Record, new: int) -> list[int]:
    """Tokens of the sequences that a run makes of a record, of a prompt once, with `new` sampled ones at most."""
    if isinstance(record, Prompt):
        return [len(record.tokens) + new]
    if isinstance(record, Example):
        return [len(record.prompt) + len(record.target.tokens)]
    if isinstance(record, Pair):
        return [len(record.prompt) + len(side.tokens) for side in (record.chosen, record.rejected)]
    return [len(record.tokens)]


def _uniform(
    row: Row,
    parse: Callable[[Row], Rollout],
    rewarded: bool,
    needs: Mapping[str, str],
) -> Rollout:
    rollout = parse(row)
    for name, key in needs.items():
        if getattr(rollout, key) is None:
            raise ValueError(f"the field {key!r} is missing; rl.loss reads {name!r}")
    if (rollout.reward is not None) != rewarded:
        raise ValueError(
            "'reward' is given in every record of data.rollouts or 'advantage' in every one; the first has "
            f"{'reward' if rewarded else 'advantage'!r}"
        )
    return rollout


def _check_number(size: int, count: int, steps: int) -> None:
    """Recorded rollouts fill `steps` steps of `count` sequences, over and over if need be, without a shift."""
    if size < count or (size < steps * count and size % count):
        raise ValueError(
            f"data.rollouts has {size} sequences; rl.prompts × group_size = {count} a step, for {steps} steps, "
            f"needs {steps * count} of them or a smaller multiple of {count}"
        )


def _check_rewards(first: Rollout, config: RLConfig) -> None:
    if first.reward is not None:
        return
    readers = {
        f"rl.loss.name = {config.loss.name!r}": "rewards" in config.loss.requirements.names,
        "rl.critic": config.critic is not None,
        "rl.teacher": config.teacher is not None,
        "rl.overlong": config.overlong is not None,
    }
    for reader, reads in readers.items():
        if reads:
            raise ValueError(f"data.rollouts gives advantages, no rewards; {reader} needs rewards")
