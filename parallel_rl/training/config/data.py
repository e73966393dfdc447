"""The section `data`: files, and how their columns are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from parallel_rl.config.strict import at_least, nearest


@dataclass(frozen=True)
class DatasetSource:
    """A data set that the library `datasets` reads, in the place of files (pip install datasets).

    Attributes:
        dataset: a folder that `save_to_disk` wrote, a file (csv, json, jsonl, parquet, arrow, also compressed), a folder of
            such files, or a name of the hub.
        name: of a configuration of the data set.
        split: that is read.
        revision: a commit of the hub's data set, which stays the same; null is the newest.
    """

    dataset: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None


Paths = DatasetSource | str | tuple[str, ...] | None

# the fields that records of each source may have under names of their own
_ASKED = ("prompt", "messages", "system", "tools")
FIELDS: Mapping[str, tuple[str, ...]] = {
    "train": (*_ASKED, "answer", "source"),
    "held_out": (*_ASKED, "answer", "source"),
    "examples": (*_ASKED, "answer", "text"),
    "pairs": (*_ASKED, "chosen", "rejected"),
    "answers": (*_ASKED, "answer", "label"),
    "solutions": (*_ASKED, "completions", "labels"),
}
# the fields of recorded rollouts, which have no other names
ROLLOUT_FIELDS = (
    "tokens",
    "logprobs",
    "mask",
    "group",
    "reward",
    "advantage",
    "staleness",
    "run",
    "segments",
    "sample_mask",
)
# forms of other frameworks, see `training.data.forms`
FORM_NAMES = (
    "unpaired_preference",
    "stepwise_supervision",
    "prompt_completion",
    "alpaca",
    "sharegpt",
    "ultrachat",
    "ultrafeedback",
    "dialogue_texts",
    "nemo_rl_preference",
    "verl",
)


@dataclass(frozen=True)
class DataConfig:
    """JSONL and Parquet files, relative to the config file; which are needed depends on the main section.

    Each is a path, a pattern (`shard_*.parquet`, `part_{000..127}.jsonl`), a list of them, or a data set that the library
    `datasets` reads: {dataset: gsm8k, name: main, split: train}. They are read a window at a time,
    however large they are; all but held_out and rollouts are shuffled in each pass.

    Attributes:
        train: prompts with answers to sample from.
        held_out: prompts with answers for the evaluation.
        examples: demonstrations for the warm-up and for SFT.
        pairs: preference pairs for DPO.
        answers: single answers that are labelled good or bad, for KTO.
        solutions: answers in steps that are labelled good or bad, for a process reward model (PRM).
        rollouts: recorded rollouts, trained on instead of sampling, in the order of the files.
        columns: the column of each field that the files name otherwise, with dots into nested ones, as in {prompt: question,
            answer: reward_model.ground_truth}; {examples.prompt: ask} is of one source alone. Then the files may have more
            columns, which a reward function gets.
        form: the form of another framework that the records have, such as ultrafeedback, alpaca, sharegpt or verl; null: the
            first record of each source tells. With a form that is named, columns that it does not read are left aside.
        map: a function of your own, module:function in a module that --import names, that is called with each record first. It
            returns the record to read, a list of records, or None, which leaves the record out; always the same for a record.
        too_long: what becomes of a prompt, an example or a pair that the model, a micro-batch or max_length has no room for:
            "error", "drop" leaves it out of the order, "truncate" cuts the end of answers and the beginning of prompts.
        max_length: tokens of the longest sequence, beside what the model and a micro-batch have room for; of a prompt with
            sampling.max_new_tokens.
        invalid: what becomes of a pair with equal or empty answers, and of a labelled answer that is empty: "error", or "drop"
            leaves it out of the order.
        system: the system text of conversations that have none.
        step_separator: a text behind each step of a solution; the step's label stands on its last token.
        mask_history: of an example's `messages` learn the last answer alone, not every one.
        buffer_megabytes: what of each is held in memory, and shuffled, at a time; one block (a Parquet row group) at least.
        check_gigabytes: how much of each is checked before the run, in blocks spread evenly over it; what lies between is
            checked when it is read. `held_out` is always checked whole.
    """

    train: Paths = None
    held_out: Paths = None
    examples: Paths = None
    pairs: Paths = None
    answers: Paths = None
    solutions: Paths = None
    rollouts: Paths = None
    columns: dict[str, str] = field(default_factory=dict)
    form: str | None = None
    map: str | None = None
    too_long: Literal["error", "drop", "truncate"] = "error"
    max_length: int | None = None
    invalid: Literal["error", "drop"] = "error"
    system: str | None = None
    step_separator: str = "\n"
    mask_history: bool = False
    buffer_megabytes: int = 64
    check_gigabytes: float = 1.0

    def __post_init__(self) -> None:
        at_least(self, buffer_megabytes=1, check_gigabytes=0)
        if self.max_length is not None:
            at_least(self, max_length=2)
        if self.invalid == "drop" and self.pairs is None and self.answers is None:
            raise ValueError("invalid = 'drop' has no effect; only data.pairs and data.answers have answers to compare")
        if self.mask_history and self.examples is None:
            raise ValueError("mask_history = True has no effect; only data.examples have answers to learn or to mask")
        if not self.step_separator:
            raise ValueError(
                "step_separator = '' is not valid; a text that is not empty is needed, such as a line break"
            )
        if self.step_separator != DataConfig.step_separator and self.solutions is None:
            raise ValueError(f"step_separator = {self.step_separator!r} has no effect; only data.solutions have steps")
        if self.form is not None and self.form not in FORM_NAMES:
            raise ValueError(f"form = {self.form!r} is not valid; {nearest(self.form, FORM_NAMES)}")
        if self.form is not None and self.columns:
            raise ValueError(f"form = {self.form!r} and columns are both given; leave one of them out")
        for key, column in self.columns.items():
            source, dot, name = key.rpartition(".")
            if dot and source not in FIELDS:
                raise ValueError(f"columns: {key!r} is not valid; before the dot {nearest(source, FIELDS)}")
            sources = [source] if dot else list(FIELDS)
            known = {one for each in sources for one in FIELDS[each]}
            if name not in known:
                raise ValueError(f"columns: {key!r} is not a field; {nearest(name, known)}")
            readers = [each for each in sources if name in FIELDS[each]]
            if all(getattr(self, each) is None for each in readers):
                raise ValueError(
                    f"columns: {key!r} has no effect; only data.{' and data.'.join(readers)} have that field"
                )
            if not all(column.split(".")):
                raise ValueError(f"columns.{key} = {column!r} is not valid; a column, or names with dots between")

    def columns_of(self, source: str) -> dict[str, str]:
        """The columns of one source's fields.

        >>> DataConfig(train="a", columns={"prompt": "question", "train.answer": "label"}).columns_of("train")
        {'prompt': 'question', 'answer': 'label'}
        """
        known = FIELDS.get(source, ())
        own = {key.rpartition(".")[2]: column for key, column in self.columns.items() if key.startswith(f"{source}.")}
        return {**{key: column for key, column in self.columns.items() if key in known}, **own}
