"""Experts balanced over sequences or over the whole step: routers' `seq_aux_loss` and `global_aux_loss` under the law."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from parallel_rl.groups import ParallelGroups
from parallel_rl.layout import valid_tokens
from parallel_rl.megatron.auxiliary import balance_coefficients
from parallel_rl.megatron.micro_batch import MicroBatch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_KINDS = ("seq_aux_loss", "global_aux_loss")


class _Tokens(NamedTuple):
    """A micro-batch's tokens in the order in which this rank's routers see them, [n]: their sequences, and which count."""

    rows: Tensor
    counted: Tensor
    lengths: Tensor  # [B] tokens of each sequence that count


class RouterBalance:
    """Both losses of all routers of a step, in place of Megatron's, which are of a micro-batch's rows, however filled.

        seq:    α · 1/N_seq · Σ_b E/(K·n_b²) · Σ_e c_be · Σ_{t ∈ b} p_te       global:  α · E/(K·N²) · Σ_e C_e · Σ_t p_te

    with a token's scores p over E experts, of which it chooses K, and c_be, C_e the choices of e in a sequence and in the
    step. A sequence's n_b tokens are its prompt and what follows up to the last token that carries loss: the same on
    padded and on packed rows; rows that carry none are left out. N_seq and N count over the step. The choices of the whole step
    are known before the first gradient, from a forward pass without: see `counts_first`. Papers: DeepSeek-V3, arXiv 2412.19437;
    arXiv 2501.11873.

    Attributes:
        counts_first: whether the step needs that pass, inside `counting`.
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
        """Take the `divisor` by which Megatron divides what a router adds in backward."""
        coefficients = balance_coefficients(config)
        self._of_sequences, self._of_step = (coefficients.get(kind, 0.0) for kind in _KINDS)
        self.counts_first = bool(self._of_step)
        self._routers = [each for model in models for each in model.modules() if isinstance(each, TopKRouter)]
        self._config, self._groups, self._divisor = config, groups, divisor
        lengths = torch.cat([_lengths(batch) for batch in batches])
        self._totals = torch.stack([(lengths > 0).sum(), lengths.sum()])
        if groups.dp_size > 1:
            dist.all_reduce(self._totals, group=groups.data)
        self._totals = self._totals.clamp(min=1).to(torch.float64)
        experts = config.num_moe_experts or 0
        self._chosen = torch.zeros(len(self._routers), experts, dtype=torch.float64, device=lengths.device)
        self._present: _Tokens | None = None
        self._is_counting = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, routers add these losses and leave out Megatron's of the same names."""
        for index, router in enumerate(self._routers):
            router.get_aux_loss_coeff = _without(router.get_aux_loss_coeff)
            router.routing = self._routing(index, router, router.routing)
        try:
            yield
        finally:
            for router in self._routers:
                del router.get_aux_loss_coeff, router.routing

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, a forward pass of all micro-batches without gradient counts what tokens choose; one all-reduce a group."""
        self._is_counting = True
        with self.installed():
            yield
        self._is_counting = False
        for group in (self._groups.tensor, self._groups.context, self._groups.data):
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(self._chosen, group=group)

    def enter(self, batch: MicroBatch) -> None:
        """Tell routers whose tokens they will see from now on."""
        layout, lengths = batch.input.layout, _lengths(batch)
        places = [each.view(layout.local_shape).t() for each in (layout.sequence_ids, layout.positions)]
        if self._config.sequence_parallel:
            places = [each.chunk(self._groups.tp_size)[self._groups.tp_rank] for each in places]
        rows, positions = (each.flatten() for each in places)
        self._present = _Tokens(rows, positions < lengths[rows], lengths)

    def follow(self, output: Tensor, batch: MicroBatch) -> None:
        """Enter the micro-batch again as its backward begins, where recomputed layers run their routers a second time."""
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda _: self.enter(batch))

    def _routing(
        self, index: int, router: TopKRouter, megatrons: Callable[..., tuple[Tensor, Tensor]]
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        def routing(logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            probs, choice = megatrons(logits, *args, **kwargs)
            if torch.is_grad_enabled():
                loss = self._loss(index, router, *self._scores(router, logits))
                probs = MoEAuxLossAutoScaler.apply(probs, loss * self._divisor)
            elif self._is_counting:
                self._chosen[index] += self._scores(router, logits)[1].sum(0)
            return probs, choice

        return routing

    def _scores(self, router: TopKRouter, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of this rank's tokens, [n, E], and their choices, 0 where a token does not count."""
        assert self._present is not None
        rows = logits.reshape(-1, logits.shape[-1])
        fused = self._config.moe_router_fusion
        chosen, scores = compute_routing_scores_for_aux_loss(rows, router.topk, router.score_function, fused=fused)
        return scores, (chosen & self._present.counted[:, None]).to(torch.float64)

    def _loss(self, index: int, router: TopKRouter, scores: Tensor, chosen: Tensor) -> Tensor:
        """This rank's part of both losses of a router."""
        assert self._present is not None
        rows, counted, lengths = self._present
        n_sequences, n_tokens = self._totals.unbind()
        weight = self._of_step / n_tokens.square() * self._chosen[index]
        if self._of_sequences:
            choices = chosen.new_zeros(len(lengths), chosen.shape[1]).index_add_(0, rows, chosen)
            if router.tp_cp_group.size() > 1:
                dist.all_reduce(choices, group=router.tp_cp_group)
            of_row = self._of_sequences / n_sequences / lengths.clamp(min=1).square()
            weight = weight + (of_row[:, None] * choices)[rows]
        weight = (weight * (scores.shape[1] / router.topk)).to(scores.dtype)
        return torch.where(counted[:, None], scores * weight, 0.0).sum()


def needs_balance(config: TransformerConfig) -> bool:
    """Whether a model's routers have one of these losses."""
    return any(balance_coefficients(config).get(kind) for kind in _KINDS)


def _lengths(batch: MicroBatch) -> Tensor:
    """[B] tokens of each sequence up to the last that carries loss, 0 where none does."""
    valid = valid_tokens(batch.data)
    column = torch.arange(1, valid.shape[1] + 1, device=valid.device)
    return torch.where(valid, column, 0).amax(1)


def _without(megatrons: Callable[[str], float]) -> Callable[[str], float]:
    return lambda kind: 0.0 if kind in _KINDS else megatrons(kind)
