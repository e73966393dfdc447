"""Fused LM head on a GPTModel: the model returns hidden states, and the loss projects them in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakSet

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from parallel_rl.megatron.model import unwrap
from parallel_rl.vocab.consumed import mark_hidden_states, model_of_hidden_states
from parallel_rl.vocab.linear.gemm import let_others_add
from parallel_rl.vocab.linear.lm_head import LMHeadInput
from parallel_rl.vocab.linear.plan import LinearMode, check_mode

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
