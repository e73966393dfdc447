"""Cases of a step on the real megatron-core held against one process."""

from __future__ import annotations

from parallel_rl.testing.pool import run_world
from tests.distributed.megatron_cases import Case
from tests.distributed.megatron_oracle import Outcome, oracle
from tests.distributed.megatron_step import compare

_OF_MODEL = ("position", "tied", "groups", "chunks", "data", "loss", "mtp", "experts", "balance", "micro_batches")
_references: dict[tuple[object, ...], Outcome] = {}


def with_references(cases: list[Case]) -> list[tuple[Case, Outcome]]:
    """Each case with its one-process outcome; each outcome is computed once a session."""
    keys = [(*case.model, case.data, case.loss, case.mtp) for case in cases]
    missing = {key: case for key, case in zip(keys, cases, strict=True) if key not in _references}
    plain = [Case(**{name: getattr(case, name) for name in _OF_MODEL}) for case in missing.values()]
    if plain:
        _references.update(zip(missing, run_world(1, oracle, plain)[0], strict=True))
    return [(case, _references[key]) for case, key in zip(cases, keys, strict=True)]


def _is_refused(case: Case) -> bool:
    """Whether this megatron-core lacks what the case needs, which `forward_backward` or Megatron's config says."""
    import megatron.core

    packed_heads, context = case.mtp and case.rows != "padded", case.experts and case.cp > 1 and not case.per_token
    return megatron.core.__version__ < "0.16" and bool(packed_heads or context or case.groups < case.tp)


def check_law(world: int, cases: list[Case], bound: float = 1e-12) -> None:
    """Assert that loss, gradient norm and every gradient of each case are those of one process, up to `bound`."""
    cases = [case for case in cases if not _is_refused(case)]
    results = run_world(world, compare, with_references(cases))
    for rank, errors in enumerate(results):
        for case, worst in zip(cases, errors, strict=True):
            bad = {name: error for name, error in worst.items() if not error < bound}
            assert not bad, f"rank {rank}, {case}: {bad}"
