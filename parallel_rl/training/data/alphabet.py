"""Check the characters of a run's data against its tokenizer's alphabet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from parallel_rl.agreement import gather_results, raise_on_all_ranks
from parallel_rl.training.config.data import FIELDS
from parallel_rl.training.config.tokenizer import AUTO, TokenizerConfig
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.format import pick, without_own
from parallel_rl.training.data.forms import Forms, find_forms, read_of
from parallel_rl.training.data.records.check import check
from parallel_rl.training.data.records.hugging_face import open_in_turn
from parallel_rl.training.data.records.index import DataFile
from parallel_rl.training.data.records.source import Records, index_of

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
    forms = raise_on_all_ranks(lambda: find_forms(config.data, files, config.own_fields))
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
    own_fields = config.own_fields(name)
    ends = config.data.step_separator if name == "solutions" else ""

    def texts(row: Mapping[str, object]) -> str:
        row = without_own(row, own_fields)
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
