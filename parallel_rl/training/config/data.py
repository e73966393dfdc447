"""The section `data`: files and the names of their columns, and the fields that a loss may read from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from parallel_rl.config.strict import at_least, nearest
from parallel_rl.experience.samples import Experience
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.components import ComponentsLossFn
from parallel_rl.losses.core.requirements import Field


@dataclass(frozen=True)
class DatasetSource:
    """A data set read by the library `datasets` instead of files (pip install datasets).

    Attributes:
        dataset: a folder that `save_to_disk` wrote, a file (csv, json, jsonl, parquet, arrow, also compressed), a folder of
            such files, or a name on the hub.
        name: configuration of the data set, such as gsm8k's "main".
        split: split that is read.
        revision: commit of the hub's data set. null: the newest, which may change.
    """

    dataset: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None


Paths = DatasetSource | str | tuple[str, ...] | None

# fields of each source that `columns` may rename
_PROMPT = ("prompt", "messages", "system", "tools")
FIELDS: Mapping[str, tuple[str, ...]] = {
    "train": (*_PROMPT, "answer", "source"),
    "held_out": (*_PROMPT, "answer", "source"),
    "examples": (*_PROMPT, "answer", "text"),
    "pairs": (*_PROMPT, "chosen", "rejected"),
    "answers": (*_PROMPT, "answer", "label"),
    "solutions": (*_PROMPT, "completions", "labels"),
}
# fields of recorded rollouts, which `columns` cannot rename
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
# formats of other frameworks, see `training.data.forms`
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
    """JSONL and Parquet files, relative to the config file. The main section decides which are needed.

    Each is a path, a pattern (`shard_*.parquet`, `part_{000..127}.jsonl`), a list of them, or a data set that the library
    `datasets` reads: {dataset: gsm8k, name: main, split: train}. Files of any size are read a window at a time. All but
    held_out and rollouts are shuffled in each pass.

    Attributes:
        train: prompts with answers to sample from.
        held_out: prompts with answers for the evaluation.
        examples: demonstrations for the warm-up and for SFT.
        pairs: preference pairs for DPO.
        answers: single answers labelled good or bad, for KTO.
        solutions: answers in steps labelled good or bad, for a process reward model (PRM).
        rollouts: recorded rollouts to train on instead of sampling, in the order of the files.
        columns: column of each field that your files name differently, with dots into nested ones: {prompt: question, answer:
            reward_model.ground_truth}. {examples.prompt: ask} renames in one source only. Reward functions get extra columns.
        form: form of the records, such as ultrafeedback, alpaca, sharegpt or verl; columns that the form does not read are
            ignored. null: detected from the first record of each source.
        map: a function of your own, module:function (with --import), called with each record first. It returns a record, a list
            of records, or None to leave the record out, and always the same for the same record.
        too_long: what happens to a prompt, example or pair that does not fit the model, a micro-batch or max_length. "error"
            ends the run, "drop" leaves it out, "truncate" cuts the end of answers and the beginning of prompts.
        max_length: longest sequence in tokens, if shorter than the model and a micro-batch allow. A prompt counts with
            sampling.max_new_tokens.
        invalid: what happens to a pair with equal or empty answers, and to an empty labelled answer: "error" ends the run,
            "drop" leaves it out.
        system: system text of conversations that have none.
        step_separator: text after each step of a solution. The step's label belongs to its last token.
        last_step_only: learn only the label of a solution's last step. false: every label.
        mask_history: learn only the last answer of an example's `messages`. false: every answer.
        buffer_megabytes: data of each source that is held in memory and shuffled at a time; at least one block (row group).
        check_gigabytes: data of each source that is checked before the run, in blocks spread evenly over it. The rest is
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
    last_step_only: bool = False
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
        if self.last_step_only and self.solutions is None:
            raise ValueError("last_step_only = True has no effect; only data.solutions have steps")
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
            known = {field_name for reader in sources for field_name in FIELDS[reader]}
            if name not in known:
                raise ValueError(f"columns: {key!r} is not a field; {nearest(name, known)}")
            readers = [reader for reader in sources if name in FIELDS[reader]]
            if all(getattr(self, reader) is None for reader in readers):
                raise ValueError(
                    f"columns: {key!r} has no effect; only data.{' and data.'.join(readers)} have that field"
                )
            if not all(column.split(".")):
                raise ValueError(f"columns.{key} = {column!r} is not valid; a column, or names with dots between")

    def columns_of(self, source: str) -> dict[str, str]:
        """Return the column names of one source's fields.

        >>> DataConfig(train="a", columns={"prompt": "question", "train.answer": "label"}).columns_of("train")
        {'prompt': 'question', 'answer': 'label'}
        """
        known = FIELDS.get(source, ())
        of_source = {
            key.rpartition(".")[2]: column for key, column in self.columns.items() if key.startswith(f"{source}.")
        }
        return {**{key: column for key, column in self.columns.items() if key in known}, **of_source}


