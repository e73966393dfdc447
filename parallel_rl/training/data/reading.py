"""Index and check each source before any work, every rank its part of the records."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from parallel_rl.agreement import gather_results, raise_on_all_ranks
from parallel_rl.training.config.algorithms import RLConfig
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.checking import TextSet, Unfit, check, keys_of, longest_that_fits, shorten
from parallel_rl.training.data.datasets import Datasets, Files, RecordT, check_cut
from parallel_rl.training.data.examples import Answer, Example, Pair, Prompt, Rollout
from parallel_rl.training.data.format import Row, UnfitRecord
from parallel_rl.training.data.forms import find_forms, left_aside
from parallel_rl.training.data.parsers import Solution, parsers
from parallel_rl.training.data.records.hugging_face import open_in_turn
from parallel_rl.training.data.records.mapped import identity
from parallel_rl.training.data.records.source import Records, index_of
from parallel_rl.training.tokenizer.protocol import Tokenizer

Record = Prompt | Example | Pair | Answer | Solution | Rollout


class Room(Protocol):
    """Check that raises ValueError if a run has no room for a record's longest sequence."""

    def __call__(self, tokens: int, record: Record | None = None) -> None: ...


def read_datasets(
    config: TrainConfig, tokenizer: Tokenizer, files: Files, room: Room = lambda tokens, record=None: None
) -> Datasets:
    """Index the files and check their records, each rank a part; every rank calls it.

    `room` refuses records that the run has no room for. ValueError on every rank: a malformed line or row (by file and
    number), a sequence without room, a prompt in both `train` and `held_out`, or recorded rollouts that do not fill
    steps with whole groups.
    """
    open_in_turn([file for group in files.values() for file in group])
    reader, user_fields = _Reader(config, files, room), config.user_fields
    forms = raise_on_all_ranks(lambda: find_forms(config.data, files, user_fields))
    for name, (_, description) in forms.items():
        reader.notes[name].append(description)
    for name, note in raise_on_all_ranks(lambda: left_aside(config.data, files, user_fields)).items():
        reader.notes[name].append(note)
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
        answers=reader.answers(parse.answers),
        solutions=reader.source("solutions", parse.solutions),
        rollouts=reader.rollouts(parse.rollouts),
        seed=config.run.seed,
        map="" if config.data.map is None else identity(config.data.map),
    )
    return replace(data, longest=reader.longest, limit=reader.limit, checked=reader.checked, notes=reader.notes)


class _Reader:
    """Opens and checks sources one after the other, and collects their notes."""

    def __init__(self, config: TrainConfig, files: Files, room: Room) -> None:
        self.longest, self.checked, self.notes = 0, dict[str, float](), defaultdict[str, list[str]](list)
        self._cut = list[int]()  # tokens of this rank's sequences that were shortened
        self._config, self._files, self._room = config, files, room
        self.limit = longest_that_fits(room, config.model.max_positions)

    def source(self, name: str, parse: Callable[[Row], RecordT]) -> Records[RecordT]:
        records = self._open(name, parse)
        return self._check(name, records) if len(records) else records

    def held_out(self, parse: Callable[[Row], Prompt]) -> tuple[Records[Prompt], TextSet]:
        """Read held-out prompts and the set of their texts; each evaluation reads all of them."""
        records, mine = self._open("held_out", parse), list[NDArray[np.uint64]]()
        if len(records):
            records = self._check(
                "held_out", records, float("inf"), lambda _, batch: mine.append(keys_of(p.text for p in batch))
            )
        keys = gather_results(lambda: np.concatenate([np.empty(0, np.uint64), *mine]))
        return records, TextSet(np.concatenate(keys))

    def answers(self, parse: Callable[[Row], Answer]) -> Records[Answer]:
        """Read labelled answers, with a note on suggested weights."""
        records, labels = self._open("answers", parse), np.zeros(2, np.int64)

        def count(_: int, batch: Sequence[Answer]) -> None:
            good = sum(answer.desirable for answer in batch)
            labels[:] += good, len(batch) - good

        if len(records):
            records = self._check("answers", records, visit=count)
            good, bad = np.sum(gather_results(lambda: labels), axis=0).tolist()
            assert self._config.preference is not None
            self.notes["answers"].append(label_note(good, bad, self._config.preference.loss.options))
        return records

    def rollouts(self, parse: Callable[[Row], Rollout]) -> Records[Rollout]:
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

        new, limit = self._config.sampling.max_new_tokens, self.limit
        too_long = "error" if name == "rollouts" else self._config.data.too_long

        def fitting(row: Row) -> RecordT:
            record = parse(row)
            tokens = self._longest(record)
            try:
                self._room(tokens, record)
            except ValueError as error:
                if too_long == "truncate":
                    self._cut.append(tokens)
                    return shorten(record, limit, new)
                raise (error if name == "rollouts" else UnfitRecord(str(error), "too_long", tokens)) from None
            return record

        index = index_of(files, f"data.{name}") if known is None else known.index
        return Records(files, index, fitting, window)

    def _check(
        self,
        name: str,
        records: Records[RecordT],
        budget: float | None = None,
        visit: Callable[[int, Sequence[RecordT]], None] = lambda place, batch: None,
    ) -> Records[RecordT]:
        """Check a source, and return it without the records that are dropped."""
        data, mine = self._config.data, list[_UnfitRow]()
        drops = {kind for kind, what in (("too_long", data.too_long), ("invalid", data.invalid)) if what == "drop"}
        if drops & ({"too_long", "invalid"} if name in ("pairs", "answers") else {"too_long"}) and name != "rollouts":
            budget = float("inf")  # the order is of the records that are left
        elif budget is None:
            budget = data.check_gigabytes * 1e9

        def unfit(block: int, row: int, error: UnfitRecord) -> None:
            mine.append(_UnfitRow(block, row, error.kind, error.tokens, "" if error.kind in drops else str(error)))

        self._cut.clear()
        longest, part = check(records, self._longest, budget, visit, unfit)
        rows: list[_UnfitRow] = sorted(chain.from_iterable(gather_results(lambda: mine)))
        cut: list[int] = [*chain.from_iterable(gather_results(lambda: self._cut))]
        looked_at = round(len(records) * part)
        _refuse([row for row in rows if row.kind not in drops], looked_at)
        if len(rows) == len(records):
            raise ValueError(
                f"data.{name}: each of the {len(records):,} records is dropped ({', '.join(sorted(drops))})"
            )
        self.checked[name], self.longest = part, max(self.longest, longest)
        if rows or cut:
            most = max([longest, *cut, *(row.tokens for row in rows)])
            self.notes[name].append(Unfit(looked_at, len(rows), len(cut), most).describe())
        return records.without((row.block, row.row) for row in rows) if rows else records

    def _longest(self, record: Record) -> int:
        return max(lengths_of(record, self._config.sampling.max_new_tokens))


