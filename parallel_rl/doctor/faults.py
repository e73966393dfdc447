"""Contracts and known faults of megatron-core: run a small case of each on the installed version."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.doctor import Finding, Severity
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
        return Finding(subject, "ok", "a small run of the installed megatron-core is not affected")
    if facts is None:
        return Finding(subject, "warning", shown, f"affects a training loop of your own; parallel_rl: {fault.avoided}")
    if not fault.reaches(facts):
        return Finding(subject, "note", f"{shown}; not triggered by this run's config")
    return Finding(
        subject, "note", f"{shown}; triggered by this run's config, and avoided by its step: {fault.avoided}"
    )


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


_SPARE = "parallel_rl does not call it"


def ask_contracts() -> list[Finding]:
    """Run the cases on two gloo ranks of this machine; report those that a version cannot run."""
    preload("parallel_rl.megatron")
    answers: list[dict[str, object]] = run_world(2, _rank)
    return [judge([answer[name] for answer in answers]) for name, (_, judge) in _CASES.items()]


def _rank(rank: int) -> dict[str, object]:
    answers: dict[str, object] = {}
    for name, (ask, _) in _CASES.items():
        try:
            answers[name] = ask(rank)
        except Exception as error:  # another version's signature
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def _groups(rank: int) -> object:
    import parallel_rl.megatron as M
    from parallel_rl.groups import ParallelGroups

    seen = []
    for sizes in ({"tp": 2}, {"cp": 2}, {}):
        M.initialize(**sizes)
        groups = ParallelGroups.from_megatron()
        seen.append((groups.tp_size, groups.cp_size, groups.dp_size))
    M.destroy()
    return seen == [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


def _scaling(rank: int) -> object:
    """Return the weights at CP 2 of a three-value callback's token sum, with 1 and 3 valid tokens."""
    tokens = torch.tensor([1, 3][rank], dtype=torch.int)
    return _scaled((tokens, {}), per_token=False, micro_batches=1) / 2  # DDP averages over both context ranks


def _two_values(rank: int) -> object:
    return _scaled(({},), per_token=True, micro_batches=4)


def _scaled(rest: tuple[object, ...], per_token: bool, micro_batches: int) -> float:
    """Return Megatron's scaled loss at CP 2, for a loss of 1 that a callback returns with `rest`."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    config = SimpleNamespace(
        calculate_per_token_loss=per_token, timers=None, num_moe_experts=None, mtp_num_layers=None, grad_scale_func=None
    )
    out = forward_step_calc_loss(
        None, torch.ones(()), lambda x: (x.clone(), *rest), config, None, False, micro_batches, [], cp_group_size=2,
        is_last_stage=True,
    )  # fmt: skip
    return float(out[0])


def _logits(rank: int) -> tuple[Tensor, Tensor]:
    whole = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(0))
    return whole.chunk(2, -1)[rank].contiguous(), torch.tensor([[0], [3], [5], [6]])


@contextlib.contextmanager
def _cross_entropy() -> Iterator[Callable[..., Tensor]]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    import parallel_rl.megatron as M

    M.initialize(tp=2)
    yield vocab_parallel_cross_entropy
    M.destroy()


def _overwrites(rank: int) -> object:
    logits, targets = _logits(rank)
    before = logits.clone()
    with _cross_entropy() as cross_entropy:
        cross_entropy(logits, targets)
    return not torch.equal(before, logits)


def _smoothing(rank: int) -> object:
    with _cross_entropy() as cross_entropy:
        losses = cross_entropy(*_logits(rank), label_smoothing=0.1).flatten()
        both = [torch.empty_like(losses) for _ in range(2)]
        dist.all_gather(both, losses)
    return float((both[0] - both[1]).abs().max())


def _padding(rank: int) -> object:
    """Return how far log-probs fall with one padding column a rank, whose logits are 0."""
    logits, _ = _logits(rank)
    targets = torch.zeros(4, 1, dtype=torch.int64)
    with _cross_entropy() as cross_entropy:
        plain = cross_entropy(logits.clone(), targets)
        padded = cross_entropy(torch.nn.functional.pad(logits, (0, 1)), targets)
    return float((padded - plain).abs().max())


Judge = Callable[[list[object]], Finding]


def _judged(
    subject: str,
    bad: Callable[[list[object]], bool],
    text: Callable[[list[object]], str],
    severity: Severity,
    advice: str,
) -> Judge:
    def judge(answers: list[object]) -> Finding:
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            return Finding(subject, "note", f"the case fails on this version: {failed[0]}")
        if bad(answers):
            return Finding(subject, severity, text(answers), advice)
        return Finding(subject, "ok", "as expected")

    return judge


def _floats(answers: list[object]) -> list[float]:
    return [float(answer) for answer in answers]  # type: ignore[arg-type]


_ENTROPY = "vocab_parallel_cross_entropy"
_CASES: dict[str, tuple[Callable[[int], object], Judge]] = {
    "groups": (_groups, _judged(
        "groups of tensor, context and data ranks", lambda a: not all(a), lambda a: "not those that parallel_rl expects",
        "error", "no run is safe on this version: report it with its number")),
    "two values": (_two_values, _judged(
        "loss callback of two values at CP 2, 4 micro-batches", lambda a: _floats(a) != [0.5, 0.5],
        lambda a: f"scaled by {_floats(a)}, not by CP/M = 0.5", "error", "megatron_loss_func would undo another factor")),
    "three values": (_scaling, _judged(
        "loss callback of three values without calculate_per_token_loss at CP 2", lambda a: len(set(_floats(a))) > 1,
        lambda a: f"divides by each context rank's own tokens: weights {_floats(a)[0]:.3f}, {_floats(a)[1]:.3f} for 1 and 3",
        "warning", "a loop of your own returns two values, or sets calculate_per_token_loss; megatron_loss_func does")),
    "overwrites": (_overwrites, _judged(
        f"{_ENTROPY} in float32", any, lambda a: "overwrites the caller's logits", "warning",
        f"an entropy that is computed from them afterwards is wrong; {_SPARE}")),
    "smoothing": (_smoothing, _judged(
        f"{_ENTROPY} with label smoothing", lambda a: max(_floats(a)) > 1e-6,
        lambda a: f"losses differ between tensor ranks by {max(_floats(a)):.3f}", "warning",
        f"do not smooth under TP; {_SPARE}")),
    "padding": (_padding, _judged(
        f"{_ENTROPY} with a padded vocabulary", lambda a: max(_floats(a)) > 1e-6,
        lambda a: f"counts the padding columns: losses off by {max(_floats(a)):.3f} nats here", "warning",
        f"log-probs of a trainer and of its sampler differ; {_SPARE}: losses take vocab_size=")),
}  # fmt: skip
