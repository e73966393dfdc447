"""A loss as `compute_loss_func` of Hugging Face's Trainer (transformers 5).

The Trainer's hidden factor: with average_tokens_across_devices (its default) it multiplies the loss by the number of processes,
which DDP divides by, and `num_items_in_batch` counts the step's tokens. Otherwise each process averages over its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

from parallel_rl.groups import ParallelGroups
from parallel_rl.hosts.function_loss import FunctionLoss, named, row_logprobs
from parallel_rl.hosts.scaling import check_fits, unit_of
from parallel_rl.losses.core.base import LossFn

_IGNORE = -100


class _Output(Protocol):
    logits: Tensor


def compute_loss_func(loss_fn: LossFn, groups: ParallelGroups | None = None) -> Callable[..., Tensor]:
    """Wrap a loss on tokens alone, e.g. `NLLLoss`, as the `compute_loss_func` of a Trainer.

    >>> from types import SimpleNamespace
    >>> from parallel_rl import NLLLoss
    >>> call = compute_loss_func(NLLLoss())
    >>> labels = torch.tensor([[-100, 1, 2]])
    >>> round(call(SimpleNamespace(logits=torch.zeros(1, 3, 4)), labels, num_items_in_batch=2).item(), 4)
    1.3863

    Args:
        groups: tensor ranks that split the vocabulary, as a DTensor or plain shards; None: whole logits.

    Raises:
        ValueError: a loss that reads fields of the data, or is not divided by tokens. In a call: no labels; a count for each
            of several devices (`nn.DataParallel`).
    """
    check_fits("Hugging Face's Trainer", loss_fn, (), entropy=True)
    name, unit = type(loss_fn).__name__, unit_of(loss_fn)
    if unit != "tokens":
        raise ValueError(
            f"{name} is divided by {unit or 'neither count, or by both'}; Hugging Face's Trainer counts tokens only"
        )

    where = groups or ParallelGroups()

    def call(outputs: _Output, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        if labels is None:
            raise ValueError("labels = None: the batches must have labels [B, S], −100 where nothing is scored")
        logits = outputs.logits
        if logits.shape[:2] != labels.shape:
            raise ValueError(
                f"logits have shape {list(logits.shape)}, labels {list(labels.shape)}; they must be [B, S, V], [B, S]"
            )
        scored = labels != _IGNORE
        count = scored[:, 1:].sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        if count.numel() != 1:
            raise ValueError(
                f"num_items_in_batch has shape {list(count.shape)}, one count a device of nn.DataParallel; start one process a "
                "device (torchrun, accelerate launch)"
            )
        data = {
            "input_ids": torch.where(scored, labels, 0),
            "token_mask": scored,
            "sample_mask": torch.ones(len(labels), dtype=torch.bool, device=labels.device),
        }
        unused = torch.ones((), device=labels.device)
        loss, _ = loss_fn(logits, data, unused, count.reshape(()).clamp(min=1), where.tp_rank, where.tensor)
        return loss

    return call


def hugging_face(compute_loss_func: Callable[..., Tensor]) -> FunctionLoss:
    """Adapt a `compute_loss_func` of Trainer and TRL: (outputs, labels, num_items_in_batch) → loss.

    `outputs.logits` [B, S, V], `labels` [B, S] with −100 at masked places, the count of the whole accumulation. The factor that
    the Trainer multiplies and DDP divides by, the number of processes, is left out.

    >>> def loss(outputs, labels, num_items_in_batch=None):
    ...     return torch.nn.functional.cross_entropy(
    ...         outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
    >>> hugging_face(loss).name
    'loss'
    """

    def run(logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        _, mask = row_logprobs(logits, data)
        labels = torch.where(mask, data["input_ids"], -100)
        return compute_loss_func(SimpleNamespace(logits=logits), labels, num_items_in_batch=toks)

    return named(compute_loss_func, run, ())


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    return hugging_face(compute_loss_func(loss_fn))