# fields of pairs besides their tokens
LABELS = "preference_labels"
PREFERENCE_FIELDS = ("reference_policy_logprobs", LABELS)
# a process reward model's labels, at the last token of each step
STEP_LABELS = "reward_labels"
# tokens that the policy read and did not sample
OBSERVED = "observation_mask"
# a teacher's fields: log-probs of the sampled tokens, and distributions
OF_TEACHER = ("teacher_token_logprobs", "teacher_logits")
# fields of recorded rollouts only, and the record keys that give them
RECORDED_FIELDS = {"run_ids": "run", "segment_ids": "segments"}
# fields that a trainer or a model gives; all others must be in the records
_PROVIDED = frozenset(
    {
        "advantages",
        "expert_mask",
        "generation_logprobs",
        "group_ids",
        "kept_ids",
        "prev_logprobs",
        "preference_margins",
        "returns",
        "rewards",
        "sample_ids",
        "temperature",
        "teacher_topk_indices",
        "teacher_topk_logits",
        "teacher_logsumexp",
        "values",
        OBSERVED,
        STEP_LABELS,
        *PREFERENCE_FIELDS,
        *OF_TEACHER,
        *RECORDED_FIELDS,
    }
)
# fields that an estimator may read
ESTIMATOR_FIELDS = (
    "rewards",
    "group_ids",
    "token_mask",
    "sample_mask",
    "prev_logprobs",
    "generation_logprobs",
    "sum_pi_squared",
    "kl",
    "values",
    "greedy_rewards",
    "teacher_token_logprobs",
)
# names with a fixed meaning in a step or in records
_RESERVED = frozenset(
    {
        "untruncated_logprobs",
        *(attribute.name for attribute in dataclasses.fields(Experience)),
        *ESTIMATOR_FIELDS,
        *(name for names in FIELDS.values() for name in names),
        *ROLLOUT_FIELDS,
        "servers",
    }
)


def user_fields(choice: LossConfig) -> tuple[Field, ...]:
    """List the fields that a loss declares and records or rewards must provide, per token or sequence.

    ValueError for a reserved name, or an alignment that records do not have.
    """
    fields = choice.requirements.fields
    extra = tuple(
        declared
        for declared in fields
        if declared.name not in _PROVIDED and declared.per in ("token", "sequence") and not declared.width
    )
    for declared in extra:
        if declared.name in _RESERVED:
            raise ValueError(
                f"loss.name = {choice.name!r} declares the field {declared.name!r}, a name that the trainer or the records use "
                "for something else; rename the field"
            )
        if declared.per == "token" and declared.alignment == "predictor":
            raise ValueError(
                f"loss.name = {choice.name!r} declares the field {declared.name!r} with alignment 'predictor'; records give "
                "values at their own tokens, so declare alignment 'token'"
            )
    return extra


def own_names(choice: LossConfig) -> tuple[str, ...]:
    return tuple(declared.name for declared in user_fields(choice))


def has_unknown_fields(choice: LossConfig) -> bool:
    """Return whether only the ranks know all fields of a loss, since they import its modules."""
    if choice.unseen:
        return True
    loss_fn = choice.build()
    return isinstance(loss_fn, ComponentsLossFn) and any(
        has_unknown_fields(component.loss) for component in loss_fn.config.components.values()
    )


def check_fields_available(
    choice: LossConfig, fields: Mapping[str, str], *, paired: bool = False, scalar_head: bool = False
) -> None:
    """Raise ValueError if a loss reads fields that the objective's data lacks.

    `fields` maps the available fields to the setting that would give each ("": none needed). Rows are (chosen,
    rejected) if `paired`; the model may have a scalar head if `scalar_head`.
    """
    if choice.unseen:
        return
    needs = choice.requirements
    if needs.paired and not paired:
        raise ValueError(
            f"loss.name = {choice.name!r} reads (chosen, rejected) pairs; the section 'preference' has them"
        )
    if needs.reads == "scalar" and not scalar_head:
        raise ValueError(f"loss.name = {choice.name!r} reads a scalar head, which the policy does not have")
    for name in needs.names:
        if fields.get(name, "-") == "":
            continue
        what = fields.get(name, f"which this section does not have ({_listed(fields)})")
        raise ValueError(f"loss.name = {choice.name!r} reads {name!r}, {what}")


def _listed(fields: Collection[str]) -> str:
    return f"it has {', '.join(fields)}" if fields else "it has tokens and masks only"
