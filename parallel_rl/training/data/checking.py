"""Check every record before a run, each rank a part: blocks in bounded memory, characters, and records that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from parallel_rl.agreement import gather_results, raise_on_all_ranks
from parallel_rl.groups import group_rank, group_size
from parallel_rl.training.config.data import FIELDS
from parallel_rl.training.config.model import AUTO, TokenizerConfig
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.examples import Answer, Example, Pair, Prompt, Rollout
from parallel_rl.training.data.format import UnfitRecord, pick, without_user_fields
from parallel_rl.training.data.forms import Forms, find_forms, read_of
from parallel_rl.training.data.parsers import Solution
from parallel_rl.training.data.records.files import DataFile, Entries
from parallel_rl.training.data.records.hugging_face import open_in_turn
from parallel_rl.training.data.records.source import Records, index_of
from parallel_rl.training.tokenizer.protocol import Target

RecordT = TypeVar("RecordT")


def check(
    records: Records[RecordT],
    length: Callable[[RecordT], int],
    budget: float = float("inf"),
    on_batch: Callable[[int, Sequence[RecordT]], None] = lambda place, batch: None,
    unfit: Callable[[int, int, UnfitRecord], None] | None = None,
) -> tuple[int, float]:
    """Parse blocks of `budget` bytes, at least one; return the greatest length and the checked fraction.

    The blocks are spread evenly over the source and split over the ranks; result and ValueError are the same on each.
    `length` counts the tokens of a record. `on_batch` gets (place of the first, records) of this rank's part, batch by
    batch, and may refuse them; `unfit` is that of `Records.batches`.
    """
    blocks, world = spread_blocks(records.index, budget), dist.group.WORLD

    def work() -> int:
        longest = 0
        for block in _share(records.index, blocks, group_rank(world), group_size(world)).tolist():
            for place, batch in records.batches(block, unfit):
                longest = max(longest, max(map(length, batch), default=0))
                on_batch(place, batch)
        return longest

    longest = max(gather_results(work))
    return longest, int(records.index["size"][blocks].sum()) / max(records.bytes, 1)


def spread_blocks(index: Entries, budget: float) -> NDArray[np.int64]:
    """Return an even sample of blocks with about `budget` bytes, or all blocks."""
    total, count = int(index["size"].sum()), len(index)
    if total <= budget:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, max(1, int(count * budget / total))).astype(np.int64))


class TextSet:
    """Set of texts, eight bytes each; two texts collide with a probability of 2⁻⁶⁴."""

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self._keys = np.sort(keys)

    def __contains__(self, text: str) -> bool:
        key = np.uint64(_key(text))
        at = int(self._keys.searchsorted(key))
        return at < len(self._keys) and bool(self._keys[at] == key)


def keys_of(texts: Iterable[str]) -> NDArray[np.uint64]:
    return np.fromiter(map(_key, texts), np.uint64)


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _share(index: Entries, blocks: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """Return this rank's consecutive part of `blocks`, about as many bytes as any other's."""
    sizes = index["size"][blocks]
    middle = np.cumsum(sizes) - sizes / 2
    owner = np.minimum(middle * size // max(int(sizes.sum()), 1), size - 1)
    return blocks[owner == rank]


# fields with characters; a system text or tools need a chat template
_TEXTS = ("prompt", "messages", "answer", "text", "chosen", "rejected", "completions")


def settle_alphabet(config: TrainConfig, files: Mapping[str, Sequence[DataFile]]) -> TrainConfig:
    """Return the run with `auto` replaced by the sorted characters of all its data; every rank calls it.

    ValueError names the characters of the data (as far as `data.check_gigabytes` goes) that the alphabet lacks.
    """
    alphabet = config.tokenizer.alphabet
    if alphabet is None:
        return config
    known = set() if alphabet == AUTO else set(alphabet)
    first: dict[str, str] = {}
    open_in_turn([file for group in files.values() for file in group])
    forms = raise_on_all_ranks(lambda: find_forms(config.data, files, config.user_fields))
    for name in FIELDS:
        if name in files:
            for characters in _unknown(config, name, files[name], known, forms):
                first = {**characters, **first}
    if alphabet == AUTO:
        return replace(config, tokenizer=TokenizerConfig("".join(sorted(first))))
    if first:
        chars = sorted(first)
        raise ValueError(
            f"tokenizer.alphabet = {alphabet!r} lacks {', '.join(map(repr, chars))} of the data ({chars[0]!r} is in "
            f"{first[chars[0]]}); add {'them' if len(chars) > 1 else 'it'}, or write alphabet: auto"
        )
    return config


def _texts_of(value: object) -> list[str]:
    """List a text, or the texts of messages or steps; skip malformed values, which the parser refuses."""
    parts = (
        [part.get("content") if isinstance(part, Mapping) else part for part in value]
        if isinstance(value, list)
        else [value]
    )
    return [part for part in parts if isinstance(part, str)]


def _unknown(
    config: TrainConfig, name: str, files: Sequence[DataFile], known: set[str], forms: Forms
) -> list[dict[str, str]]:
    """List a source's characters outside of `known`, each with the first place on a rank, rank by rank."""
    columns, read = config.data.columns_of(name), read_of(forms, name)
    user_fields = config.user_fields(name)
    ends = config.data.step_separator if name == "solutions" else ""

    def texts(row: Mapping[str, object]) -> str:
        row = without_user_fields(row, user_fields)
        fields, _ = read(row) if read else pick(row, FIELDS[name], columns)
        return ends + "".join(text for field in _TEXTS for text in _texts_of(fields.get(field)))

    records = Records(files, index_of(files, f"data.{name}"), texts, config.data.buffer_megabytes << 20)
    mine: dict[str, str] = {}

    def look(place: int, batch: Sequence[str]) -> None:
        for number, text in enumerate(batch):
            for char in set(text) - known - mine.keys():
                mine[char] = records.name_of(place + number)

    check(records, len, float("inf") if config.tokenizer.alphabet == AUTO else config.data.check_gigabytes * 1e9, look)
    return gather_results(lambda: mine)


