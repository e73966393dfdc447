"""NeMo-RL's losses under the law, and ours in NeMo-RL's call under the law."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parallel_rl.hosts.function_loss import FunctionLoss, named, row_logprobs
from parallel_rl.hosts.nemo_rl.loss import HostLoss
from parallel_rl.losses.core.base import LossFn


def nemo_rl(loss: Callable[..., tuple], fields: tuple[str, ...] = ()) -> FunctionLoss:
    """Adapt a NeMo-RL loss: (next_token_logprobs, data, valid_seqs, valid_toks) → (loss, metrics).

    next_token_logprobs [B, S − 1]; `data` has the masks, input_ids and `fields`, 0 outside the loss tokens. Left out are
    metrics with _min or _max in their names, which NeMo-RL does not sum, and the factors of Megatron and context ranks, which
    it undoes.

    >>> def loss(next_token_logprobs, data, global_valid_seqs, global_valid_toks):
    ...     return -next_token_logprobs.sum() / global_valid_toks, {}
    >>> nemo_rl(loss).name
    'loss'
    """

    def run(
        logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor
    ) -> tuple[Tensor, Mapping[str, float]]:
        logprobs, mask = row_logprobs(logits, data)
        fields_of_call = {name: torch.where(mask, data[name], 0) for name in ("input_ids", *fields)}
        fields_of_call |= {"token_mask": mask.to(logits), "sample_mask": data["sample_mask"].to(logits)}
        value, metrics = loss(
            next_token_logprobs=logprobs[:, 1:], data=fields_of_call, global_valid_seqs=seqs, global_valid_toks=toks
        )
        return value, {name: x for name, x in metrics.items() if not ("_min" in name or "_max" in name)}

    return named(loss, run, fields)


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    return nemo_rl(HostLoss(loss_fn), loss_fn.requirements.names)
