"""Recognise record forms of other frameworks by their columns and convert them to this package's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from parallel_rl.losses.core.requirements import Field
from parallel_rl.training.config.data import FIELDS, FORM_NAMES, DataConfig
from parallel_rl.training.data.conversations import unknown_keys
from parallel_rl.training.data.conversions import alpaca, dialogues, ranked, renamed, sharegpt, texts_alone, verl
from parallel_rl.training.data.format import Fields, Row, unread, without_user_fields
from parallel_rl.training.data.records.files import DataFile, stretch


@dataclass(frozen=True)
class RecordForm:
    """One form of a record.

    Attributes:
        sources: that may have it.
        needs, may: required and optional columns.
        aside: patterns of columns that are not read.
        fits: tests the values of those columns.
    """

    name: str
    title: str
    sources: tuple[str, ...]
    needs: tuple[str, ...]
    convert: Callable[[Row], Fields]
    may: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    fits: Callable[[Row], bool] = lambda row: True

    def read(self, row: Row) -> tuple[Fields, Fields]:
        """Split a record into its fields and other columns; ValueError for missing, unknown or malformed ones."""
        missing = [name for name in self.needs if name not in row]
        if missing or (unknown := self.unknown(row)):
            fault = f"the column {missing[0]!r} is missing" if missing else f"the column {unknown[0]!r} is unknown"
            raise ValueError(
                f"the record is not of {self.title} form, that of the source: {fault}; it has {', '.join(row)}. Set "
                "data.form to ignore the columns that it does not read"
            )
        return self.convert(row), {key: value for key, value in row.items() if key not in (*self.needs, *self.may)}

    def unknown(self, row: Row) -> list[str]:
        """List columns that this form neither reads nor leaves aside."""
        others = [key for key in row if key not in (*self.needs, *self.may)]
        return [key for key in others if not any(fnmatchcase(key, pattern) for pattern in self.aside)]

    def begins(self, row: Row) -> bool:
        return all(name in row for name in self.needs)

    def matches(self, row: Row) -> bool:
        return self.begins(row) and not self.unknown(row) and self.fits(row)

    def describe(self, row: Row) -> str:
        """Describe the form by its columns in the first record."""
        used = [key for key in row if key in (*self.needs, *self.may)]
        aside = [key for key in row if key not in used]
        return f"{self.title} form: {', '.join(used)}" + (f"; {', '.join(aside)} ignored" if aside else "")


Forms = Mapping[str, tuple[RecordForm, str]]
UserFields = Callable[[str], Sequence[Field]]


def _no_user_fields(source: str) -> Sequence[Field]:
    return ()


def find_forms(
    config: DataConfig, files: Mapping[str, Sequence[DataFile]], user_fields: UserFields = _no_user_fields
) -> Forms:
    """Choose and describe the form of each source from its first record; none for this package's fields.

    `user_fields` returns those of a source, which are no part of a form. ValueError if a first record matches
    several forms, or no source can have `data.form`.
    """
    sources = [source for source in FIELDS if files.get(source) and not config.columns_of(source)]
    if config.form and not any(
        source in form.sources for form in FORMS if form.name == config.form for source in sources
    ):
        [wanted] = [form.sources for form in FORMS if form.name == config.form]
        raise ValueError(
            f"data.form = {config.form!r} has no effect; only data.{' and data.'.join(wanted)} can have it"
        )
    chosen = {}
    for source in sources:
        row = _first(files[source][0], user_fields(source))
        form = None if row is None else _choose(config, source, row, files[source][0])
        if row is not None and form is not None:
            chosen[source] = form, form.describe(row)
    return chosen


def left_aside(
    config: DataConfig, files: Mapping[str, Sequence[DataFile]], user_fields: UserFields = _no_user_fields
) -> dict[str, str]:
    """Describe the unread parts of each source's first record; ValueErrors of `unread`."""
    notes = {}
    for source in FIELDS:
        row = _first(files[source][0], user_fields(source)) if files.get(source) else None
        if row is None:
            continue
        columns = config.columns_of(source)
        try:
            aside = unread(row, FIELDS[source], columns) if columns else []
        except ValueError as error:
            raise ValueError(f"{files[source][0].path}: {error}") from None
        keys, parts = unknown_keys(row), []
        if aside:
            parts.append(
                f"{', '.join(aside)} ignored" + (", except by a reward function" if source in _PROMPTS else "")
            )
        if keys:
            parts.append(f"of messages, {', '.join(keys)} left to the chat template")
        if parts:
            notes[source] = "; ".join(parts)
    return notes


