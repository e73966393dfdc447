"""verl's losses under the law, and ours in verl's call under the law."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from parallel_rl.hosts.function_loss import FunctionLoss, on_rows
from parallel_rl.hosts.verl.loss import policy_loss
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.policy import PolicyLoss

_VERL = {"constant-length": "seq-mean-token-sum-norm"}


def verl(policy_loss: Callable[..., tuple], config: object = None, loss_agg_mode: str = "token-mean") -> FunctionLoss:
    """Adapt a verl policy loss: (old_log_prob, log_prob, advantages, response_mask, ...) → (loss, ...).

    `config.global_batch_info` is filled in as by verl's workers: dp_size 1, batch_num_tokens and global_batch_size of the whole
    step. The factor that verl multiplies and DDP divides by, the number of data ranks, is left out.

    >>> def loss(old, new, advantages, mask, mode, config):
    ...     return -(advantages * new * mask).sum() / config.global_batch_info["batch_num_tokens"], 0.0
    >>> verl(loss).fields
    ('advantages', 'prev_logprobs')
    """
    settings = SimpleNamespace(**vars(config)) if config is not None else SimpleNamespace()

    def rows(logprobs: Tensor, mask: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        old, advantages = (torch.where(mask, data[name], 0) for name in ("prev_logprobs", "advantages"))
        counts = {"dp_size": 1, "batch_num_tokens": toks, "global_batch_size": seqs}
        settings.global_batch_info = counts
        return policy_loss(old, logprobs, advantages, mask.to(logprobs), loss_agg_mode, settings)[0]

    rows.__name__ = getattr(policy_loss, "__name__", "verl")
    return on_rows(rows, ("advantages", "prev_logprobs"))


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    mode, length = "token-mean", None
    if isinstance(loss_fn, PolicyLoss):
        mode = _VERL.get(loss_fn.policy.aggregation, loss_fn.policy.aggregation)
        length = loss_fn.policy.max_length
    call = policy_loss(loss_fn)

    def with_length(*arguments: object) -> tuple[Tensor, dict[str, float]]:
        config: SimpleNamespace = arguments[-1]  # type: ignore[assignment]
        config.global_batch_info["loss_scale_factor"] = length
        return call(*arguments)

    return verl(with_length, None, mode)
