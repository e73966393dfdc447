"""Log-prob, entropy and log-sum-exp of every token from vocabulary shards: one read, one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.agreement import check_replicated, raise_on_all_ranks, shape_facts
from parallel_rl.groups import all_gather, group_size
from parallel_rl.validation import checks_values
from parallel_rl.vocab.backends.choice import Backend, check_backend
from parallel_rl.vocab.backends.passes import (
    RowSpec,
    branch_gradient,
    branch_parts,
    combine_rows,
    row_gradient,
    row_parts,
    row_stats,
    split_edges,
    truncated_row_parts,
    with_branches,
)
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.consumed import (
    check_backward,
    check_no_hidden_states,
    check_not_consumed,
    mark_consumed,
    refuse_transforms,
    saved_logits,
)
from parallel_rl.vocab.shards import VocabShard, check_spans

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup

IGNORE_INDEX = -100


class TokenStats(NamedTuple):
    """Token statistics in max(float32, the logits' dtype), differentiable except for Σπ²."""

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor
    sum_pi_squared: Tensor | None = None


def token_stats(
    logits: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = IGNORE_INDEX,
    entropy: bool = True,
    sum_pi_squared: bool = False,
    consume_logits: bool = False,
    backend: Backend = "auto",
) -> TokenStats:
    """Compute log-prob of the target, entropy and log-sum-exp of softmax(z / temperature) from shards.

        log p_y = z_y/T − lse        H = −Σ p log p        lse = log Σ e^{z/T}

    Forward: one read of the logits and one all-gather of [tokens, 4] floats. Backward: one read and one write, no collective.
    All ranks of the group hold the same bits.

    >>> stats = token_stats(torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]), torch.tensor([1, 3]))
    >>> stats.logprobs, stats.entropy
    (tensor([-1.3863, -0.4402]), tensor([1.3863, 0.9475]))

    Args:
        logits: [..., V/tp] this rank's columns, any float dtype; the mathematics runs in max(float32, dtype).
        targets: [...] global token ids; the same on all ranks.
        group: tensor-parallel group; None is one shard.
        vocab_size: true size V; later columns are padding, outside the softmax and with gradient 0. None: no padding, even
            shards. vocab_start: first column's id, if the split is neither even nor `torch.chunk`'s.
        temperature: positive number, or [...] one per token.
        ignore_index: targets whose statistics are 0 with gradient 0, for any logits (NaN too).
        entropy: False leaves it out.
        sum_pi_squared: compute Σ_v p_v² too, in the same pass, without gradient.
        consume_logits: the backward writes the gradient over the logits; a later reader is refused.
        backend: "triton" (kernels; float64 logits stay with torch), "compiled" (torch.compile), "eager" (cache-sized blocks),
            or "auto": Triton on CUDA if installed, else compiled if the shard is large.

    Returns:
        `TokenStats` of tensors shaped like `targets`.

    Raises:
        ValueError: on all ranks of the group: shapes, dtypes or options that do not fit; consumed logits; where values are
            checked (see `set_validation`) a target outside [0, V) or a temperature that is not positive and finite. In
            backward with mode "always": upstream gradients that differ between ranks.
        RuntimeError: in a backward, logits that were written over since the forward.
    """

    def check() -> VocabShard:
        check_logits(logits, consume_logits, backend)
        shard = VocabShard.of(
            logits.shape[-1], group, vocab_size, vocab_start,
            temperature=temperature, entropy=entropy, consume_logits=consume_logits, backend=backend,
            sum_pi_squared=sum_pi_squared,
        )  # fmt: skip
        check_tokens(targets, logits.shape[:-1], shard, ignore_index)
        return shard

    shard = raise_on_all_ranks(check, [group], logits, shape_facts(logits, vocab_size, vocab_start))
    check_spans(group, logits.shape[-1], vocab_size, vocab_start, logits)
    return stats_of_shard(logits, targets, targets != ignore_index, shard)


def stats_of_shard(
    logits: Tensor, targets: Tensor, keep: Tensor, shard: VocabShard, floor: Tensor | None = None
) -> TokenStats:
    """Compute `token_stats` of the tokens `keep` [...] after its checks.

    floor: [T, 1] the smallest logit that each row keeps; None keeps all, for any `shard.truncation`.
    """
    size = targets.numel(), logits.shape[-1]  # not −1: an empty shard of an uneven split has no column
    flat = logits.view(size) if shard.consume_logits else logits.reshape(size)
    inv_t = shard.inverse_temperature(math_dtype(logits.dtype), logits.device)
    stats = _TokenStats.apply(flat, targets.reshape(-1), keep.reshape(-1), inv_t, shard, floor, None)
    return TokenStats(*(None if x is None else x.view(targets.shape) for x in stats))  # type: ignore[arg-type]


def stats_of_edges(logits: Tensor, targets: Tensor, keep: Tensor, shard: VocabShard, branches: Tensor) -> TokenStats:
    """Compute statistics of rows with several targets: log-probs [T + X], −inf without one; others [T].

    Args:
        logits: [T, V/tp]. keep: [T].
        targets: [T + X] the target of each row, −1 for none or several; then those of the branching rows.
        branches: [X] the row of each further target, in order.
    """
    inv_t = shard.inverse_temperature(math_dtype(logits.dtype), logits.device)
    return TokenStats(*_TokenStats.apply(logits, targets, keep, inv_t, shard, None, branches))


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        z: Tensor,
        targets: Tensor,
        keep: Tensor,
        inv_t: Tensor,
        shard: VocabShard,
        floor: Tensor | None,
        branches: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        edges = RowSpec(targets, keep, inv_t, shard.start, shard.valid)
        spec = edges if branches is None else edges._replace(targets=targets[: len(z)])
        outputs = shard.entropy, shard.backend, shard.sum_pi_squared
        parts = None
        if floor is not None:  # dropped logits have probability 0, hence gradient 0
            kept = None if shard.consume_logits else torch.empty_like(z, memory_format=torch.contiguous_format)
            parts = truncated_row_parts(z.detach(), floor, spec, *outputs, kept=kept)
            z = z if kept is None else kept
        elif group_size(shard.group) > 1 or branches is not None:
            parts = row_parts(z, spec, *outputs)
        if parts is not None and branches is not None:
            edges = with_branches(edges, branches)
            parts = torch.cat([parts, branch_parts(z, parts, edges, branches)])
        if parts is None:
            logp, ent, lse, squares, rows = row_stats(z, spec, *outputs)
        else:
            logp, ent, lse, squares, rows = combine_rows(all_gather(parts, shard.group), edges, shard.backend)
        if branches is not None:
            ent, squares = (None if x is None else x[: len(z)] for x in (ent, squares))
            lse, rows = lse[: len(z)], rows[: len(z)]
        ctx.save_for_backward(z, targets, keep, inv_t, rows, branches)  # type: ignore[arg-type]
        ctx.shard, ctx.consumed = shard, False  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return logp, ent, lse, squares

    @staticmethod
    def backward(
        ctx: FunctionCtx, g_logp: Tensor | None, g_ent: Tensor | None, g_lse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        check_backward(ctx, "token statistics have")
        z, targets, keep, inv_t, rows, branches = saved_logits(ctx)
        shard: VocabShard = ctx.shard  # type: ignore[attr-defined]
        spec, further = RowSpec(targets, keep, inv_t, shard.start, shard.valid), None
        if branches is not None:
            spec, further, g_logp = split_edges(spec, branches, g_logp, len(z))
        check_replicated([g_logp, g_ent, g_lse], shard.group, rows[:, 0])
        if g_logp is None and g_ent is None and g_lse is None:
            return (None,) * 7
        upstream = (g_logp, g_ent, g_lse)
        entries = None if further is None else branch_gradient(z, spec, rows, upstream, further)
        if shard.consume_logits:
            ctx.consumed, z = True, z.detach()  # type: ignore[attr-defined]
        dz = row_gradient(z, spec, rows, upstream, z if shard.consume_logits else None, shard.backend)
        if entries is not None:
            dz[entries.places] = entries.values.to(dz.dtype)
        if shard.consume_logits:
            mark_consumed(z)
        return dz, *(None,) * 6


def check_dense(name: str, output: Tensor) -> None:
    if output.dtype.itemsize < 2 or output.layout != torch.strided:
        raise ValueError(f"{name} must be dense, of 16 bits or more; got {output.dtype}, {output.layout}")


def check_logits(logits: Tensor, consume_logits: bool, backend: Backend) -> None:
    """Check the logits' shape, dtype and device against the options, without reading a value.

    Raises:
        ValueError: a wrong shape or dtype, consume_logits=True without contiguous memory, consumed logits, hidden states of a
            fused head, a transform of torch.func, a backend that cannot run here.
    """
    if not logits.is_floating_point() or logits.dim() < 2:
        raise ValueError(
            f"the logits must be floating point [..., V/tp] with two dimensions or more, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    check_dense("the logits", logits)
    if consume_logits and not logits.is_contiguous():
        raise ValueError(
            f"consume_logits=True writes into the logits, which must be contiguous; got strides {logits.stride()} "
            f"for shape {list(logits.shape)}"
        )
    refuse_transforms(logits)
    check_not_consumed(logits)
    check_no_hidden_states(logits)
    check_backend(backend, logits.device)


def check_tokens(targets: Tensor, shape: Sequence[int], shard: VocabShard, ignore_index: int) -> None:
    """Raise ValueError for wrong targets [...] or, if a tensor, their temperature; values if checked."""
    if list(targets.shape) != list(shape) or targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets must be int64 or int32 {list(shape)}, got {targets.dtype} {list(targets.shape)}")
    check_targets(targets, shard.vocab_size, ignore_index)
    temperature = shard.temperature
    if not isinstance(temperature, torch.Tensor):
        return
    if temperature.shape not in (targets.shape, torch.Size([])) or not temperature.is_floating_point():
        raise ValueError(
            f"temperature must be a number or floating point {list(shape)}, got {temperature.dtype} "
            f"{list(temperature.shape)}"
        )
    if checks_values(temperature):
        wrong = ~((temperature > 0) & temperature.isfinite()) & (targets != ignore_index)
        if bool(wrong.any()):
            index = tuple(int(i) for i in wrong.nonzero()[0])
            value = float(temperature.expand(targets.shape)[index])
            raise ValueError(f"temperature = {value} at {list(index)} must be positive and finite")


def check_targets(targets: Tensor, vocab_size: int, ignore_index: int | None = IGNORE_INDEX) -> None:
    """Raise ValueError for a checked target outside the vocabulary other than `ignore_index`."""
    if not checks_values(targets):
        return
    wrong = (targets < 0) | (targets >= vocab_size)
    if ignore_index is not None:
        wrong &= targets != ignore_index
    if bool(wrong.any()):
        where = [int(i) for i in wrong.nonzero()[0]]
        raise ValueError(
            f"target {int(targets[tuple(where)])} at {where} lies outside the vocabulary [0, {vocab_size})"
        )
