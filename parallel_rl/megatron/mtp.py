"""Multi-token prediction: heads that predict the tokens after the next one, and their loss under the law."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.megatron.capabilities import heads_recompute_packed_rows
from parallel_rl.metrics import Metrics
from parallel_rl.vocab.linear.lm_head import LMHeadInput

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams

    from parallel_rl.losses.core.call import LossCall
    from parallel_rl.losses.nll import NLLLoss


@contextlib.contextmanager
def heads_running(model: GPTModel, wanted: bool) -> Iterator[None]:
    """Append the heads' output to the model's, or turn the heads off, in a `with` block.

    Megatron's own loss of the heads, whose labels do not fit our packing, is off: no head is named after the block is done.
    """
    count, block = model.config.mtp_num_layers, getattr(model, "mtp", None)

    def hide(*_: object) -> None:
        model.config.mtp_num_layers = None
        model.mtp_process = False

    handle = block.register_forward_hook(hide) if block is not None and wanted else None
    if handle is None:
        hide()
    layers = [] if block is None or heads_recompute_packed_rows() else block.layers
    for layer in layers:
        layer._checkpointed_forward = partial(_checkpointed, layer._checkpointed_forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer._checkpointed_forward
        model.config.mtp_num_layers = count
        model.mtp_process = block is not None
        if handle is not None:
            handle.remove()


def _checkpointed(
    megatrons: Callable[..., Tensor],
    forward: Callable[..., Tensor],
    *,
    packed_seq_params: PackedSeqParams | None,
    **inputs: Tensor | None,
) -> Tensor:
    """Let Megatron's recomputation of a head, which saves tensors only, pass packed rows through."""

    def on_packed_rows(*values: Tensor | None) -> Tensor:
        return forward(**dict(zip(inputs, values, strict=True)), packed_seq_params=packed_seq_params)

    return megatrons(on_packed_rows, **inputs)


def split_heads(output: Tensor, heads: int, parts: int) -> list[Tensor]:
    """Split [B, (1 + heads)·S, ...] into the model's own output and that of each head, [B, S, ...] each.

    `parts`: tensor ranks whose parts of the sequence, each with all heads, follow each other; 1 for one rank's output.

    >>> [x.tolist() for x in split_heads(torch.arange(4).view(1, 4, 1), heads=1, parts=1)]
    [[[[0], [1]]], [[[2], [3]]]]
    """
    batch, total, *rest = output.shape
    cut = output.view(batch, parts, 1 + heads, total // (1 + heads) // parts, *rest)
    return [part.reshape(batch, -1, *rest) for part in cut.unbind(2)]


def ahead(data: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Shift the data for a head `depth` tokens beyond the next: column t holds token t + depth.

    >>> data = {"input_ids": torch.tensor([[5, 6, 7]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> ahead(data, 1)["token_mask"]
    tensor([[1., 1., 0.]])
    """
    fields = {name: data[name] for name in ("input_ids", "token_mask", "token_weights") if name in data}
    moved = {name: torch.nn.functional.pad(field[:, depth:], (0, depth)) for name, field in fields.items()}
    return {**moved, "sample_mask": data["sample_mask"]}


def add_mtp_loss(
    loss: tuple[Tensor, Metrics], loss_fn: NLLLoss, call: LossCall, outputs: list[Tensor | LMHeadInput], scale: float
) -> tuple[Tensor, Metrics]:
    """Add this rank's part of (scale / K)·Σ_k NLL_k to a loss, and `mtp_k/loss` of K heads to its metrics.

        NLL_k = AGG(−log π_k(y_{t+1+k} | y_{≤t+k})),  with the step's global counts: a part that obeys the law

    A loss token counts for a head if the token is in the same sequence, so not prompts, padding or the next packed sequence.
    Paper: DeepSeek-V3, arXiv 2412.19437.

    Args:
        loss: this rank's part of the model's own loss, and its metrics. call: of the model's own loss.
        outputs: of the heads, in order. scale: λ, Megatron's `mtp_loss_scaling_factor`.
    """
    losses, (main, metrics) = [], loss
    parts = {name: metrics.parts(name) for name in metrics}
    for depth, output in enumerate(outputs, 1):
        loss_of_head, metrics_of_head = loss_fn.run(
            replace(call, output=output, data=ahead(call.data, depth), statistics=None)
        )
        losses.append(loss_of_head)
        parts[f"mtp_{depth}/loss"] = metrics_of_head.parts("loss")
    return main + torch.stack(losses).sum() * (scale / len(losses)), Metrics(parts)
