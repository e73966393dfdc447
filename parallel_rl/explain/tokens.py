"""Values and gradient of each token, recomputed with the loss's own code from the recorded inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.groups import group_sum
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.vocab.stats import TokenStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from parallel_rl.losses.core.base import LossFn

NOT_KEPT = "held/not_kept"


@dataclass(frozen=True, eq=False)
class Observed:
    """One micro-batch, complete on every context rank.

    Attributes:
        tokens: name → [B, S], token-aligned, float64; 0 where nothing is scored. sequences: name → [B].
        shares: name of a part → its contribution to the loss, summed over context ranks; "loss" is the total.
    """

    tokens: dict[str, Tensor]
    sequences: dict[str, Tensor]
    shares: dict[str, Tensor]


def observe(loss_fn: LossFn, batch: TokenBatch, loss: Tensor) -> Observed:
    """Rerun the loss on its recorded inputs, with each part's gradient; collective over context ranks.

    Columns: the inputs "logprobs", "entropy", "head" (of a scalar head, or the value of a row); "gradient" ∂L/∂(log π, or
    head), "entropy_gradient", "gradient/PART"; "scored", "scored/COMPONENT"; "held/REASON" and "value/NAME" of its `Account`.

    Raises:
        RuntimeError: the second run gives another loss than the first.
    """
    local = batch.local
    with torch.enable_grad():
        output, leaves = _as_leaves(batch.output)
        again = TokenBatch(local, output)
        total, account = loss_fn.objective(again), loss_fn.account(again)
        of_loss = _gradients(total, leaves)
        of_parts = {name: _gradients(part, leaves) for name, part in account.parts.items()}
    columns: dict[str, Tensor] = {"scored": batch.mask}
    columns |= {f"scored/{name}": part.mask for name, part in local.parts.items()}
    columns |= {name: leaf for name, leaf in leaves.items() if name != "untruncated"}
    columns |= {name: x for name, x in of_loss.items() if "/" not in name}
    if len(of_parts) > 1:
        columns |= {
            f"gradient/{part}": gradients["gradient"] for part, gradients in of_parts.items() if "gradient" in gradients
        }
    columns |= {f"held/{name}": x for name, x in account.held.items()}
    columns |= {f"value/{name}": x for name, x in account.values.items()}
    if local.dropped is not None:
        columns[NOT_KEPT] = local.dropped
    size = batch.mask.numel()
    of_tokens = {name: x for name, x in columns.items() if x.shape[:1] == (size,) and x.dim() <= 2}
    shares = {"loss": loss, "again": total, **{f"part/{name}": x for name, x in account.parts.items()}}
    stacked = group_sum(torch.stack([x.detach().double() for x in shares.values()]), local.context_group)
    summed = dict(zip(shares, stacked.unbind(), strict=True))
    if not torch.allclose(summed["loss"], summed.pop("again"), rtol=1e-5, atol=1e-12, equal_nan=True):
        raise RuntimeError(
            f"{type(loss_fn).__name__} gave {float(summed['loss'])} and then another number on the same log-probs; its "
            "computation is not repeatable, so its step cannot be explained"
        )
    others = {name: x for name, x in columns.items() if name not in of_tokens and x.shape == batch.sequence_mask.shape}
    return Observed(_whole(of_tokens, batch), {name: x.detach().double() for name, x in others.items()}, summed)


def _as_leaves(output: ModelOutput) -> tuple[ModelOutput, dict[str, Tensor]]:
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, x: Tensor) -> Tensor:
        x = x.detach().clone()
        if x.is_floating_point():
            leaves[name] = x.requires_grad_()
        return x

    def stats(statistics: TokenStats | None, name: str) -> TokenStats | None:
        if statistics is None:
            return None
        entropy = None if statistics.entropy is None else leaf(f"{name}entropy", statistics.entropy)
        logprobs = leaf(f"{name}logprobs" if name != "untruncated" else name, statistics.logprobs)
        return statistics._replace(logprobs=logprobs, entropy=entropy, lse=statistics.lse.detach())

    def of(output: ModelOutput, prefix: str) -> ModelOutput:
        return ModelOutput(
            stats(output.stats, prefix),
            None if output.head is None else leaf(f"{prefix}head", output.head),
            stats(output.untruncated, "untruncated") if not prefix else output.untruncated,
            {name: of(part, f"{name}/") for name, part in output.parts.items()},
        )

    return of(output, ""), leaves


def _gradients(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return "gradient" (of log-probs or head), "entropy_gradient", and "COMPONENT/gradient"."""
    by_name: dict[str, Tensor | None] = dict.fromkeys(leaves)
    if value.requires_grad:
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, retain_graph=True)
        by_name = dict(zip(leaves, grads, strict=True))
    dense = {name: torch.zeros_like(leaf) if by_name[name] is None else by_name[name] for name, leaf in leaves.items()}
    gradients: dict[str, Tensor] = {}
    for name, grad in dense.items():
        assert grad is not None
        prefix, _, leaf_name = name.rpartition("/")
        prefix = f"{prefix}/" if prefix else ""
        target = f"{prefix}entropy_gradient" if leaf_name == "entropy" else f"{prefix}gradient"
        if target not in gradients:
            gradients[target] = grad
        elif gradients[target].shape == grad.shape:  # one token's log-probs under both distributions
            gradients[target] = gradients[target] + grad
    return gradients


def _whole(columns: Mapping[str, Tensor], batch: TokenBatch) -> dict[str, Tensor]:
    """Convert columns [T_local] or [T_local, K], summed over K, to [B, S] in one all-reduce."""
    local = batch.local
    rows = [(x if x.dim() == 1 else x.sum(-1)).detach().double() for x in columns.values()]
    whole = local.layout.unshard(torch.stack(rows, 1), local.context_group, local.requirements.shift)
    return dict(zip(columns, whole.unbind(2), strict=True))
