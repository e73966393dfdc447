"""Fields that the data of a section provides, and the check that a loss reads no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from parallel_rl.experience.samples import Experience
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.components import ComponentsLossFn
from parallel_rl.losses.core.requirements import Field
from parallel_rl.training.config.data import FIELDS, ROLLOUT_FIELDS

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


def own_fields(choice: LossConfig) -> tuple[Field, ...]:
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
    return tuple(declared.name for declared in own_fields(choice))


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
