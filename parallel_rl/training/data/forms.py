"""Record forms of other frameworks, recognised by their columns and converted to this package's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile

from parallel_rl.config.json_text import brief
from parallel_rl.training.config.data import FIELDS, FORM_NAMES, DataConfig
from parallel_rl.training.data.format import Row, text_of
from parallel_rl.training.data.records.index import stretch
from parallel_rl.training.data.records.paths import DataFile

Fields = dict[str, object]

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True)
class RecordForm:
    """One form of a record.

    Attributes:
        name: in `data.form`.
        title: in reports.
        sources: that it is a form of.
        needs: columns that every record has.
        convert: from a record to the fields of its source.
        may: further columns that are read, where they are there.
        aside: patterns of columns that are not read.
        fits: whether the values of those columns are of this form.
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
        """Convert a record to the fields of its source and its other columns.

        Raises:
            ValueError: a column that the form needs is missing, one is unknown, or a value is malformed.
        """
        missing = [name for name in self.needs if name not in row]
        if missing or (unknown := self.unknown(row)):
            fault = f"the column {missing[0]!r} is missing" if missing else f"the column {unknown[0]!r} is unknown"
            raise ValueError(
                f"the record is not of {self.title} form, as the first one is: {fault}; it has {', '.join(row)}. "
                "data.form: NAME reads what that form needs and leaves other columns aside"
            )
        return self.convert(row), {key: value for key, value in row.items() if key not in (*self.needs, *self.may)}

    def unknown(self, row: Row) -> list[str]:
        """The columns that this form neither reads nor leaves aside."""
        others = [key for key in row if key not in (*self.needs, *self.may)]
        return [key for key in others if not any(fnmatchcase(key, pattern) for pattern in self.aside)]

    def begins(self, row: Row) -> bool:
        """Whether a record has all columns that this form needs."""
        return all(name in row for name in self.needs)

    def matches(self, row: Row) -> bool:
        """Whether a record has the columns of this form, and no unknown ones."""
        return self.begins(row) and not self.unknown(row) and self.fits(row)

    def describe(self, row: Row) -> str:
        """Describe the form by its columns in the first record."""
        used = [key for key in row if key in (*self.needs, *self.may)]
        aside = [key for key in row if key not in used]
        return f"{self.title} form: {', '.join(used)}" + (f"; {', '.join(aside)} left aside" if aside else "")


Forms = Mapping[str, tuple[RecordForm, str]]


def find_forms(config: DataConfig, files: Mapping[str, Sequence[DataFile]]) -> Forms:
    """Choose the form of each source from its first record, with its description; a source of our own fields has none.

    Raises:
        ValueError: a first record has the columns of several forms, or none of the sources can have `data.form`.
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
        row = _first(files[source][0])
        form = None if row is None else _choose(config, source, row, files[source][0])
        if row is not None and form is not None:
            chosen[source] = form, form.describe(row)
    return chosen


def read_of(forms: Forms, source: str) -> Callable[[Row], tuple[Fields, Fields]] | None:
    """The conversion of a source's records; None: they have our own fields."""
    return forms[source][0].read if source in forms else None


def _choose(config: DataConfig, source: str, row: Row, file: DataFile) -> RecordForm | None:
    forms = [form for form in FORMS if source in form.sources]
    for form in forms:
        if form.name == config.form:
            return replace(form, aside=("*",))
    for form in forms:
        if form.matches(row):
            return form
    begun = [form.name for form in forms if form.begins(row) and form.fits(row)]
    if len(begun) > 1 and not row.keys() <= {*FIELDS[source]}:
        raise ValueError(
            f"{file.path}: the first record has the columns of several forms, {', '.join(begun)}: {', '.join(row)}; set "
            "data.form to one of them, or data.columns"
        )
    return None


def _first(file: DataFile) -> Row | None:
    """The first record of a file; None where it has none or is malformed, which the checks name."""
    step = stretch(file.size)
    try:
        index = file.index(0, 0, min(1, file.units(step)), step)
        return file.read(*index[["start", "size", "crc"]][0].item()).row(0) if len(index) else None
    except ValueError:
        return None


def _alpaca(row: Row) -> Fields:
    """Join the instruction and its input by a line break."""
    context = row.get("input")
    if context is not None and not isinstance(context, str):
        raise ValueError(f"'input' = {brief(context)} is not valid; a text is needed")
    prompt = text_of(row, "instruction") + (f"\n{context}" if context else "")
    return {"prompt": prompt, "answer": row["output"], **_kept(row, "system")}


