"""A loss for slime's `--custom-loss-function-path` (its source of August 2026), also for miles.

slime's hidden factor: after the call it divides the sum of the samples' means by the step's samples (with
calculate_per_token_loss the sum over tokens by the step's tokens), and undoes Megatron's averages. Its call has no count of
the step, so the loss gets 1 for both. Log-probs and fields are of responses, cut zigzag over context ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel_rl.agreement import raise_on_all_ranks
from parallel_rl.groups import ParallelGroups
from parallel_rl.hosts.scaling import Setting, check_fits, check_settings, read_setting, unit_of
from parallel_rl.losses.nll import NLLLossConfig
from parallel_rl.losses.policy import PolicyLoss
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.vocab.stats import check_targets, stats_of_shard

if TYPE_CHECKING:
    from parallel_rl.losses.core.base import LossFn
    from parallel_rl.losses.core.log_prob_rows import Values
    from parallel_rl.metrics import Metrics
    from parallel_rl.statistics import Statistics
    from parallel_rl.vocab.shards import VocabShard

_SETTINGS = (
    Setting("eps_clip", 0.2, ("clip_low", "low")),
    Setting("eps_clip_high", 0.2, ("clip_high", "high")),
    Setting("eps_clip_c", None, ("dual_clip", "ratio_max")),
)
# options of a policy loss outside its surrogate
_OPTIONS = (
    Setting("kl_loss_coef", 0.0, ("kl.coefficient",)),
    Setting("kl_loss_type", "k1", ("kl.estimator",)),
    Setting("entropy_coef", 0.0, ("entropy_bonus",)),
    Setting("use_tis", False, ("importance",)),
    Setting("tis_clip", 2.0, ("importance.high",)),
    Setting("tis_clip_low", 0.0, ("importance.low",)),
    Setting("use_unbiased_kl", False, ("kl.gradient",)),
    Setting("use_opsm", False, ("off_policy_mask",)),
    Setting("opsm_delta", 1e-4, ("off_policy_mask.delta",)),
)
# functions that only slime's own policy loss calls
_FUNCTIONS = ("custom_tis_function_path", "custom_pg_loss_reducer_function_path")
_NAMES = {
    "advantages": "advantages", "prev_logprobs": "log_probs", "generation_logprobs": "rollout_log_probs",
    "reference_policy_logprobs": "ref_log_probs", "returns": "returns",
}  # fmt: skip


@dataclass(frozen=True)
class _Piece:
    """Neighbouring predictors of a sample on a rank: first row, positions, place in the response."""

    row: int
    positions: range
    response: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.positions))


Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def custom_loss(loss_fn: LossFn, groups: ParallelGroups | None = None) -> Loss:
    """Wrap a loss in slime's call, (args, batch, logits, sum_of_sample_mean) → (loss, metrics).

    In a module of yours, `--loss-type custom_loss --custom-loss-function-path my_losses.gspo`:

        gspo = slime.custom_loss(PolicyLossFn({"ratio_level": "sequence-mean", "aggregation": "seq-mean-token-mean"}))

    Clip, KL, entropy bonus and importance weight are the loss's own; slime's are refused where they differ. With
    use_rollout_logprobs the sampler's log-probs are prev_logprobs.

    >>> from types import SimpleNamespace
    >>> from parallel_rl import NLLLoss
    >>> batch = {"unconcat_tokens": [torch.tensor([0, 1, 2])], "loss_masks": [torch.ones(2)]}
    >>> batch |= {"total_lengths": [3], "response_lengths": [2]}
    >>> args = SimpleNamespace(calculate_per_token_loss=True)
    >>> round(custom_loss(NLLLoss())(args, batch, torch.zeros(1, 3, 4), None)[0].item(), 4)  # of two tokens
    2.7726

    Args:
        loss_fn: with vocab_size if the vocabulary is padded. groups: tensor and context ranks; None: Megatron's.

    Raises:
        ValueError: a loss that slime cannot feed. In a call: eps_clip, eps_clip_high, eps_clip_c, kl_loss_coef, kl_loss_type,
            entropy_coef, use_tis, tis_clip, tis_clip_low, use_unbiased_kl, use_opsm or opsm_delta differs from the loss's own
            options (slime's defaults pass), or slime's own policy loss has a function; an aggregation at odds with
            calculate_per_token_loss; contiguous context ranks (allgather_cp); several samples of one rollout, for a loss
            without `token_weights` or with another aggregation than seq-mean-token-mean; a replay of the sampler's top-p.
    """
    check_fits("slime", loss_fn, tuple(_NAMES), entropy=True)
    unit, loss_name = unit_of(loss_fn), type(loss_fn).__name__
    if unit is None:
        raise ValueError(
            f"{loss_name} is divided by neither the step's tokens nor its sequences, or by both; slime divides by one"
        )
    needs = loss_fn.requirements
    of_rollouts = _of_rollouts(loss_fn)

    def call(args: object, batch: Mapping[str, Any], logits: Tensor, _: object) -> tuple[Tensor, dict[str, Tensor]]:
        _check(args, batch, unit, loss_name)
        _check_options(args, loss_fn)
        shared = None if unit == "tokens" else _shared_denominators(batch)
        ranks = _megatron() if groups is None else groups
        pieces, rows = _cut(batch, ranks.cp_rank, ranks.cp_size)

        def read() -> tuple[Tensor, Tensor, VocabShard]:
            if logits.dim() != 3 or len(logits) != 1 or logits.shape[1] < rows:
                got = list(logits.shape)
                raise ValueError(f"logits must be [1, T, V/tp] with T ≥ {rows} for total_lengths, got {got}")
            targets, keep = _targets(batch, pieces, logits[0])
            shard = loss_fn.options.shard(logits.shape[-1], ranks.tensor, entropy=needs.entropy)
            check_targets(targets, shard.vocab_size, ignore_index=None)
            return targets, keep, shard

        # context ranks look at different tokens
        targets, keep, shard = raise_on_all_ranks(read, [ranks.tensor, ranks.context], logits)
        temperature = getattr(args, "rollout_temperature", 1.0)
        stats = stats_of_shard(logits[0], targets, keep, replace(shard, temperature=temperature))

        def split(x: Tensor) -> list[Tensor]:
            return [torch.cat([x[piece.rows] for piece in of_sample]) for of_sample in pieces]

        logprobs = split(stats.logprobs)
        data: dict[str, Values] = {"response_mask": _masks(batch, pieces)}
        sampler = bool(getattr(args, "use_rollout_logprobs", False))  # as the old policy
        for name in needs.names:
            theirs = "rollout_log_probs" if sampler and name == "prev_logprobs" else _NAMES[name]
            values = batch.get(theirs)
            if not values and theirs == "log_probs":  # on policy, as slime has it
                values = [x.detach() for x in logprobs]
            if not values:
                raise ValueError(f"batch has no {theirs!r}, which {loss_name} reads as {name}")
            data[name] = values
        count = torch.ones((), device=logits.device)
        entropy = None if stats.entropy is None else split(stats.entropy)

        def computed(fn: LossFn, statistics: Statistics | None = None) -> tuple[Tensor, Metrics]:
            return fn.from_logprobs(
                logprobs, data=data, global_valid_seqs=count, global_valid_toks=count, context_parallel_group=ranks.context,
                entropy=entropy, statistics=statistics,
            )  # fmt: skip

        if shared is not None:
            if of_rollouts is None:
                raise ValueError(
                    f"rollout_mask_sums = {shared.tolist()} divides several samples of one rollout by one number, which "
                    f"{loss_name} cannot with aggregation 'seq-mean-token-mean'; use aggregation 'token-mean' and "
                    "calculate_per_token_loss"
                )
            data["token_weights"] = [torch.ones_like(x) / n for x, n in zip(logprobs, shared, strict=True)]
            statistics = of_rollouts.collect_from_logprobs(
                logprobs, data=data, global_valid_seqs=count, global_valid_toks=count, context_parallel_group=ranks.context,
                entropy=entropy,
            )  # fmt: skip
            loss, _ = computed(of_rollouts, statistics.reduce())
            return loss, {"loss": loss.detach()}
        loss, metrics = computed(loss_fn)
        return loss, {name: metrics[name] for name, per in metrics.divided_by.items() if name == "loss" or per == unit}

    return call


def _check(args: object, batch: Mapping[str, Any], unit: str, name: str) -> None:
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    if unit != ("tokens" if per_token else "sequences"):
        raise ValueError(
            f"{name} is divided by {unit}, slime with calculate_per_token_loss = {per_token} divides by "
            f"{'tokens' if per_token else 'samples'}: set aggregation, or calculate_per_token_loss"
        )
    if getattr(args, "allgather_cp", False):
        raise ValueError("allgather_cp cuts the whole row over context ranks; supported is the zigzag of each sample")
    if batch.get("rollout_top_p_token_ids"):
        raise ValueError("rollout_top_p_token_ids: a replay of the sampler's top-p is not supported here")


def _check_options(args: object, loss_fn: LossFn) -> None:
    """Refuse slime's options that the user set and that differ from this loss's."""
    if not isinstance(loss_fn, PolicyLoss):
        return
    check_settings("slime", loss_fn, args, _SETTINGS)
    options = loss_fn.policy
    weighted = options.importance is not None and bool(read_setting(args, "use_tis"))
    masked = options.off_policy_mask is not None and bool(read_setting(args, "use_opsm"))
    read = dict.fromkeys(("kl_loss_type", "use_unbiased_kl"), options.kl is not None)
    read |= {"tis_clip": weighted, "tis_clip_low": weighted, "opsm_delta": masked}
    for key, default, (name,) in _OPTIONS:
        value, ours = read_setting(args, key), read_setting(options, name)
        same = ours == "old" if key == "use_unbiased_kl" else ours is not None if default is False else value == ours
        if value and read.get(key, True) and value != default and not same:
            raise ValueError(
                f"{key} = {value!r}, but the loss has {name} = {ours!r}; give the loss what slime's own would have"
            )
    for key in _FUNCTIONS:
        if read_setting(args, key):
            raise ValueError(
                f"{key} = {read_setting(args, key)!r} is called by slime's own policy loss alone; leave it out"
            )


def _shared_denominators(batch: Mapping[str, Any]) -> Tensor | None:
    """Return [B] the samples' divisors, or None where each is the sample's own number of tokens."""
    denominators = batch.get("rollout_mask_sums")
    if denominators is None:
        return None
    ours = torch.stack([mask.sum() for mask in batch["loss_masks"]]).clamp(min=1).double()
    theirs = torch.as_tensor([*denominators], device=ours.device).clamp(min=1).double()
    return None if torch.equal(ours, theirs) else theirs


def _of_rollouts(loss_fn: LossFn) -> LossFn | None:
    """Return the loss as a token sum with weights 1 / a rollout's tokens, or None without such a form."""
    config = loss_fn.config
    weighted = isinstance(config, (PolicyLossConfig, NLLLossConfig)) and config.token_weights is None
    if not weighted or config.aggregation != "seq-mean-token-mean":
        return None
    summed = type(loss_fn)(replace(config, aggregation="token-sum", token_weights="count"))
    summed.options = loss_fn.options
    return summed


def _megatron() -> ParallelGroups:
    state = sys.modules.get("megatron.core.parallel_state")  # if not imported, there are no groups
    initialized = state is not None and state.model_parallel_is_initialized()
    return ParallelGroups.from_megatron() if initialized else ParallelGroups()


def _cut(batch: Mapping[str, Any], rank: int, ranks: int) -> tuple[list[list[_Piece]], int]:
    """List each sample's _Pieces that predict its response on this rank; count all rows of logits."""
    pieces: list[list[_Piece]] = []
    row = 0
    for total, response in zip(batch["total_lengths"], batch["response_lengths"], strict=True):
        first, chunk = total - response - 1, total if ranks == 1 else -(-total // (2 * ranks))
        pieces.append([])
        for at in (0,) if ranks == 1 else (rank * chunk, (2 * ranks - rank - 1) * chunk):
            start = min(max(at, first), at + chunk)
            here = range(start, max(start, min(at + chunk, total - 1)))
            pieces[-1].append(_Piece(row + start - at, here, start - first))
            row += chunk
    return pieces, row


def _masks(batch: Mapping[str, Any], pieces: Sequence[list[_Piece]]) -> list[Tensor]:
    """Cut responses' masks as their log-probs; ValueError for another length."""
    for index, (mask, length) in enumerate(zip(batch["loss_masks"], batch["response_lengths"], strict=True)):
        if len(mask) != length:
            raise ValueError(
                f"loss_masks[{index}] has {len(mask)} values, its response {length} tokens (response_lengths); give the "
                "mask of the response alone"
            )
    return [
        torch.cat([mask[piece.response : piece.response + len(piece.positions)] for piece in of_sample])
        for mask, of_sample in zip(batch["loss_masks"], pieces, strict=True)
    ]


def _targets(batch: Mapping[str, Any], pieces: Sequence[list[_Piece]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return [T] the token that each row of logits predicts, and whether it is of a response."""
    targets = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    keep = torch.zeros_like(targets, dtype=torch.bool)
    for tokens, of_sample in zip(batch["unconcat_tokens"], pieces, strict=True):
        for piece in of_sample:
            targets[piece.rows] = tokens[piece.positions.start + 1 : piece.positions.stop + 1]
            keep[piece.rows] = True
    return targets, keep
