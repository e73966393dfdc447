"""A loss in the call of torchtitan's RL experiment (its source of August 2026).

torchtitan has no hidden factor: gradients are summed over data ranks, the loss is divided by the step's tokens. Its packed
rows have no bounds, so a loss must not look beyond a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parallel_rl.groups import ParallelGroups
from parallel_rl.hosts.function_loss import FunctionLoss, named, row_logprobs
from parallel_rl.hosts.scaling import check_fits, check_learns, unit_of
from parallel_rl.losses.core.base import LossFn

_FIELDS = ("advantages", "prev_logprobs", "generation_logprobs")


class HostLoss:
    """Loss for torchtitan's `PolicyTrainer`.

    As in torchtitan, a token counts only if its generator_logprobs is finite, and the sampler is also the old policy.

        class Config(BaseLoss.Config):            # a loss is built from its config there
            def build(self, **_):
                return HostLoss(PolicyLossFn({"surrogate": {"name": "ppo", "clip_high": 0.28}}))

    >>> from parallel_rl import PolicyLossFn
    >>> loss_fn = HostLoss(PolicyLossFn({"surrogate": {"name": "reinforce"}}))
    >>> fields = {"generator_logprobs": torch.zeros(2), "advantages": torch.ones(2), "loss_mask": torch.tensor([True, False])}
    >>> round(loss_fn(torch.zeros(2, 4), torch.tensor([1, 2]), 1, **fields)[0].item(), 4)
    1.3863

    `groups`: tensor ranks that split the logits (also as a DTensor), unless the trainer gathers them. ValueError for a loss
    that reads more than torchtitan has, looks beyond a token, ignores the advantages, or is not divided by tokens.
    """

    def __init__(self, loss_fn: LossFn, groups: ParallelGroups | None = None) -> None:
        check_fits("torchtitan", loss_fn, _FIELDS, entropy=True)
        check_learns("torchtitan's RL experiment", loss_fn)
        name = type(loss_fn).__name__
        if not loss_fn.requirements.token_separable:
            raise ValueError(
                f"{name} in this configuration looks beyond a token; torchtitan's rows have no bounds of sequences"
            )
        if unit_of(loss_fn) != "tokens":
            raise ValueError(
                f"{name} must be divided by the step's tokens (aggregation 'token-mean'), torchtitan's only count"
            )
        self.loss_fn, self.groups = loss_fn, groups or ParallelGroups()

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        global_valid_tokens: float | None = None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this rank's local loss, and metrics to sum over data ranks (`.../max`: maximum).

        logits: [T, V]. labels: [T], already shifted. The others: [T], else ValueError. global_valid_tokens None: 1.
        """
        for name, x in (
            ("generator_logprobs", generator_logprobs),
            ("advantages", advantages),
            ("loss_mask", loss_mask),
        ):
            if x.shape != labels.shape:
                raise ValueError(
                    f"{name} has shape {list(x.shape)}, labels {list(labels.shape)}; they must be [T] alike"
                )
        keep = (loss_mask != 0) & generator_logprobs.isfinite()
        values = {
            "advantages": advantages,
            "prev_logprobs": generator_logprobs,
            "generation_logprobs": generator_logprobs,
        }
        data = {name: values[name][None] for name in self.loss_fn.requirements.names}
        data |= {"shift_labels": labels[None], "token_mask": keep[None], "sample_mask": keep.new_ones(1)}
        tokens = torch.as_tensor(1 if global_valid_tokens is None else global_valid_tokens, device=labels.device)
        loss, metrics = self.loss_fn(
            logits[None], data, torch.ones((), device=labels.device), tokens.clamp(min=1), self.groups.tp_rank,
            self.groups.tensor,
        )  # fmt: skip
        parts = {name: metrics.parts(name) for name in metrics}
        means = {f"loss/{name}": metrics[name] for name, part in parts.items() if part.kind == "share"}
        maxima = {
            f"loss/{name.removesuffix('_max')}/max": metrics[name] for name, part in parts.items() if part.kind == "max"
        }
        return loss, {"loss/mean": loss.detach(), **means, **maxima}


def torchtitan(loss: Callable[..., tuple]) -> FunctionLoss:
    """Adapt a torchtitan RL loss: (logits [T, V], labels [T], global_valid_tokens, ...) → (loss, metrics).

    Rows follow each other, with shifted labels; generator_logprobs are prev_logprobs. Nothing is multiplied.

    >>> sorted(torchtitan(lambda logits, labels, tokens, **fields: (logits.sum() / tokens, {})).axes)
    ['data', 'micro-batches']
    """

    def run(logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        _, mask = row_logprobs(logits, data)
        here = mask[:, 1:]
        old, advantages, ids = (
            torch.where(mask, data[name], 0)[:, 1:].flatten() for name in ("prev_logprobs", "advantages", "input_ids")
        )
        z = torch.where(here[..., None], logits[:, :-1], 0).flatten(0, 1)
        result: Tensor = loss(
            z, ids, toks, generator_logprobs=old, advantages=advantages, loss_mask=here.flatten()
        )[0]  # fmt: skip
        return result

    return named(loss, run, ("advantages", "prev_logprobs"))


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    return torchtitan(HostLoss(loss_fn))
