"""Token statistics from hidden states and the LM head's weight, without whole logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.vocab.backends.choice import Backend
from parallel_rl.vocab.backends.passes import OutputGrads
from parallel_rl.vocab.linear.autograd import ForwardObjective, in_backward, in_forward
from parallel_rl.vocab.linear.forward import run_forward
from parallel_rl.vocab.linear.lm_head import LMHeadInput, RowOrder
from parallel_rl.vocab.linear.params import LinearParams, RowStats
from parallel_rl.vocab.linear.plan import LinearMode
from parallel_rl.vocab.shards import VocabShard, check_spans
from parallel_rl.vocab.stats import IGNORE_INDEX, TokenStats, check_logits, check_tokens

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class LinearTokenStats(NamedTuple):
    """Statistics [...] as in `TokenStats`, and the objective's value, if there is one.

    The gradient then flows through `loss` only, otherwise through the statistics.
    """

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor
    loss: Tensor | None
    sum_pi_squared: Tensor | None = None


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = IGNORE_INDEX,
    entropy: bool = True,
    sum_pi_squared: bool = False,
    objective: Callable[[TokenStats], Tensor] | None = None,
    mode: LinearMode = "auto",
    budget: int | None = None,
    rows: int | None = None,
    main_grad_factor: float | None = None,
    backend: Backend = "auto",
) -> LinearTokenStats:
    """Compute `token_stats` of z = hidden · weightᵀ + bias (soft-capped: c·tanh(z/c)), in chunks of rows.

    >>> hidden, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    >>> linear_token_stats(hidden, weight, torch.tensor([1, 3])).logprobs
    tensor([-1.3863, -1.3863])

    Logits, statistics and the weight's gradient are float32 (float64 for float64 operands). Rows with `ignore_index` are
    never projected (see `rows`). The modes differ in when gradients are computed:

    - "in_forward": while the logits of their rows exist, for an `objective` that is a sum over tokens; backward scales them
    by the upstream scalar. 6·N·V·D flops, one chunk (on a GPU in low precision also a group of kept ones), and the weight's
    gradient in a buffer.
    - "resident": the logits are kept (low precision: as float16 distances from the maximum of their row, or on a GPU of 128
    columns). 6·N·V·D flops, N·V numbers.
    - "recompute": they are re-projected in backward, in tiles of rows and columns. 8·N·V·D flops, one chunk or tile.
    - "auto": in_forward with an objective (unless the operands are float16), else resident if the budget holds the logits,
    else recompute.

    Args:
        hidden: [..., D]; with `sequence_parallel` this rank's part of the first dimension.
        weight: [V/tp, D], in the dtype of `hidden`. bias: [V/tp].
        targets: [...] global token ids, whole on all tensor ranks.
        group, vocab_size, vocab_start, temperature, ignore_index, entropy, sum_pi_squared, backend: as for `token_stats`.
        objective: (statistics shaped like `targets`) → scalar Σ_t f_t(log-prob, entropy, lse of token t). Called once a
            chunk, with 0 for unknown tokens, and once at the end.
        softcap, logit_scale, sequence_parallel, budget, rows, main_grad_factor: see `LMHeadInput`.

    Returns:
        `LinearTokenStats`. The gradient of `hidden` is summed over tensor ranks, as in a column-parallel layer; with sequence
        parallelism reduce-scattered.

    Raises:
        ValueError: on all ranks of the group, see `set_validation`: shapes, dtypes or options that do not fit; in_forward
            without an objective; a budget too small for one row; where values are checked, more rows with loss than
            `rows`, or in_forward with an objective that is not a sum over tokens.
    """
    head = LMHeadInput(
        hidden, weight, bias, softcap, False, sequence_parallel, mode, budget, rows, main_grad_factor,
        logit_scale,
    )  # fmt: skip

    def check() -> tuple[VocabShard, LMHeadInput]:
        head.check(group, vocab_size)
        if mode == "in_forward" and objective is None:
            raise ValueError("mode = 'in_forward' needs an objective: its gradient is computed in forward")
        like = hidden.new_zeros(()).expand(1, weight.shape[0])
        check_logits(like, False, backend)
        shard = VocabShard.of(
            weight.shape[0], group, vocab_size, vocab_start, temperature=temperature, entropy=entropy, backend=backend,
            sum_pi_squared=sum_pi_squared,
        )  # fmt: skip
        parts = head.parts(group)
        shape = (hidden.shape[0] * parts, *hidden.shape[1:-1])
        check_tokens(targets, shape, shard, ignore_index)
        # split over its first dimension; the losses' own batches are split along the sequence
        flat = replace(head, hidden=hidden.flatten(0, -2))
        flat.check_rows((targets != ignore_index).reshape(-1), group)
        return shard, flat

    same = {"the number of hidden rows": hidden[..., 0].numel(), "the hidden size": hidden.shape[-1]}
    shard, flat = raise_on_all_ranks(check, [group], hidden, same)
    check_spans(group, len(weight), vocab_size, vocab_start, hidden)

    def shaped(stats: TokenStats) -> TokenStats:
        return TokenStats(*(None if x is None else x.view(targets.shape) for x in stats))  # type: ignore[arg-type]

    stats, zero = stats_of_head(
        flat, targets.reshape(-1), (targets != ignore_index).reshape(-1), shard,
        objective=None if objective is None else lambda stats: objective(shaped(stats)),
    )  # fmt: skip
    stats = shaped(stats)
    if objective is None:
        return LinearTokenStats(*stats[:3], None, stats.sum_pi_squared)
    loss = objective(stats)
    if zero is not None:
        loss = loss + zero
    logprobs, entropies, lse, squares = (None if x is None else x.detach() for x in stats)
    return LinearTokenStats(logprobs, entropies, lse, loss, squares)  # type: ignore[arg-type]


def stats_of_head(
    head: LMHeadInput,
    targets: Tensor,
    keep: Tensor,
    shard: VocabShard,
    kept_ids: Tensor | None = None,
    *,
    objective: Callable[[TokenStats], Tensor] | None = None,
    context_group: ProcessGroup | None = None,
) -> tuple[TokenStats, Tensor | None]:
    """Compute `linear_token_stats` after its checks: [N] statistics, and the exact 0 with the gradient.

    Args:
        targets, keep: [N] in logits order, like the statistics.
        kept_ids: [N, K], see `truncated_token_stats`.
        objective: a sum over tokens; allows the mode in_forward, which makes the second result.
        context_group: over which the objective may communicate; its ranks may have other numbers of loss rows.
    """
    order = head.row_order(shard.group)
    grad = head.needs_gradient
    early = head.mode in ("auto", "in_forward") and objective is not None and head.hidden.dtype != torch.float16
    tokens = order.to_rows(targets), order.to_rows(keep), None if kept_ids is None else order.to_rows(kept_ids)
    params = LinearParams.of(head, shard, *tokens, mode="in_forward" if early else head.mode, keeps=grad)
    zero = None
    if grad and early:
        assert objective is not None
        of_rows = ForwardObjective(_output_grads(objective, order), context_group)
        zero, rows = in_forward(params, head, of_rows)
    elif grad:
        rows = in_backward(params, head)
    else:
        rows = run_forward(params).stats
    stats = TokenStats(*(None if x is None else order.to_logits(x) for x in rows))  # type: ignore[arg-type]
    excess = params.rows.excess
    if excess is not None:
        stats = TokenStats(*(None if x is None else x.masked_fill(excess, torch.nan) for x in stats))  # type: ignore[arg-type]
    return stats, zero


def _output_grads(objective: Callable[[TokenStats], Tensor], order: RowOrder) -> Callable[[RowStats], OutputGrads]:
    """Convert an objective on tokens in logits order to a function from row statistics to its gradients."""

    def gradients(stats: RowStats) -> OutputGrads:
        with torch.enable_grad():
            *leaves, squares = (None if x is None else order.to_logits(x).detach().clone() for x in stats)
            inputs = [x.requires_grad_() for x in leaves if x is not None]
            value = objective(TokenStats(*leaves, squares))  # type: ignore[arg-type, call-arg]
            if not value.requires_grad:
                return (None, None, None)
            grads = iter(torch.autograd.grad(value, inputs, allow_unused=True))
        grads_of_leaves = [None if x is None else next(grads) for x in leaves]
        a, b, c = (None if g is None else order.to_rows(g) for g in grads_of_leaves)
        return a, b, c

    return gradients