class _UnfitRow(NamedTuple):
    """A record that does not fit, with the reason if that is refused."""

    block: int
    row: int
    kind: str
    tokens: int
    message: str


def _refuse(rows: Sequence[_UnfitRow], checked: int) -> None:
    """Raise the error of the first record that does not fit, with their number and the options for them."""
    if not rows:
        return
    first = rows[0]
    same = sum(row.kind == first.kind for row in rows)
    cure = "drop leaves them out, truncate cuts them" if first.kind == "too_long" else "drop leaves them out"
    raise ValueError(f"{first.message} ({same:,} of {checked:,} records; data.{first.kind}: {cure})")


def label_note(good: int, bad: int, options: Mapping[str, object]) -> str:
    """Describe the label counts, and the weights that KTO's authors suggest for them (arXiv 2402.01306).

    >>> label_note(40, 40, {})
    '40 desirable, 40 undesirable'
    >>> label_note(10, 90, {}).partition(": ")[2]
    'undesirable_weight 0.084 to 0.111 is inside'
    >>> label_note(90, 10, {}).partition("; ")[2]
    'the ratio of their weighted numbers is 9.00, outside [1, 4/3]: undesirable_weight 6.75 to 9 is inside'
    """
    counts = f"{good:,} desirable, {bad:,} undesirable"
    weights = [options.get(f"{side}_weight", 1.0) for side in ("desirable", "undesirable")]
    if not good or not bad:
        return f"warning: {counts}; KTO learns from both"
    if not all(isinstance(weight, int | float) and weight > 0 for weight in weights):
        return counts
    weight_good, weight_bad = map(float, map(str, weights))
    ratio = weight_good * good / (weight_bad * bad)
    if 1 <= ratio <= 4 / 3:
        return counts
    most = weight_good * good / bad
    digits = 10.0 ** (2 - math.floor(math.log10(most)))  # three of them, rounded inwards
    least, most = math.ceil(most * 3 / 4 * digits) / digits, math.floor(most * digits) / digits
    return (
        f"{counts}; the ratio of their weighted numbers is {ratio:.2f}, outside [1, 4/3]: undesirable_weight {least:g} to "
        f"{most:g} is inside"
    )


def lengths_of(record: Record, new: int) -> list[int]:
    """Return the tokens of a record's sequences (a prompt once) with at most `new` sampled tokens."""
    if isinstance(record, Prompt):
        return [len(record.tokens) + new]
    if isinstance(record, Example | Answer | Solution):
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
    """Check that rollouts fill `steps` steps of `count` sequences, repeated if needed, without a shift."""
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
