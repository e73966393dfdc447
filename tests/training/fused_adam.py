"""Transformer Engine's and Apex's Adam, as far as a trainer can tell it from torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Counts its steps in its groups, leaves out groups without a parameter, and takes what theirs takes."""

    def __init__(self, params: Any, adam_w_mode: bool, **options: Any) -> None:
        assert adam_w_mode
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            if any(parameter.dtype == torch.float64 for parameter in group["params"]):
                raise RuntimeError("FusedAdam only support fp16, bf16 and fp32.")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], **group)

    @staticmethod
    def _step(
        parameter: Tensor, state: dict[str, Tensor],
        *, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_: object,
    ) -> None:  # fmt: skip
        moments = (state.setdefault(name, torch.zeros_like(parameter)) for name in ("exp_avg", "exp_avg_sq"))
        grad = parameter.grad
        assert grad is not None
        first, second = (
            moment.lerp_(x, 1 - beta) for moment, x, beta in zip(moments, (grad, grad.square()), betas, strict=True)
        )
        root = (second / (1 - betas[1] ** step)).sqrt() + eps
        parameter.mul_(1 - lr * weight_decay).sub_(lr * first / (1 - betas[0] ** step) / root)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for state in state_dict["state"].values():
            for name in state:
                {"exp_avg": 0, "exp_avg_sq": 1, "master_param": 2}[name]
        super().load_state_dict(state_dict)


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


@contextmanager
def fused_adam_installed() -> Iterator[None]:
    """Megatron finds it, as where Transformer Engine or Apex is installed."""
    from megatron.core import optimizer

    chosen = mock.patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False)
    with chosen, mock.patch.object(optimizer.distrib_optimizer, "Adam", FusedAdam):
        yield
