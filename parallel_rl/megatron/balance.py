"""Experts balanced over sequences or the whole step: `seq_aux_loss` and `global_aux_loss` under the law."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from parallel_rl.groups import ParallelGroups, reduce_
from parallel_rl.layout import valid_tokens
from parallel_rl.megatron.auxiliary import balance_coefficients
from parallel_rl.megatron.micro_batch import MicroBatch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_KINDS = ("seq_aux_loss", "global_aux_loss")


_HEAD = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)\.")


class _Tokens(NamedTuple):
    """Sequences and positions of a micro-batch's tokens, [n], in the order of this rank's routers."""

    rows: Tensor
    positions: Tensor
    lengths: Tensor  # [B] counted tokens of each sequence


class _Placed(NamedTuple):
    """A router, its row in the counts, and how many tokens it reads ahead (k in MTP head k)."""

    router: TopKRouter
    slot: int
    ahead: int


class RouterBalance:
    """Both losses of a step's routers, replacing Megatron's, which depend on a micro-batch's rows.

        seq:    α · 1/N_seq · Σ_b E/(K·n_b²) · Σ_e c_be · Σ_{t ∈ b} p_te       global:  α · E/(K·N²) · Σ_e C_e · Σ_t p_te

    with a token's scores p over E experts, K of them chosen, and c_be, C_e the choices of e in a sequence and in the step. The
    n_b tokens of a sequence end with its last loss token, alike on padded and packed rows. Left out are rows without loss
    tokens, and for an MTP head the last tokens, which have nothing ahead to predict. N_seq and N count over the step. If
    `counts_first`, a forward pass without gradient, inside `counting`, counts the step's choices before. Papers: DeepSeek-V3,
    arXiv 2412.19437; arXiv 2501.11873.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        batches: Sequence[MicroBatch],
        *,
        config: TransformerConfig,
        groups: ParallelGroups,
        divisor: Tensor | int,
    ) -> None:
        """Take the `divisor` of router losses in backward; ValueError for MTP heads that share a layer."""
        coefficients = balance_coefficients(config)
        if getattr(config, "mtp_use_repeated_layer", False):
            raise ValueError(
                "mtp_use_repeated_layer = True runs one router for all heads of multi-token prediction, which "
                "'seq_aux_loss' and 'global_aux_loss' have to tell apart; use False, or 'aux_loss'"
            )
        self._of_sequences, self._of_step = (coefficients.get(kind, 0.0) for kind in _KINDS)
        self.counts_first = bool(self._of_step)
        modules = [named for model in models for named in model.named_modules()]
        routers = [(router, _HEAD.search(name)) for name, router in modules if isinstance(router, TopKRouter)]
        self._routers = [
            _Placed(router, index, 0 if head is None else int(head[1]) + 1)
            for index, (router, head) in enumerate(routers)
        ]
        self._config, self._groups, self._divisor = config, groups, divisor
        lengths = torch.cat([_lengths(batch) for batch in batches])
        ahead = torch.arange(1 + (config.mtp_num_layers or 0), device=lengths.device)
        counted = (lengths - ahead[:, None]).clamp(min=0)  # of each sequence, for the model and each head
        totals = reduce_(torch.stack([(counted > 0).sum(1), counted.sum(1)], dim=1), groups.data)
        self._totals = totals.clamp(min=1).to(torch.float64)
        experts = config.num_moe_experts or 0
        self._chosen = torch.zeros(len(self._routers), experts, dtype=torch.float64, device=lengths.device)
        self._present: _Tokens | None = None
        self._is_counting = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make routers add these losses in place of Megatron's of the same names, in a `with` block."""
        for placed in self._routers:
            placed.router.get_aux_loss_coeff = _without(placed.router.get_aux_loss_coeff)
            placed.router.routing = self._routing(placed, placed.router.routing)
        try:
            yield
        finally:
            for placed in self._routers:
                del placed.router.get_aux_loss_coeff, placed.router.routing

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the choices of a `with` block's forward over all micro-batches; one all-reduce a group."""
        self._is_counting = True
        with self.installed():
            yield
        self._is_counting = False
        for group in (self._groups.tensor, self._groups.context, self._groups.data):
            reduce_(self._chosen, group)

    def enter(self, batch: MicroBatch) -> None:
        """Set the tokens that routers will read from now on."""
        layout, lengths = batch.input.layout, _lengths(batch)
        places = [field.view(layout.local_shape).t() for field in (layout.sequence_ids, layout.positions)]
        if self._config.sequence_parallel:
            places = [field.chunk(self._groups.tp_size)[self._groups.tp_rank] for field in places]
        rows, positions = (field.flatten() for field in places)
        self._present = _Tokens(rows, positions, lengths)

    def follow(self, output: Tensor, batch: MicroBatch) -> None:
        """Enter the micro-batch again when its backward begins: recomputed layers rerun their routers."""
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda _: self.enter(batch))

    def _routing(
        self, placed: _Placed, megatrons: Callable[..., tuple[Tensor, Tensor]]
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        def routing(logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            probs, choice = megatrons(logits, *args, **kwargs)
            if torch.is_grad_enabled():
                probs = MoEAuxLossAutoScaler.apply(probs, self._loss(placed, logits) * self._divisor)
            elif self._is_counting:
                self._chosen[placed.slot] += self._scores(placed, logits)[1].sum(0)
            return probs, choice

        return routing

    def _scores(self, placed: _Placed, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and choices of this rank's tokens, [n, E], 0 where a token does not count."""
        assert self._present is not None
        rows, positions, lengths = self._present
        counted = (positions + placed.ahead < lengths[rows])[:, None]
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits.reshape(-1, logits.shape[-1]),
            placed.router.topk,
            placed.router.score_function,
            fused=self._config.moe_router_fusion,
        )
        return torch.where(counted, scores, 0.0), (chosen & counted).to(torch.float64)

    def _loss(self, placed: _Placed, logits: Tensor) -> Tensor:
        assert self._present is not None
        rows, _, lengths = self._present
        scores, chosen = self._scores(placed, logits)
        n_sequences, n_tokens = self._totals[placed.ahead].unbind()
        weight = self._of_step / n_tokens.square() * self._chosen[placed.slot]
        if self._of_sequences:
            choices = chosen.new_zeros(len(lengths), chosen.shape[1]).index_add_(0, rows, chosen)
            reduce_(choices, placed.router.tp_cp_group)
            counted = (lengths - placed.ahead).clamp(min=1)
            weight = weight + (self._of_sequences / n_sequences / counted.square()[:, None] * choices)[rows]
        return (scores * (weight * (scores.shape[1] / placed.router.topk)).to(scores.dtype)).sum()


def needs_balance(config: TransformerConfig) -> bool:
    return any(balance_coefficients(config).get(kind) for kind in _KINDS)


def _lengths(batch: MicroBatch) -> Tensor:
    """Return [B] tokens of each sequence up to its last loss token, 0 without any."""
    valid = valid_tokens(batch.data)
    column = torch.arange(1, valid.shape[1] + 1, device=valid.device)
    return torch.where(valid, column, 0).amax(1)


def _without(megatrons: Callable[[str], float]) -> Callable[[str], float]:
    return lambda kind: 0.0 if kind in _KINDS else megatrons(kind)
