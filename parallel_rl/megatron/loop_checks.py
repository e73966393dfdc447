"""Checks of the training loop around a step: the config, the optimizer, and gradients that were not zeroed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallel_rl.megatron.auxiliary import has_auxiliary_loss
from parallel_rl.validation import get_validation

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from parallel_rl.losses.core.requirements import Requirements

_NODES = 32  # of the graph behind the model's output; the LM head is among the first
FIRST_STEPS = 3  # in which checks may cost a collective or a wait for the device

_steps_of_models: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_optimizer_hook: list[RemovableHandle] = []


def warn(text: str) -> None:
    """Warn the user of this library."""
    warnings.warn(text, stacklevel=4)


def is_checked(steps: int) -> bool:
    """Whether the costly checks run in the step after `steps` others, see `set_validation`.

    >>> is_checked(0), is_checked(3)
    (True, False)
    """
    return get_validation() == "always" or (get_validation() == "auto" and steps < FIRST_STEPS)


def check_step(
    models: Sequence[torch.nn.Module], needs: Requirements, *, allow_dropout: bool, trains_heads: bool
) -> None:
    """Refuse settings with which `forward_backward` gives other numbers or cannot run; warn in the first step of others.

    Raises:
        ValueError: see `check_settings`; a schedule that asks the forward step for a plan of its layers.
    """
    config, first = get_model_config(models[0]), models[0] not in _steps_of_models
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError(
            "overlap_moe_expert_parallel_comm = True needs a forward step that returns a schedule plan; set it to False"
        )
    if any(model.training for model in models):
        check_settings(config, needs, allow_dropout=allow_dropout, trains_heads=trains_heads, first=first)
    elif first and has_auxiliary_loss(config):
        warn("the model is in eval mode, in which routers leave out their auxiliary losses; call model.train()")


def check_settings(
    config: TransformerConfig, needs: Requirements | None, *, allow_dropout: bool, trains_heads: bool, first: bool
) -> None:
    """Refuse dropout beside recorded log-probs; in the `first` step warn of settings that are wrong for most losses.

    Raises:
        ValueError: dropout in the config of a model that trains, for a loss that reads recorded log-probs.
    """
    drops = {name: getattr(config, name) for name in ("attention_dropout", "hidden_dropout") if getattr(config, name)}
    if drops and not allow_dropout:
        given = ", ".join(f"{name} = {value}" for name, value in drops.items())
        recorded = [] if needs is None else [name for name in needs.names if name.endswith("logprobs")]
        if recorded:
            raise ValueError(
                f"{given}: this loss compares the policy with {', '.join(recorded)}, and dropout is another policy in each "
                "forward and on each layout. Set attention_dropout = 0 and hidden_dropout = 0 in the model's config, or pass "
                "allow_dropout=True"
            )
        if first:
            warn(
                f"{given}: dropout differs between layouts, so the loss does too; set attention_dropout = 0 and "
                "hidden_dropout = 0, or pass allow_dropout=True"
            )
    if first and config.fp16 and config.grad_scale_func is None:
        warn(
            "fp16 without config.grad_scale_func: small gradients become 0, and Megatron's optimizer divides by a scale that "
            "the loss was not multiplied by; set config.grad_scale_func = optimizer.scale_loss"
        )
    if first and config.mtp_num_layers and not trains_heads:
        warn(
            f"mtp_num_layers = {config.mtp_num_layers} without mtp_loss: the heads of multi-token prediction do not learn; "
            "pass mtp_loss=NLLLoss(...)"
        )


def check_fields(needs: Requirements, batches: Sequence[Mapping[str, object]]) -> None:
    """Refuse data without the fields that a loss reads: the last pipeline stage alone calls it, but every stage has the data.

    Raises:
        ValueError: the names of the missing fields.
    """
    names = [field.name for field in needs.fields if field.per != "local"]
    missing = sorted({name for data in batches for name in names if name not in data})
    if missing:
        raise ValueError(f"data lacks the fields {missing}; this loss needs {', '.join(names)}")


def begin_step(models: Sequence[torch.nn.Module], ddp: bool) -> None:
    """Drop what the last optimizer step left in `grad` under Megatron's DDP; warn of gradients that were not zeroed.

    DDP adds `grad` to `main_grad` after each backward. An optimizer that steps on `main_grad` itself leaves it in `grad`,
    where autograd would add the first micro-batch's gradient to it, and DDP would add the sum once more.
    """
    steps = _steps_of_models.get(models[0], 0)
    _steps_of_models[models[0]] = steps + 1
    if steps and is_checked(steps) and any(bool(grad.any()) for grad in _some_gradients(models)):
        zero = "model.zero_grad_buffer() and optimizer.zero_grad()" if ddp else "optimizer.zero_grad()"
        warn(
            "the gradients of an earlier step are still there, and this step's are added to them; before each step call "
            f"{zero}"
        )
    if ddp:
        watch_optimizers()
        for model in models:
            trained = model.params_with_grad if isinstance(model, DistributedDataParallel) else model.parameters()
            for parameter in trained:
                parameter.grad = None


def warn_of_left_gradient(output: Tensor) -> None:
    """Warn of a gradient that an earlier optimizer step left in `grad`, before the first backward adds to it under DDP.

    The host looks at the parameter that is nearest to the model's output in its graph.
    """
    nodes = [output.grad_fn]
    for node in nodes:  # nearest first
        if len(nodes) < _NODES and node is not None:
            nodes += [source for source, _ in node.next_functions]
        parameter = getattr(node, "variable", None)
        main_grad = getattr(parameter, "main_grad", None)
        if parameter is None or main_grad is None:
            continue
        grad = parameter.grad
        if grad is not None and (grad.data_ptr() == main_grad.data_ptr() or bool(grad.any())):
            warn(
                "an earlier step's gradient is still in `grad`, and Megatron's DDP adds it to this step's; before each step "
                "call optimizer.zero_grad() beside model.zero_grad_buffer()"
            )
        return


def watch_optimizers() -> None:
    """Warn once of a torch optimizer that steps on parameters of Megatron's DDP without a gradient.

    A hook that torch runs before each step of its optimizers looks at parameters on the host; it goes after its warning.
    """
    if not _optimizer_hook:
        _optimizer_hook.append(register_optimizer_step_pre_hook(_before_optimizer_step))


def _before_optimizer_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    wrapped = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None or getattr(parameter, "decoupled_grad", None) is not None:
                return
            wrapped = wrapped or getattr(parameter, "main_grad", None) is not None
    if wrapped:
        _optimizer_hook.pop().remove()
        warn(
            f"{type(optimizer).__name__} steps without a gradient, so no weight moves: Megatron's DDP keeps gradients in "
            "`main_grad`. Use Megatron's get_megatron_optimizer, or call copy_main_grads(model) before optimizer.step()"
        )


def _some_gradients(models: Sequence[torch.nn.Module]) -> list[Tensor]:
    """The gradients of each chunk's first and last trained parameter, under DDP its `main_grad`."""
    found = []
    for model in models:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained[:1] + trained[1:][-1:]:
            grad = getattr(parameter, "main_grad", None)
            found.append(parameter.grad if grad is None else grad)
    return [grad for grad in found if grad is not None]
