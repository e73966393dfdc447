"""Adapters that call a loss the way a framework does, for `check_law`; each states its host's factors.

`parallel_rl.hosts` does the opposite: our losses in their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from parallel_rl.testing.subjects import FunctionLoss

_SLIME = {
    "prev_logprobs": "log_probs", "generation_logprobs": "rollout_log_probs", "reference_policy_logprobs": "ref_log_probs",
}  # fmt: skip
ROWS = frozenset({"data", "micro-batches"})
# (log-probs [B, S], mask [B, S], data, n_seqs, n_toks) -> the loss of these rows
RowsLoss = Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor, Tensor], Tensor]


def on_rows(loss: RowsLoss, fields: tuple[str, ...] = ()) -> FunctionLoss:
    """Adapt a loss on whole rows' log-probs: (logprobs, mask, data, valid_seqs, valid_toks) → loss.

    `logprobs` [B, S] are token-aligned, 0 and without gradient where `mask` is False. Only data ranks and micro-batches are
    checked.

    >>> on_rows(lambda logprobs, mask, data, seqs, toks: -logprobs.sum() / toks).axes == ROWS
    True
    """

    def run(logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        logprobs, mask = row_logprobs(logits, data)
        return loss(logprobs, mask, data, seqs, toks)

    return _named(loss, run, fields)


def _named(loss: object, run: Callable[..., Tensor | tuple[Tensor, Mapping]], fields: tuple[str, ...]) -> FunctionLoss:
    """Wrap `run`, of logits, data and counts, in a loss's call and another function's name."""

    def call(
        logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor,
        rank: int | None = None, tensor: object = None, context: object = None,
    ) -> Tensor | tuple[Tensor, Mapping]:  # fmt: skip
        return run(logits, data, seqs, toks)

    call.__name__ = getattr(loss, "__name__", type(loss).__name__)
    return FunctionLoss(call, fields, ROWS)


def row_logprobs(logits: Tensor, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probs [B, S] of `input_ids` and their loss mask; masked ones are exactly 0."""
    mask = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], 1)
    ids, here = torch.where(mask, data["input_ids"], 0)[:, 1:], mask[:, 1:]
    z = torch.where(here[..., None], logits[:, :-1], 0).to(torch.promote_types(logits.dtype, torch.float32))
    picked = torch.where(here, z.log_softmax(-1).gather(-1, ids[..., None])[..., 0], 0)
    return torch.cat([torch.zeros_like(picked[:, :1]), picked], 1), mask


def nemo_rl(loss: Callable[..., tuple], fields: tuple[str, ...] = ()) -> FunctionLoss:
    """Adapt a NeMo-RL loss: (next_token_logprobs, data, valid_seqs, valid_toks) → (loss, metrics).

    next_token_logprobs [B, S − 1]; `data` has the masks, input_ids and `fields`, 0 where no loss is carried. NeMo-RL adds
    metrics up, but for those with _min and _max in their names, which are left out here, as is what it undoes: the factors of
    Megatron and of context ranks.

    >>> def loss(next_token_logprobs, data, global_valid_seqs, global_valid_toks):
    ...     return -next_token_logprobs.sum() / global_valid_toks, {}
    >>> nemo_rl(loss).name
    'loss'
    """

    def run(
        logits: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor
    ) -> tuple[Tensor, Mapping[str, float]]:
        logprobs, mask = row_logprobs(logits, data)
        given = {name: torch.where(mask, data[name], 0) for name in ("input_ids", *fields)}
        given |= {"token_mask": mask.to(logits), "sample_mask": data["sample_mask"].to(logits)}
        value, metrics = loss(
            next_token_logprobs=logprobs[:, 1:], data=given, global_valid_seqs=seqs, global_valid_toks=toks
        )
        return value, {name: x for name, x in metrics.items() if not ("_min" in name or "_max" in name)}

    return _named(loss, run, fields)


