"""slime's custom losses under the law, and ours in slime's call under the law."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from parallel_rl.hosts.function_loss import FunctionLoss, named, row_logprobs
from parallel_rl.hosts.slime.loss import custom_loss
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.policy import PolicyLoss

_SLIME = {
    "prev_logprobs": "log_probs", "generation_logprobs": "rollout_log_probs", "reference_policy_logprobs": "ref_log_probs",
}  # fmt: skip


def slime(custom_loss: Callable[..., tuple], args: object = None, fields: tuple[str, ...] = ()) -> FunctionLoss:
    """Adapt a custom loss of slime: (args, batch, logits, sum_of_sample_mean) → (loss, metrics).

    `logits` [1, T, V] are the rows of `batch` in sequence, each a prompt of one token and a response of S − 1. `batch` holds
    lists with an entry per row: unconcat_tokens [S], loss_masks [S − 1], total_lengths, response_lengths, and of `fields` by
    slime's names log_probs, rollout_log_probs, ref_log_probs, advantages, returns, values [S − 1]. Places without loss are 0
    everywhere, since slime multiplies by its masks. `sum_of_sample_mean` sums the rows' means, or with
    `args.calculate_per_token_loss` their sums. slime divides this by the step's rows, or tokens, after the call, as here; the
    factors of micro-batches, data and context ranks that slime multiplies and Megatron divides by cancel.

    >>> def loss(args, batch, logits, sum_of_sample_mean):
    ...     rows = [z.log_softmax(-1)[:-1].gather(-1, y[1:, None])[:, 0]
    ...             for z, y in zip(logits[0].split(batch["total_lengths"]), batch["unconcat_tokens"])]
    ...     return -sum_of_sample_mean(torch.cat(rows)), {}
    >>> slime(loss).name
    'loss'

    Args:
        args: slime's arguments that it reads; by default rollout_temperature is 1 and calculate_per_token_loss False.
        fields: of the data that it reads, by our names: "advantages", "prev_logprobs", ...
    """
    settings = SimpleNamespace(
        **{"rollout_temperature": 1.0, "calculate_per_token_loss": False, **vars(args or SimpleNamespace())}
    )
    per_token = settings.calculate_per_token_loss

    def run(
        logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        _, mask = row_logprobs(logits, data)
        rows, width = mask.shape
        masks = [row.to(logits) for row in mask[:, 1:]]
        scored = torch.cat([mask[:, 1:], mask.new_zeros(rows, 1)], 1)  # the predicting positions
        batch: dict[str, list] = {
            "unconcat_tokens": [*torch.where(mask, data["input_ids"], 0)],
            "loss_masks": masks,
            "total_lengths": [width] * rows,
            "response_lengths": [width - 1] * rows,
        }
        for name in fields:
            batch[_SLIME.get(name, name)] = [*torch.where(mask, data[name], 0)[:, 1:]]

        def sum_of_sample_mean(x: Tensor) -> Tensor:
            sums = torch.stack(
                [(row * row_mask).sum() for row, row_mask in zip(x.split(width - 1), masks, strict=True)]
            )
            return sums.sum() if per_token else (sums / mask.sum(1).clamp(min=1)).sum()

        packed = torch.where(scored[..., None], logits, 0).flatten(0, 1)[None]
        loss, metrics = custom_loss(settings, batch, packed, sum_of_sample_mean)
        count = toks if per_token else seqs
        return loss / count, {name: value / count for name, value in metrics.items()}

    return named(custom_loss, run, fields)


def through(loss_fn: LossFn) -> FunctionLoss:
    """Run a loss of this library in the framework's call, as a subject of the law."""
    per_token = not isinstance(loss_fn, PolicyLoss) or loss_fn.policy.aggregation == "token-mean"
    args = SimpleNamespace(calculate_per_token_loss=per_token)
    return slime(custom_loss(loss_fn), args, loss_fn.requirements.names)
