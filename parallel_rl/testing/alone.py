"""Checks of a loss on one process: positions of its gradient, its derivative, its claims."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel_rl.agreement import describe
from parallel_rl.counts import count_valid
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.call import LossCall
from parallel_rl.losses.core.run import read
from parallel_rl.testing.batches import POISON, carries_loss, poisoned
from parallel_rl.testing.cases import (
    Batch,
    Expected,
    Subject,
    Trial,
    alone,
    empty_rows_on_purpose,
    expected,
    step_statistics,
)
from parallel_rl.testing.observe import relative
from parallel_rl.vocab.stats import TokenStats


def false_claims(loss_fn: LossFn, batch: Batch) -> tuple[str, ...]:
    """List the false claims among `token_separable` and `on_policy`."""
    findings = []
    needs = loss_fn.requirements
    if needs.token_separable and needs.reads == "log-probs" and not loss_fn.options.truncation:
        moved = influence(loss_fn, token_batch(loss_fn, batch))
        if moved > 1e-9:
            findings.append(
                f"token_separable: the gradient of a token moves by {moved:.1e} of the largest when other tokens do, so "
                "gradients computed in forward would be wrong"
            )
    if loss_fn.on_policy and "prev_logprobs" in batch.data and (moved := _reads_old_policy(loss_fn, batch)) > 1e-9:
        findings.append(
            f"on_policy: the gradient moves by {moved:.1e} with prev_logprobs, so the loss reads an old policy"
        )
    return tuple(findings)


def _reads_old_policy(loss_fn: LossFn, batch: Batch) -> float:
    """Return the gradient's relative change with the old policy's log-probs."""
    g = torch.Generator().manual_seed(3)
    old = batch.data["prev_logprobs"]
    moved = {**batch.data, "prev_logprobs": old + 0.3 * torch.randn(old.shape, generator=g).to(old)}
    before, after = (_gradient(loss_fn, batch.logits, data) for data in (batch.data, moved))
    return float((after - before).norm() / before.norm().clamp(min=1e-12))


def _gradient(loss_fn: LossFn, logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    leaf, counts = logits.clone().requires_grad_(), count_valid(data)
    call = (leaf, data, *counts)
    loss, _ = loss_fn(*call, statistics=step_statistics([(loss_fn, call)]))
    return torch.autograd.grad(loss, leaf)[0]


def token_batch(loss_fn: LossFn, batch: Batch) -> TokenBatch:
    """Make the objective's `TokenBatch` of the whole batch."""
    counts = count_valid(batch.data)
    statistics = step_statistics([(loss_fn, (batch.logits, batch.data, *counts))])
    return read(loss_fn, LossCall(batch.logits, batch.data, *counts, statistics=statistics)).batch


def influence(loss_fn: LossFn, batch: TokenBatch) -> float:
    """Return the largest relative change of tokens' gradients when other tokens change."""
    g = torch.Generator().manual_seed(0)
    tokens = batch.mask.numel()
    base, worst = gradients(loss_fn, batch, torch.zeros(tokens, dtype=torch.float64)), 0.0
    for size in (0.05, 1.0, -3.0):
        for _ in range(4):
            moved = torch.rand(tokens, generator=g) < 0.5
            shifted = gradients(loss_fn, batch, torch.where(moved, size, 0.0).double())
            for before, after in zip(base, shifted, strict=True):
                scale = max(x.abs().max().item() for x in base)
                worst = max(worst, (after - before)[~moved].abs().max().item() / scale)
    return worst


def gradients(loss_fn: LossFn, batch: TokenBatch, change: Tensor) -> list[Tensor]:
    """Return gradients of log-probs and entropies after adding `change` to both, with fixed statistics."""
    assert batch.output.stats is not None
    leaves = [
        None if x is None else (x + torch.where(batch.mask, change, 0)).detach().requires_grad_()
        for x in batch.output.stats
    ]
    loss, _ = loss_fn.compute(replace(batch, output=ModelOutput(TokenStats(*leaves))))  # type: ignore[arg-type]
    present = [x for x in leaves if x is not None]
    computed = torch.autograd.grad(loss, present, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(computed, present, strict=True)]


_DIRECTIONS, _STEP = 6, 1e-6


class Alone(NamedTuple):
    """Findings of one process."""

    want: Expected | None  # loss, gradient and metrics; None if the loss raised
    error: str = ""  # its exception
    where: str = ""  # "": gradient at predicting positions; "unshifted": at each token's own; else "elsewhere"
    poison: str = ""  # effect of NaN, inf and wild ids at masked places: "", "loss", "gradient" (NaN) or an error
    derivative: float = math.nan  # relative difference of the gradient and finite differences; NaN if unavailable
    permuted: float = math.nan  # relative change under permuted rows; NaN if unavailable
    doubled: float = math.nan  # relative change with every row twice; NaN if unavailable
    empty: str = ""  # fault of a fully masked batch
    claims: tuple[str, ...] = ()  # false claims of the loss


