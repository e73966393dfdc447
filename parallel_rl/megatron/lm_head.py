"""Heads of a GPTModel: the LM head fused into the loss, and heads of multi-token prediction with their loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from parallel_rl.megatron.capabilities import heads_recompute_packed_rows
from parallel_rl.megatron.model import unwrap
from parallel_rl.metrics import Metrics
from parallel_rl.vocab.consumed import mark_hidden_states, model_of_hidden_states
from parallel_rl.vocab.linear.gemm import let_others_add
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.linear.plan import LinearMode, check_mode

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from parallel_rl.losses.core.call import LossCall
    from parallel_rl.losses.nll import NLLLoss

#: models, wrapped or not, whose output is marked as hidden states
_MARKED: WeakSet[torch.nn.Module] = WeakSet()


@dataclass(eq=False)
class FusedHead:
    """Replaces the forward of a model chunk's output layer; module, parameters and hooks are kept.

    The model then returns hidden states [B, S/cp, D] (under sequence parallelism [B, S/cp/tp, D]). A call turns them into the
    first argument of a loss or of `token_logprobs`; on chunks without an output layer it returns its argument:

        head = fuse_head(model)
        loss, metrics = loss_fn(head(forward_logits(model, inputs)), data, ...)
        logprobs = token_logprobs(head(forward_logits(model, inputs)), data, ...)
        with head.logits():   # for sampling
            ...
    """

    model: GPTModel
    mode: LinearMode = "auto"
    budget: int | None = None
    softcap: float | None = None
    logit_scale: float = 1.0

    def __call__(self, output: Tensor, rows: int | None = None) -> Tensor | LMHeadInput:
        """Turn the model's output into a loss's input; logits, inside `logits()`, are returned unchanged.

        `rows`: upper bound of loss tokens on any rank, see `LMHeadInput`. ValueError for hidden states of another model's fused
        head.
        """
        if model_of_hidden_states(output) not in (None, self.model):
            raise ValueError("head is the fused head of another model; give what `fuse_head` returned for this one")
        if not is_fused(self.model):
            return output
        layer = self.model.output_layer
        weight = layer.weight
        if self.model.share_embeddings_and_output_weights:
            weight = self.model.shared_embedding_or_output_weight()
        main_grad = getattr(weight, "main_grad", None)
        fuses = main_grad is not None and main_grad.shape == weight.shape and output.requires_grad
        if fuses and not layer.gradient_accumulation_fusion:
            let_others_add(weight)
        return LMHeadInput(
            output,
            weight,
            None if layer.skip_bias_add else layer.bias,
            softcap=self.softcap,
            sequence_parallel=layer.sequence_parallel,
            mode=self.mode,
            budget=self.budget,
            rows=rows,
            main_grad_factor=1.0 if fuses else None,
            logit_scale=self.logit_scale,
        )

    @property
    def sequence_parts(self) -> int:
        """Return the number of parts of a context rank's sequence: tp if sequence parallel, else 1."""
        config = self.model.config
        return int(config.tensor_model_parallel_size) if config.sequence_parallel else 1

    @contextlib.contextmanager
    def logits(self) -> Iterator[None]:
        self.remove()
        try:
            yield
        finally:
            self.install()

    def install(self) -> None:
        if self.model.post_process:
            # on the instance: class, parameter names and parameter-gathering hooks stay
            self.model.output_layer.forward = _hidden_states

    def remove(self) -> None:
        if self.model.post_process:
            vars(self.model.output_layer).pop("forward", None)


def is_fused(model: torch.nn.Module) -> bool:
    """Return whether this model chunk currently returns hidden states for a `FusedHead`."""
    inner = unwrap(model)
    return bool(inner.post_process) and "forward" in vars(inner.output_layer)


def _mark_output(model: torch.nn.Module, _inputs: object, output: object) -> None:
    if isinstance(output, Tensor) and is_fused(model):
        mark_hidden_states(output, unwrap(model))


def _hidden_states(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    return hidden, None


def fuse_head(
    model: torch.nn.Module,
    *,
    mode: LinearMode = "auto",
    budget: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> FusedHead:
    """Install a `FusedHead` on a model chunk, wrapped or not; `remove()` takes it off.

    With a `main_grad` of Megatron's data parallelism, backward adds the weight's gradient to it unscaled, with or without
    `gradient_accumulation_fusion`. Options: see `LMHeadInput`.

    >>> head = fuse_head(model)
    >>> type(head(forward_logits(model, padded_input(data["input_ids"])))).__name__
    'LMHeadInput'
    >>> head.remove()

    Raises:
        ValueError: an output layer that does not return this rank's logits from hidden states alone (another head, gathered
            output, deferred weight gradients); an invalid mode or budget.
    """
    check_mode(mode, budget, None)
    inner = unwrap(model)
    if inner.post_process:
        layer, config = inner.output_layer, inner.config
        if not isinstance(layer, ColumnParallelLinear):
            raise ValueError(
                f"the output layer is a {type(layer).__name__}; only a projection to the vocabulary is fused"
            )
        wrong = {
            "parallel_output = False": layer.gather_output,
            "defer_embedding_wgrad_compute = True": config.defer_embedding_wgrad_compute,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"{name} needs the output layer's own forward, so the head cannot be fused")
    if inner.post_process and model not in _MARKED:
        model.register_forward_hook(_mark_output)
        _MARKED.add(model)
    head = FusedHead(inner, mode, budget, softcap, logit_scale)
    head.install()
    return head


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
