"""A teacher's logits in the chunks of the student's rows: given, or projected from its hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from parallel_rl.groups import all_gather_start, group_rank
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.linear.params import project_rows

if TYPE_CHECKING:
    from torch import Tensor

    from parallel_rl.vocab.linear.lm_head import LMHeadInput
    from parallel_rl.vocab.linear.rows import LossRows
    from parallel_rl.vocab.shards import VocabShard

#: (a span of the student's rows, their [n] places in logits order) → the teacher's logits [n, W] of the same tokens
TeacherRows = Callable[[slice, "Tensor"], "Tensor"]


def check_teacher_head(
    teacher: LMHeadInput, student: LMHeadInput, shard_of: Callable[[int], VocabShard], shard: VocabShard
) -> None:
    """Check a teacher's head against the student's, without values; hidden sizes and dtypes may differ.

    Args:
        shard_of: number of the weight's rows → their ids. shard: the student's.

    Raises:
        ValueError: inconsistent shapes or dtypes of the teacher; another device, tokens or columns than the student's;
            sequence parallelism that the student lacks; an option without effect on a teacher.
    """
    for name, value in (("mode", teacher.mode != "auto" and teacher.mode), ("budget", teacher.budget)):
        if value:
            raise ValueError(
                f"the teacher's {name} = {value!r} has no effect: both heads share the chunks that the student's {name} makes"
            )
    if teacher.main_grad_factor is not None:
        raise ValueError("the teacher's main_grad_factor has no effect, since a teacher gets no gradient; leave it out")
    if teacher.device != student.device:
        raise ValueError(f"the teacher's hidden states are on {teacher.device}, the student's on {student.device}")
    if teacher.sequence_parallel and not student.sequence_parallel:
        raise ValueError(
            "the teacher's sequence_parallel = True splits its hidden states as the student's are not split; give them whole"
        )
    try:
        teacher.check(shard.group, shard.vocab_size)
        of_teacher = shard_of(len(teacher.weight))
    except ValueError as error:
        raise ValueError(f"teacher_logits: {error}") from None
    if (of_teacher.start, of_teacher.valid) != (shard.start, shard.valid):
        raise ValueError(
            f"the teacher's head has {len(teacher.weight)} rows, which are token ids {_ids(of_teacher)}; the "
            f"student's {len(student.weight)} are token ids {_ids(shard)}, and both must be split alike"
        )


def _ids(shard: VocabShard) -> str:
    return f"[{shard.start}, {shard.start + shard.valid})"


def given_rows(logits: Tensor, shard: VocabShard) -> TeacherRows:
    return lambda span, places: logits[places, : shard.valid]


def projected_rows(
    teacher: LMHeadInput, rows: LossRows, places: Tensor, keep: Tensor, shard: VocabShard
) -> TeacherRows:
    """Project rows on demand; for rows without loss, hidden states of 0.

    Args:
        rows, places: the student's, and the place in logits order of each of its gathered rows [N].
        keep: [N] in logits order.
    """
    group, parts = shard.group, teacher.parts(shard.group)
    hidden = teacher.hidden.detach().flatten(0, -2)
    # where the teacher's hidden states hold each place: orders may differ, parts do not
    order = teacher.row_order(group).to_logits(torch.arange(len(keep), device=hidden.device))
    offset = group_rank(group) * rows.rows_per_part
    weight = teacher.weight.detach()[: shard.valid]
    bias = None if teacher.bias is None else teacher.bias.detach()[: shard.valid]

    def project(span: slice, at: Tensor) -> Tensor:
        if parts > 1:
            at = places[rows.own_gathered(span)]
        at_teacher = order[at] - offset if parts > 1 else order[at]
        chosen = torch.where(keep[at, None], hidden[at_teacher], 0)
        if parts > 1:
            chosen = all_gather_start(chosen, group).wait()
        out = torch.empty(len(chosen), shard.valid, dtype=math_dtype(chosen.dtype), device=chosen.device)
        return project_rows(chosen, weight, bias, teacher.scaled_softcap, out).mul_(teacher.logit_scale)

    return project