def _sharegpt(row: Row) -> Fields:
    """Turns of {from, value} as messages."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"'conversations' = {brief(turns)} is not valid; a list of {{from, value}} is needed")
    messages = []
    for index, turn in enumerate(turns):
        role = _SHAREGPT_ROLES.get(str(turn.get("from"))) if isinstance(turn, Mapping) else None
        if role is None:
            raise ValueError(
                f"conversations[{index}] = {brief(turn)} is not valid; {{from, value}} with from one of "
                f"{', '.join(_SHAREGPT_ROLES)} is needed"
            )
        messages.append({"role": role, "content": turn.get("value")})
    return {"messages": messages, **_kept(row, "system", "tools")}


def _renamed(names: Mapping[str, str], row: Row) -> Fields:
    return {ours: row[theirs] for theirs, ours in names.items() if theirs in row}


def _kept(row: Row, *names: str) -> Fields:
    return {name: row[name] for name in names if name in row}


def _texts_alone(row: Row) -> bool:
    return "prompt" not in row and isinstance(row["chosen"], str) and isinstance(row["rejected"], str)


def _dialogues(row: Row) -> Fields:
    """Two dialogues as texts: their turns where both have Anthropic's marks, otherwise the beginning that they share.

    The shared beginning is TRL's: up to the first character that differs, without a space before it.
    """
    chosen, rejected = text_of(row, "chosen"), text_of(row, "rejected")
    both = [_turns(chosen), _turns(rejected)]
    if both[0] and both[1]:
        return {"chosen": both[0], "rejected": both[1], **_kept(row, "system")}
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if 0 < shared < min(len(chosen), len(rejected)) and chosen[shared - 1] == " ":
        shared -= 1
    if shared == 0:
        raise ValueError(
            "'chosen' and 'rejected' begin with different texts; without a 'prompt' both begin with the same"
        )
    return {
        "prompt": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
        **_kept(row, "system"),
    }


def _turns(text: str) -> list[dict[str, str]]:
    """The messages of a dialogue of "Human:" and "Assistant:"; none of another text."""
    text = text if text.startswith("\n\n") else f"\n\n{text}"
    messages: list[dict[str, str]] = []
    if not text.startswith(_HUMAN):
        return []
    for part in text.split(_HUMAN)[1:]:
        asked, *answers = part.split(_ASSISTANT)
        messages.append({"role": "user", "content": asked.strip()})
        messages += [{"role": "assistant", "content": answer.strip()} for answer in answers]
    return messages


def _ranked(row: Row) -> Fields:
    """NeMo-RL's preferences: the completion of the lower rank is preferred."""
    completions = row["completions"]
    ranks = (
        [one.get("rank") for one in completions if isinstance(one, Mapping)] if isinstance(completions, list) else []
    )
    if not isinstance(completions, list) or len(ranks) != 2 or len(completions) != 2:
        raise ValueError(f"'completions' = {brief(completions)} is not valid; two of {{rank, completion}} are needed")
    if not all(isinstance(rank, int) for rank in ranks) or ranks[0] == ranks[1]:
        raise ValueError(
            f"'completions' has the ranks {ranks}; two different integers are needed, the lower is preferred"
        )
    best, worst = sorted(completions, key=lambda one: one["rank"])
    return {"prompt": row["context"], "chosen": best.get("completion"), "rejected": worst.get("completion")}


def _verl(row: Row) -> Fields:
    """verl's rows for rewards by rules: the conversation, the ground truth, and the source that chooses the reward."""
    truth = row["reward_model"]
    if not isinstance(truth, Mapping) or truth.get("ground_truth") is None:
        raise ValueError(f"'reward_model' = {brief(truth)} is not valid; {{ground_truth: ...}} is needed")
    return {"prompt": row["prompt"], "answer": truth["ground_truth"], "source": row["data_source"]}


_PROMPTS = ("train", "held_out")
_RATED = ("messages", "prompt_id", "score_*", "*-rating", "*-model", "*_score", "*_rating", "*_model")
_ULTRAFEEDBACK = ("prompt", "chosen", "rejected")

FORMS = (
    RecordForm(
        "unpaired_preference",
        "TRL's unpaired preference",
        ("answers",),
        ("prompt", "completion", "label"),
        partial(
            _renamed,
            {"prompt": "prompt", "completion": "answer", "label": "label", "system": "system", "tools": "tools"},
        ),
        ("system", "tools"),
    ),
    RecordForm(
        "prompt_completion",
        "TRL's prompt and completion",
        ("examples",),
        ("prompt", "completion"),
        partial(_renamed, {"prompt": "prompt", "completion": "answer", "system": "system", "tools": "tools"}),
        ("system", "tools"),
    ),
    RecordForm(
        "alpaca", "Alpaca's", ("examples",), ("instruction", "output"), _alpaca, ("input", "system"), ("text", "id")
    ),
    RecordForm(
        "sharegpt", "ShareGPT's", ("examples",), ("conversations",), _sharegpt, ("system", "tools"), ("id", "source")
    ),
    RecordForm(
        "ultrafeedback",
        "UltraFeedback's",
        ("pairs",),
        _ULTRAFEEDBACK,
        partial(_renamed, dict(zip(_ULTRAFEEDBACK, _ULTRAFEEDBACK, strict=True)) | {"system": "system"}),
        ("system",),
        _RATED,
        lambda row: any(key not in (*_ULTRAFEEDBACK, "system") for key in row),
    ),
    RecordForm(
        "dialogue_texts",
        "HH's dialogues as texts",
        ("pairs",),
        ("chosen", "rejected"),
        _dialogues,
        ("system",),
        (),
        _texts_alone,
    ),
    RecordForm(
        "nemo_rl_preference",
        "NeMo-RL's preference",
        ("pairs",),
        ("context", "completions"),
        _ranked,
        (),
        ("task_name", "dataset"),
    ),
    RecordForm(
        "verl",
        "verl's",
        _PROMPTS,
        ("data_source", "prompt", "reward_model"),
        _verl,
        (),
        ("ability", "extra_info", "agent_name"),
    ),
)
assert tuple(form.name for form in FORMS) == FORM_NAMES
