"""Known faults of megatron-core that silently change numbers: run a small step for each on the installed version."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from parallel_rl.doctor.findings import Finding
from parallel_rl.testing.pool import preload, run_world
from parallel_rl.testing.whole_step.known_faults import FAULTS, KnownFault, RunFacts
from parallel_rl.testing.whole_step.layouts import StepLayout

if TYPE_CHECKING:
    from parallel_rl.testing.whole_step.compare import Compared

_TIMEOUT = 60.0
_EXACT = 1e-5  # relative; Megatron's cross-entropy rounds to float32


def ask_faults(facts: RunFacts | None = None) -> list[Finding]:
    """Run a small step for each known fault on gloo ranks; `facts` say which faults a run reaches."""
    preload("parallel_rl.megatron", "parallel_rl.doctor.fault_steps", "parallel_rl.testing.whole_step.worlds")
    return [_finding(fault, facts) for fault in FAULTS if fault.name in _CHECKS]


def _finding(fault: KnownFault, facts: RunFacts | None) -> Finding:
    subject = f"{fault.name} ({fault.reference})"
    try:
        shown = _CHECKS[fault.name]()
    except Exception as error:  # another version's signature, or a part that it lacks
        return Finding(subject, "note", f"the case fails on this version: {str(error).splitlines()[0][:160]}")
    if not shown:
        return Finding(subject, "ok", "a small run of the installed megatron-core does not show it")
    if facts is None:
        return Finding(subject, "warning", shown, f"a loop of your own meets it; parallel_rl: {fault.avoided}")
    if not fault.reaches(facts):
        return Finding(subject, "note", f"{shown}; this run's config does not reach it")
    return Finding(subject, "note", f"{shown}; this run's config reaches it, and its step avoids it: {fault.avoided}")


def _gathered() -> str:
    seen = _step("gathered", "tiny_config", StepLayout(tp=2), callback=True)
    off = abs(seen.loss_shift - math.log(2)) < 0.1
    return f"at TP 2 the loss is {seen.loss_shift:.2f} too large, near log 2, and its gradient is wrong" if off else ""


def _heads() -> str:
    """Compare the heads' gradients of four micro-batches, or two context ranks, with one."""
    shown = []
    for per_token in (False, True):
        for layout in (StepLayout(per_token=per_token), StepLayout(cp=2, per_token=per_token, micro=1)):
            seen = _step("plain", "heads", layout, callback=True)
            worst = max((error.error for error in seen.gradients if error.name.startswith("mtp.")), default=0.0)
            if worst > _EXACT:
                where = "four micro-batches" if layout.cp == 1 else "CP 2"
                shown.append(f"by {worst:.1g} on {where} with calculate_per_token_loss = {per_token}")
    return f"gradients of the heads differ from one process {', '.join(shown)}" if shown else ""


def _recomputed() -> str:
    seen = _step("plain", "heads_recomputed", StepLayout(tp=2, recompute=True, micro=1), callback=True)
    return f"gradients differ by {seen.gradient:.1g} at TP 2" if seen.gradient > _EXACT else ""


def _padding_mask() -> str:
    shown = []
    for layout in (StepLayout(tp=2, sp=True), StepLayout(pp=2)):
        seen = _step("plain", "experts", layout, forward=True)
        if seen.gradient > _EXACT:
            shown.append(f"by {seen.gradient:.1g} on {layout.name}")
    return f"gradients differ from one process {', '.join(shown)}" if shown else ""


def _sinks() -> str:
    seen = _step("with_sinks", "sinks", StepLayout(tp=2), callback=True)
    marked = not seen.unmarked
    return "" if marked else f"they are not marked as cut: at TP 2 the norm that clips is × {seen.norm_factor:.6g}"


def _balance() -> str:
    shown = []
    for layout in (StepLayout(tp=2, sp=True), StepLayout(cp=2)):
        seen = _step("plain", "experts", layout, callback=True)
        if any(".router." in error.name for error in seen.gradients):
            shown.append(f"{seen.gradient:.1g} on {layout.name}")
    return f"gradients of routers differ from one process by {', '.join(shown)}" if shown else ""


def _packed_balance() -> str:
    from parallel_rl.doctor.fault_steps import packed_balance

    [off] = run_world(1, _on_rank, packed_balance, timeout=_TIMEOUT)
    return f"the balance within sequences differs by {off:.1g} between packed and padded rows" if off > _EXACT else ""


def _on_rank(rank: int, work: Callable[[], float]) -> float:
    return work()


def _step(provider: str, config: str, layout: StepLayout, *, callback: bool = False, forward: bool = False) -> Compared:
    from parallel_rl.doctor import fault_steps
    from parallel_rl.testing.whole_step.ranks import PoolRanks
    from parallel_rl.testing.whole_step.subject import StepSubject
    from parallel_rl.testing.whole_step.worlds import Worlds

    subject = StepSubject(
        getattr(fault_steps, provider),
        getattr(fault_steps, config),
        fault_steps.masked_experts if forward else None,
        fault_steps.token_sums if callback else None,
    )
    worlds = Worlds(subject, 2, torch.float64, PoolRanks(_TIMEOUT))
    seen = worlds.compared(layout, layout.truth(config == "experts"))
    if seen.error:
        raise RuntimeError(seen.error)
    return seen


_CHECKS: dict[str, Callable[[], str]] = {  # by the fault's name; `contracts` runs the others
    "gathered logits": _gathered,
    "loss of multi-token prediction": _heads,
    "recomputed heads with distributed activations": _recomputed,
    "padding mask of experts": _padding_mask,
    "attention sinks": _sinks,
    "routers' own losses": _balance,
    "balance within packed sequences": _packed_balance,
}
