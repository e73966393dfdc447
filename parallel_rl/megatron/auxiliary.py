"""Auxiliary losses added in backward (MoE routers, DSA indexer): denominators, and experts balanced under the law."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from parallel_rl.groups import ParallelGroups, reduce_
from parallel_rl.layout import valid_tokens
from parallel_rl.megatron.capabilities import (
    auxiliary_losses_know_context_ranks,
    routers_count_the_whole_row,
    schedules_scale_the_indexer,
)
from parallel_rl.megatron.micro_batch import MicroBatch
from parallel_rl.megatron.model_input import ModelInput

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens by which a router multiplies its auxiliary losses, including prompts and padding.

    here: of this micro-batch's row, or (megatron-core before 0.19) those that a rank's router reads. step: a 0-dim integer
    tensor, the sum over the step's micro-batches and data ranks.
    """

    here: int
    step: Tensor


def count_routed(
    inputs: Sequence[ModelInput],
    *,
    config: TransformerConfig,
    groups: ParallelGroups | None = None,
    made_up: bool = False,
) -> list[RoutedTokens]:
    """Count the tokens that routers with auxiliary losses will read per micro-batch; one all-reduce.

    >>> count_routed([padded_input(data["input_ids"])], config=config)[0].here
    8

    Args:
        inputs: of all micro-batches of this data rank's step. config: the model's.
        made_up: the inputs stand for no data and count as no token.
    """
    where = groups or ParallelGroups.from_megatron()
    local = [0 if made_up else batch.tokens.numel() for batch in inputs]
    if routers_count_the_whole_row() or not config.num_moe_experts:
        here = [tokens * where.cp_size for tokens in local]
    else:
        here = [tokens // (where.tp_size if config.sequence_parallel else 1) for tokens in local]
    total = reduce_(torch.tensor(sum(here), device=inputs[0].tokens.device), where.data)
    return [RoutedTokens(count, total) for count in here]


def balance_coefficients(config: TransformerConfig) -> dict[str, float]:
    """Return the nonzero coefficients of expert-balancing losses, by Megatron's names."""
    if not config.num_moe_experts:
        return {}
    kinds = getattr(config, "moe_router_load_balancing_type", "aux_loss")
    values = getattr(config, "moe_aux_loss_coeff", 0.0)
    by_kind = dict(zip(kinds, values, strict=True)) if isinstance(values, list) else {kinds: values}
    return {kind: value for kind, value in by_kind.items() if value}


def has_auxiliary_loss(config: TransformerConfig) -> bool:
    """Return whether a model adds losses in backward: its routers, or DSA's indexer."""
    coefficients = [getattr(config, "dsa_indexer_loss_coeff", None)]
    if config.num_moe_experts:
        coefficients.append(getattr(config, "moe_z_loss_coeff", None))
    return any(coefficients) or bool(balance_coefficients(config))


def forget_scales(config: TransformerConfig) -> None:
    """Reset the scale of auxiliary losses; a backward outside a schedule leaves a scale of another shape."""
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if getattr(config, "experimental_attention_variant", None) == "dsa":
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

        DSAIndexerLossAutoScaler.main_loss_backward_scale = None


@contextlib.contextmanager
def without_auxiliary_losses(config: TransformerConfig) -> Iterator[None]:
    """Turn off a model's losses in backward inside a `with` block."""
    names = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "dsa_indexer_loss_coeff")
    before = {name: getattr(config, name) for name in names if hasattr(config, name)}
    for name, value in before.items():
        setattr(config, name, [0.0] * len(value) if isinstance(value, list) else 0.0 if "aux" in name else None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def check_auxiliary_losses(config: TransformerConfig, cp_size: int, *, by_megatron: bool = False) -> None:
    """Refuse auxiliary losses whose gradients depend on the layout, by definition or by version.

    `by_megatron`: Megatron's routers compute `seq_aux_loss` and `global_aux_loss`, not `RouterBalance`.

    Raises:
        ValueError: on a version that gets them wrong: DSA's indexer, or context ranks without calculate_per_token_loss. By
            Megatron: experts balanced over data ranks (`global_aux_loss`) or by sequences (`seq_aux_loss`).
    """
    if not has_auxiliary_loss(config):
        return
    per_token, coefficients = config.calculate_per_token_loss, balance_coefficients(config)
    name = "moe_router_load_balancing_type"
    if by_megatron and "global_aux_loss" in coefficients:
        raise ValueError(
            f"{name} = 'global_aux_loss' balances what data ranks have routed in the micro-batches so far: its gradient "
            "depends on their number and order, and Megatron divides it by the data ranks; use `forward_backward`, which "
            "balances the whole step, or 'aux_loss'"
        )
    if by_megatron and "seq_aux_loss" in coefficients:
        raise ValueError(
            f"{name} = 'seq_aux_loss' takes a packed row for one sequence and padding for tokens of it, and weighs rows by "
            "micro-batches; use `forward_backward`, which balances each sequence's own tokens, or 'aux_loss'"
        )
    if getattr(config, "dsa_indexer_loss_coeff", None) and not schedules_scale_the_indexer():
        raise ValueError(
            f"dsa_indexer_loss_coeff = {config.dsa_indexer_loss_coeff} is scaled by no schedule of this megatron-core: each "
            "micro-batch adds all of it; use 0.19, or 0"
        )
    if cp_size > 1 and not per_token and getattr(config, "dsa_indexer_loss_coeff", None):
        raise ValueError(
            f"dsa_indexer_loss_coeff = {config.dsa_indexer_loss_coeff} at CP {cp_size} with calculate_per_token_loss = False "
            "counts times CP in this megatron-core, whose context ranks each add a mean of their own; use "
            "calculate_per_token_loss = True, or 0"
        )
    if cp_size > 1 and not per_token and not auxiliary_losses_know_context_ranks():
        raise ValueError(
            f"auxiliary losses at CP {cp_size} with calculate_per_token_loss = False are divided by CP in this megatron-core; "
            "use calculate_per_token_loss = True, or 0.16"
        )


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