FitT = TypeVar("FitT", Prompt, Example, Pair, Answer, Solution, Rollout)

WARN_SHARE = 0.1


@dataclass(frozen=True)
class Unfit:
    """Counts of a source's records that did not fit; `longest` has tokens of a sequence before any cut."""

    checked: int
    dropped: int
    cut: int
    longest: int

    def describe(self) -> str:
        """Describe how many records did not fit, with a warning for many."""
        parts = [(self.dropped, "dropped"), (self.cut, "cut")]
        text = ", ".join(f"{n:,} of {self.checked:,} records ({n / self.checked:.1%}) {what}" for n, what in parts if n)
        many = self.dropped + self.cut > WARN_SHARE * self.checked
        return f"{'warning: ' * many}{text}; the longest sequence had {self.longest:,} tokens"


def longest_that_fits(room: Callable[[int], None], most: int) -> int:
    """Return the most tokens, up to `most`, that `room` accepts; 0: none.

    >>> def room(tokens):
    ...     if tokens > 7:
    ...         raise ValueError
    >>> longest_that_fits(room, 100)
    7
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            room(middle)
            low = middle
        except ValueError:
            high = middle - 1
    return low


def shorten(record: FitT, limit: int, new: int) -> FitT:
    """Cut a record to `limit` tokens, with `new` sampled ones after a prompt; ValueError if none is left.

    A prompt of RL loses its first tokens. An example or a pair loses the end of its answers, as in TRL's `keep_start`; if the
    prompt leaves no room for a token with loss, the prompt also loses its first tokens.
    """
    if isinstance(record, Prompt):
        if limit <= new:
            raise ValueError(f"{limit} tokens leave no room for a prompt before sampling.max_new_tokens = {new}")
        return replace(record, tokens=record.tokens[-(limit - new) :])
    if isinstance(record, Rollout):
        return record
    targets = [record.target] if isinstance(record, Example | Answer | Solution) else [record.chosen, record.rejected]
    needed = max(_first_learned(target) for target in targets)
    if needed >= limit:
        raise ValueError(f"{limit} tokens leave no room for a prompt before the first learned token, place {needed}")
    prompt = record.prompt[-(limit - needed) :]
    cut = [begin_of(target, limit - len(prompt)) for target in targets]
    if isinstance(record, Example | Answer | Solution):
        return replace(record, prompt=prompt, target=cut[0])
    return replace(record, prompt=prompt, chosen=cut[0], rejected=cut[1])


def _first_learned(target: Target) -> int:
    """Count the tokens up to and including the first with loss."""
    return 1 if target.mask is None else target.mask.index(1) + 1


def begin_of(target: Target, count: int) -> Target:
    return Target(target.tokens[:count], None if target.mask is None else target.mask[:count])