def read_of(forms: Forms, source: str) -> Callable[[Row], tuple[Fields, Fields]] | None:
    """Return the conversion of a source's records; None for this package's own fields."""
    return forms[source][0].read if source in forms else None


def _choose(config: DataConfig, source: str, row: Row, file: DataFile) -> RecordForm | None:
    forms = [form for form in FORMS if source in form.sources]
    for form in forms:
        if form.name == config.form:
            return replace(form, aside=("*",))
    for form in forms:
        if form.matches(row):
            return form
    begun = [form for form in forms if form.begins(row) and form.fits(row)]
    if not begun or row.keys() <= {*FIELDS[source]}:
        return None
    if len(begun) > 1:
        raise ValueError(
            f"{file.path}: the first record has the columns of several forms, {', '.join(form.name for form in begun)}: "
            f"{', '.join(row)}; set data.form to one of them, or data.columns"
        )
    [form] = begun
    raise ValueError(
        f"{file.path}: the first record has the columns of {form.title} form, and the unknown column "
        f"{form.unknown(row)[0]!r}; correct its name, or set data.form: {form.name}, which leaves it aside"
    )


def _first(file: DataFile, user_fields: Sequence[Field]) -> Row | None:
    """Return a file's first record without the user's own fields; None if it has none or is malformed."""
    step = stretch(file.size)
    try:
        for unit in range(file.units(step)):  # of a map that leaves records out, the first that stays
            index = file.index(0, unit, unit + 1, step)
            index = index[index["count"] > 0]
            if len(index):
                return without_user_fields(file.read(*index[["start", "size", "crc"]][0].item()).row(0), user_fields)
        return None
    except ValueError:
        return None


_PROMPTS = ("train", "held_out")
_RATED = ("messages", "prompt_id", "score_*", "*-rating", "*-model", "*_score", "*_rating", "*_model")
_ULTRAFEEDBACK = ("prompt", "chosen", "rejected")
_STEPWISE = ("prompt", "completions", "labels")

FORMS = (
    RecordForm(
        "unpaired_preference",
        "TRL's unpaired preference",
        ("answers",),
        ("prompt", "completion", "label"),
        partial(
            renamed,
            {"prompt": "prompt", "completion": "answer", "label": "label", "system": "system", "tools": "tools"},
        ),
        ("system", "tools"),
    ),
    RecordForm(
        "stepwise_supervision",
        "TRL's stepwise supervision",
        ("solutions",),
        _STEPWISE,
        partial(renamed, {name: name for name in (*_STEPWISE, "system", "tools")}),
        ("system", "tools"),
    ),
    RecordForm(
        "prompt_completion",
        "TRL's prompt and completion",
        ("examples",),
        ("prompt", "completion"),
        partial(renamed, {"prompt": "prompt", "completion": "answer", "system": "system", "tools": "tools"}),
        ("system", "tools"),
    ),
    RecordForm(
        "alpaca", "Alpaca's", ("examples",), ("instruction", "output"), alpaca, ("input", "system"), ("text", "id")
    ),
    RecordForm(
        "sharegpt", "ShareGPT's", ("examples",), ("conversations",), sharegpt, ("system", "tools"), ("id", "source")
    ),
    RecordForm(
        "ultrachat",
        "UltraChat's",
        ("examples",),
        ("prompt", "prompt_id", "messages"),
        partial(renamed, {"messages": "messages", "system": "system", "tools": "tools"}),
        ("system", "tools"),
    ),
    RecordForm(
        "ultrafeedback",
        "UltraFeedback's",
        ("pairs",),
        _ULTRAFEEDBACK,
        partial(renamed, dict(zip(_ULTRAFEEDBACK, _ULTRAFEEDBACK, strict=True)) | {"system": "system"}),
        ("system",),
        _RATED,
        lambda row: any(key not in (*_ULTRAFEEDBACK, "system") for key in row),
    ),
    RecordForm(
        "dialogue_texts",
        "HH's dialogues as texts",
        ("pairs",),
        ("chosen", "rejected"),
        dialogues,
        ("system",),
        (),
        texts_alone,
    ),
    RecordForm(
        "nemo_rl_preference",
        "NeMo-RL's preference",
        ("pairs",),
        ("context", "completions"),
        ranked,
        (),
        ("task_name", "dataset"),
    ),
    RecordForm(
        "verl",
        "verl's",
        _PROMPTS,
        ("data_source", "prompt", "reward_model"),
        verl,
        (),
        ("ability", "extra_info", "agent_name"),
    ),
)
assert tuple(form.name for form in FORMS) == FORM_NAMES