@empty_rows_on_purpose()
def check_alone(rank: int, case: Subject, batch: Batch) -> Alone:
    """Run all single-process checks."""
    try:
        want = expected(case, batch)
        loss_fn = case.build()
        return Alone(
            want,
            where=_where(case, batch, want),
            poison=_poison(case, batch, want),
            derivative=_tried(lambda: _derivative_error(case, batch)),
            permuted=_tried(lambda: _permuted(case, batch, want)),
            doubled=math.nan if loss_fn.needs_statistics else _tried(lambda: _doubled(case, batch, want)),
            empty=_empty(case, batch),
            claims=false_claims(loss_fn, batch) if isinstance(loss_fn, LossFn) else (),
        )
    except (Exception, SystemExit) as error:
        return Alone(None, describe(error))


def _tried(check: Callable[[], float]) -> float:
    try:
        return check()
    except Exception:
        return math.nan


def _where(case: Subject, batch: Batch, want: Expected) -> str:
    data = batch.data
    extra = (want.gradient != 0).any(-1) & ~carries_loss(data, case.build())
    if not bool(extra.any()):
        return ""
    scored = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    return "unshifted" if not bool((extra & ~scored).any()) else "elsewhere"


def _poison(case: Subject, batch: Batch, want: Expected) -> str:
    loss_fn = case.build()
    carries = carries_loss(batch.data, loss_fn)
    bad = torch.tensor(POISON).repeat(carries.numel())[: carries.numel()].view(*carries.shape, 1).to(batch.logits)
    dirty = batch._replace(
        logits=torch.where(carries[..., None], batch.logits, bad), data=poisoned(batch.data, loss_fn)
    )
    try:
        got = expected(case, dirty)
    except Exception as error:
        return describe(error)
    if not relative(got.loss, want.loss, 1e-3) <= 1e-9:
        return "loss"
    return "" if bool((got.gradient - want.gradient).abs().max() <= 1e-9) else "gradient"


class _DetachNothing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.Tensor.detach, torch.detach):
            return args[0].view_as(args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _stop_gradients_lifted() -> Iterator[None]:
    """Disable stop-gradients, so that a loss's gradient is its derivative."""
    enter, leave = torch.no_grad.__enter__, torch.no_grad.__exit__
    torch.no_grad.__enter__ = lambda self: None  # type: ignore[method-assign]
    torch.no_grad.__exit__ = lambda self, *error: None  # type: ignore[method-assign]
    try:
        with _DetachNothing():
            yield
    finally:
        torch.no_grad.__enter__, torch.no_grad.__exit__ = enter, leave  # type: ignore[method-assign]


def _derivative_error(case: Subject, batch: Batch) -> float:
    """Return the median error over some directions, since one may cross a kink of the loss."""
    leaf = batch.logits.clone().requires_grad_()
    with _stop_gradients_lifted():
        loss, _ = alone(case, leaf, batch.data)
    [gradient] = torch.autograd.grad(loss, leaf)
    carries = carries_loss(batch.data, case.build())[..., None]
    g, errors = torch.Generator().manual_seed(1), []
    for _ in range(_DIRECTIONS):
        direction = torch.where(carries, torch.randn(leaf.shape, generator=g, dtype=torch.float64), 0)
        high, low = (alone(case, batch.logits + sign * _STEP * direction, batch.data)[0].item() for sign in (1, -1))
        errors.append(abs((high - low) / (2 * _STEP) - (gradient * direction).sum().item()))
    return sorted(errors)[len(errors) // 2] / max(gradient.norm().item(), 1e-12)


def _rows(batch: Batch, rows: Tensor) -> Batch:
    data = {name: value[rows] for name, value in batch.data.items()}
    return Batch(batch.logits[rows], data, [batch.lengths[i] for i in rows.tolist()])


def _difference(got: Expected, loss: float, gradient: Tensor) -> float:
    return max(
        relative(got.loss, loss, 1e-3), float((got.gradient - gradient).norm() / gradient.norm().clamp(min=1e-12))
    )


def _permuted(case: Subject, batch: Batch, want: Expected) -> float:
    order = torch.randperm(batch.rows // 2, generator=torch.Generator().manual_seed(2))
    rows = torch.stack([2 * order, 2 * order + 1], 1).flatten()  # keeps pairs together
    return _difference(expected(case, _rows(batch, rows)), want.loss, want.gradient[rows])


def _doubled(case: Subject, batch: Batch, want: Expected) -> float:
    rows = torch.arange(batch.rows).repeat(2)
    return _difference(expected(case, _rows(batch, rows)), want.loss, want.gradient.repeat(2, 1, 1) / 2)


def _empty(case: Subject, batch: Batch) -> str:
    data = batch.data | {"sample_mask": torch.zeros_like(batch.data["sample_mask"])}
    leaf = batch.logits.clone().requires_grad_()
    try:
        loss, _ = alone(case, leaf, data)
        if loss.item() != 0:
            return f"the loss of a fully masked batch is {loss.item():g}, not 0"
        loss.backward()
    except Exception as error:
        return f"a fully masked batch raises {describe(error)}"
    return "" if leaf.grad is not None and not leaf.grad.any() else "a fully masked batch has a gradient"


def trial_of(case: Subject, batch: Batch, result: Alone) -> Trial:
    """Make the trial for the layouts, without poison if one process failed on it."""
    assert result.want is not None
    return Trial(case, batch, result.want, clean=bool(result.poison or result.where))
