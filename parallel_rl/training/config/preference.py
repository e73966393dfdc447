"""The section `preference`: pairs, or single answers with labels."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel_rl.config.strict import at_least
from parallel_rl.losses.choice import LossConfig
from parallel_rl.training.config.data import LABELS, PREFERENCE_FIELDS, check_fields_available, own_names
from parallel_rl.training.config.sections import OptimizerConfig


@dataclass(frozen=True)
class PreferenceConfig:
    """Steps on `data.pairs` or `data.answers`.

    steps: number of optimizer steps.
    optimizer: AdamW of the policy or reward model.
    pairs: pairs per step.
    answers: labelled answers per step, for a loss that reads labels (kto). If its baseline is "mismatched", each prompt
        also makes a row with the answer of another record of the step.
    loss: a loss of pairs (dpo, simpo, cpo, orpo, ...), of labelled rows (kto), or of a scalar head (preference). In pairs, kto
        takes chosen answers as desirable and rejected answers as undesirable.
    """

    steps: int
    optimizer: OptimizerConfig
    pairs: int | None = None
    answers: int | None = None
    loss: LossConfig = field(default_factory=lambda: LossConfig("dpo"))

    def __post_init__(self) -> None:
        at_least(self, steps=1)
        if (self.pairs is None) == (self.answers is None):
            raise ValueError(
                f"pairs = {self.pairs} and answers = {self.answers}: set one of them, the number of records of a step"
            )
        at_least(self, **{self.source: 1})
        check_fields_available(
            self.loss,
            dict.fromkeys((*PREFERENCE_FIELDS, *own_names(self.loss)), ""),
            paired=self.answers is None,
            scalar_head=True,
        )
        if self.answers is None:
            return
        if LABELS not in self.loss.requirements.names and not self.loss.unseen:
            raise ValueError(
                f"loss.name = {self.loss.name!r} reads no labels; only losses such as kto learn from single answers"
            )
        if self.mismatched:
            at_least(self, answers=2)

    @property
    def source(self) -> str:
        return "answers" if self.pairs is None else "pairs"

    @property
    def records(self) -> int:
        """Count the records of a step."""
        return getattr(self, self.source)

    @property
    def mismatched(self) -> bool:
        """Return whether the loss reads rows of one record's prompt and another's answer."""
        return self.loss.options.get("baseline", "mismatched") == "mismatched"

    @property
    def rows(self) -> int:
        """Count a record's rows, which stay in one micro-batch."""
        if self.answers is not None:
            return 2 if self.mismatched else 1
        return 3 if LABELS in self.loss.requirements.names else 2