def skyrl(policy_loss: Callable[..., tuple], config: object = None) -> FunctionLoss:
    """Adapt a SkyRL policy loss: (log_probs, old_log_probs, advantages, config, mask, ...) → (loss, ...).

    The advantages come divided by the step's tokens, as SkyRL's loss_reduction "token_mean" has it. SkyRL multiplies by
    micro-batches and data ranks, DDP and Megatron divide by them; both are left out here.

    >>> skyrl(lambda new, old, advantages, config, mask, rollout: (-(advantages * new * mask).sum(), {})).fields
    ('advantages', 'prev_logprobs')
    """

    def rows(logprobs: Tensor, mask: Tensor, data: Mapping[str, Tensor], seqs: Tensor, toks: Tensor) -> Tensor:
        old, advantages = (torch.where(mask, data[name], 0) for name in ("prev_logprobs", "advantages"))
        loss: Tensor = policy_loss(logprobs, old, advantages / toks, config, mask.to(logprobs), None)[0]
        return loss

    rows.__name__ = getattr(policy_loss, "__name__", "skyrl")
    return on_rows(rows, ("advantages", "prev_logprobs"))


def torchtitan(loss: Callable[..., tuple]) -> FunctionLoss:
    """Adapt a torchtitan RL loss: (logits [T, V], labels [T], global_valid_tokens, ...) → (loss, metrics).

    The rows lie one after the other, with shifted labels; generator_logprobs are prev_logprobs. Nothing is multiplied.

    >>> torchtitan(lambda logits, labels, tokens, **fields: (logits.sum() / tokens, {})).axes == ROWS
    True
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

    return _named(loss, run, ("advantages", "prev_logprobs"))


def verl(policy_loss: Callable[..., tuple], config: object = None, loss_agg_mode: str = "token-mean") -> FunctionLoss:
    """Adapt a verl policy loss: (old_log_prob, log_prob, advantages, response_mask, ...) → (loss, ...).

    `config.global_batch_info` is filled in as verl's workers do it: dp_size 1, batch_num_tokens and global_batch_size of the
    whole step. verl multiplies by the data ranks' number and DDP divides by it; both are left out here.

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


def hugging_face(compute_loss_func: Callable[..., Tensor]) -> FunctionLoss:
    """Adapt a `compute_loss_func` of Trainer and TRL: (outputs, labels, num_items_in_batch) → loss.

    `outputs.logits` [B, S, V], `labels` [B, S] with −100 at masked places, the count of the whole accumulation. The Trainer
    multiplies by the number of processes and DDP divides by it; both are left out here.

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

    return _named(compute_loss_func, run, ())


def slime(custom_loss: Callable[..., tuple], args: object = None, fields: tuple[str, ...] = ()) -> FunctionLoss:
    """Adapt a custom loss of slime: (args, batch, logits, sum_of_sample_mean) → (loss, metrics).

    `logits` [1, T, V] are the rows of `batch`, one after the other, each a prompt of one token and a response of S − 1. `batch`
    holds lists with an entry a row: unconcat_tokens [S], loss_masks [S − 1], total_lengths, response_lengths, and under slime's
    names log_probs, rollout_log_probs, ref_log_probs, advantages, returns, values [S − 1] those of `fields`. A place without
    loss is 0 everywhere, since slime multiplies by its masks. `sum_of_sample_mean` is Σ over rows of their means, or of their
    sums where `args.calculate_per_token_loss`; slime divides that by the step's rows, or tokens, after the call, and multiplies
    by the micro-batches, data and context ranks that Megatron divides by: the first is done here, the others cancel.

    >>> def loss(args, batch, logits, sum_of_sample_mean):
    ...     rows = [z.log_softmax(-1)[:-1].gather(-1, y[1:, None])[:, 0]
    ...             for z, y in zip(logits[0].split(batch["total_lengths"]), batch["unconcat_tokens"])]
    ...     return -sum_of_sample_mean(torch.cat(rows)), {}
    >>> slime(loss).name
    'loss'

    Args:
        custom_loss: the function.
        args: slime's arguments that it reads; rollout_temperature is 1 and calculate_per_token_loss False unless they say so.
        fields: of the data that it reads, by our names: "advantages", "prev_logprobs", ...
    """
    settings = SimpleNamespace(
        **{"rollout_temperature": 1.0, "calculate_per_token_loss": False, **vars(args or SimpleNamespace())}
    )
    whole = settings.calculate_per_token_loss

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
            sums = torch.stack([(row * own).sum() for row, own in zip(x.split(width - 1), masks, strict=True)])
            return sums.sum() if whole else (sums / mask.sum(1).clamp(min=1)).sum()

        packed = torch.where(scored[..., None], logits, 0).flatten(0, 1)[None]
        loss, metrics = custom_loss(settings, batch, packed, sum_of_sample_mean)
        count = toks if whole else seqs
        return loss / count, {name: value / count for name, value in metrics.items()}

    return _named(custom_loss, run, fields)
