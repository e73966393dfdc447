"""Rounding of a float32 step, measured against a run in float64."""

from __future__ import annotations

import math

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel_rl.testing.whole_step.compare import compare
from parallel_rl.testing.whole_step.layouts import StepLayout
from parallel_rl.testing.whole_step.run import run_layout, run_truth
from parallel_rl.testing.whole_step.subject import StepSubject, Truth

_MOST_KINDS = 6  # of modules that are kept in float32


def measure_rounding(
    subject: StepSubject, config: TransformerConfig, layout: StepLayout, timeout: float
) -> tuple[float, tuple[str, ...]]:
    """Compare float32 with float64 on one process; return the largest error and the float32 classes."""
    truth, kinds = _run_in_float64(subject, config, layout, timeout)
    seen = compare(layout, [run_layout(subject, config, layout, truth, torch.float32, timeout)], truth, 0.0)
    errors = (seen.loss, seen.gradient, seen.norm, seen.weights, *seen.metrics.values())
    return (max(errors) if all(map(math.isfinite, errors)) else math.inf), kinds


def _run_in_float64(
    subject: StepSubject, config: TransformerConfig, layout: StepLayout, timeout: float
) -> tuple[Truth, tuple[str, ...]]:
    """Run one process in float64; keep modules whose forward refuses float64 in float32."""
    kinds: tuple[str, ...] = ()
    while True:
        try:
            return run_truth(subject, config, layout, torch.float64, timeout, single=kinds), kinds
        except Exception as error:
            kind = _refusing_kind(error)
            if not kind or kind in kinds or len(kinds) == _MOST_KINDS:
                raise
            kinds = (*kinds, kind)


def _refusing_kind(error: Exception) -> str:
    """Return the class of the innermost module whose forward raised; "" for the whole model or none."""
    kind, trace = "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "forward" and isinstance(module, torch.nn.Module):
            kind = "" if hasattr(module, "module") or hasattr(module, "vocab_size") else type(module).__name__
        trace = trace.tb_next
    return kind
