"""Batches and one process's numbers of the law's cases, by dense references where there are such."""

from __future__ import annotations

from functools import partial

import torch

from parallel_rl.testing import cases
from parallel_rl.testing.batches import make_batch
from parallel_rl.testing.cases import Batch, Case, Expected, Reference
from tests import reference, reference_distillation, reference_heads, reference_preference

_REFERENCES: dict[str, Reference] = {
    "nll": reference.nll,
    "preference": reference_heads.preference,
    "value": reference_heads.value,
    "prm": reference_heads.prm,
    "dpo": reference_preference.dpo,
    "simpo": reference_preference.simpo,
    "cpo": reference_preference.cpo,
    "kto": reference_preference.kto,
    "clipped_pg": reference.clipped_pg,
    "distillation": reference_distillation.distillation,
    "full_distillation": reference_distillation.full_distillation,
}


def batch_of(
    case: Case, seed: int = 5, half_masked: bool = False, dtype: torch.dtype = torch.float64, shift: float = 0.0
) -> Batch:
    """A batch that suits the case's loss and options."""
    return make_batch(seed, half_masked, case.loss, dtype, shift, truncated=case.truncated)


def reference_of(case: Case, dtype: torch.dtype = torch.float64) -> Reference | None:
    """The dense reference of the case's loss; there is none for a truncated policy, weights of tokens, or measured overlap."""
    if case.options or "token_weights" in case.config or "overlap" in case.config:
        return None
    if case.loss == "orpo":  # what a certain response counts depends on the digits that its log-prob has
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        return partial(reference_preference.orpo, eps=eps)
    return _REFERENCES.get(case.loss)


def expected(case: Case, batch: Batch, dtype: torch.dtype = torch.float64) -> Expected:
    """The numbers of one process, by the dense reference where there is one, for logits that came in `dtype`."""
    return cases.expected(case, batch, reference_of(case, dtype))
