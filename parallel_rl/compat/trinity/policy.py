"""Trinity-RFT's policy losses: their call and returned values, losses on the ratio to the old policy, PPO, GSPO and OPMD."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count, Step, dense_batch
from parallel_rl.config.strict import nearest
from parallel_rl.counts import Aggregation
from parallel_rl.functional.surrogate import PolicyTerms
from parallel_rl.functional.surrogates import OPMD, PPO
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.call import share_of
from parallel_rl.losses.core.measures import sequence_mean
from parallel_rl.losses.off_policy_config import OffPolicyMaskConfig
from parallel_rl.losses.policy import PolicyLossFn as LibraryLoss
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = tuple[Tensor, Mapping[str, "float | Tensor"]]
ResultT = TypeVar("ResultT")


class KeyMapper:
    """Names of tensors in a trainer, and in Trinity."""

    def __init__(self, to_trinity_map: Mapping[str, str]) -> None:
        self.to_trinity_map = dict(to_trinity_map)
        self.from_trinity_map = {theirs: ours for ours, theirs in to_trinity_map.items()}

    def to_trinity(self, key: str) -> str:
        return self.to_trinity_map.get(key, key)

    def from_trinity(self, key: str) -> str:
        return self.from_trinity_map.get(key, key)


ALL_MAPPERS = {
    "verl": KeyMapper(
        {
            "log_prob": "logprob",
            "old_log_probs": "old_logprob",
            "ref_log_prob": "ref_logprob",
            "response_mask": "action_mask",
            "advantages": "advantages",
        }
    ),
    "tinker": KeyMapper({}),
}


def trinity_call(call: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Let `call` take tensors as keywords by the backend's names; counts and group make its `within`."""
    known = set(inspect.signature(call).parameters)

    @functools.wraps(call)
    def wrapper(
        self: PolicyLossFn,
        *args: object,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        context_parallel_group: ProcessGroup | None = None,
        statistics: Statistics | None = None,
        **kwargs: object,
    ) -> ResultT:
        named = {self.mapper.to_trinity(key): value for key, value in kwargs.items()}
        within = Step(global_valid_seqs, global_valid_toks, context_parallel_group, statistics)
        return call(self, *args, **{key: value for key, value in named.items() if key in known}, within=within)

    return wrapper


class PolicyLossFn(ABC):
    """Policy loss on log-probs [B, T] of responses: `loss, metrics = fn(logprob, ...)`.

    Tensors come in the order of the call or as keywords, by Trinity's names or those of `backend`; other keywords are dropped.
    Every loss also takes global_valid_seqs and global_valid_toks, counts of the whole optimizer step, and
    context_parallel_group, whose ranks split each row's tokens ([B, T/cp], all tensors alike). With counts a loss with
    `collect` needs its reduced result, statistics.

    Returns:
        The loss and a dict of floats by the origin's names; with counts or a context group a `Metrics` of local parts.
    """

    __call__: Callable[..., Result]
    #: default arguments that differ between Trinity's configs and its constructors
    other_defaults: ClassVar[Mapping[str, object]] = {}

    def __init__(self, backend: str = "verl") -> None:
        if backend not in ALL_MAPPERS:
            raise ValueError(f"backend = {backend!r} is not valid; {nearest(backend, ALL_MAPPERS)}")
        self.backend = backend
        self.mapper = ALL_MAPPERS[backend]

    @property
    def select_keys(self) -> list[str]:
        """Return the backend's names of the tensors that the loss reads, other than the log-probs."""
        parameters = inspect.signature(type(self).__call__).parameters.values()
        keys = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        return [self.mapper.from_trinity(key) for key in keys if key not in ("self", "logprob")]

    @classmethod
    def default_args(cls) -> dict[str, object]:
        """Return the constructor's arguments for a config that gives none: defaults and `other_defaults`."""
        defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
        defaults = {name: value for name, value in defaults.items() if name != "backend" and value is not None}
        return {**defaults, **cls.other_defaults}


def aggregation(mode: str) -> Aggregation:
    """Return the library's mode for which `scaled` gives Trinity's `loss_agg_mode`; refuse unknown ones."""
    modes: dict[str, Aggregation] = {
        "token-mean": "token-mean",
        "seq-mean-token-sum": "seq-mean-token-sum",
        "seq-mean-token-mean": "seq-mean-token-mean",
        "seq-mean-token-sum-norm": "seq-mean-token-sum",
    }
    if mode not in modes:
        raise ValueError(f"loss_agg_mode = {mode!r} is not valid; {nearest(mode, modes)}")
    return modes[mode]


def scaled(loss: Tensor, batch: TokenBatch, mode: str) -> Tensor:
    """Apply Trinity's denominator: seq-mean-token-sum-norm divides by the padded width alone (Q40)."""
    if mode != "seq-mean-token-sum-norm":
        return loss
    width = batch.shape[1] * batch.local.layout.cp_size
    return (loss * batch.counts.seqs / max(width, 1)).to(loss.dtype)


def reported(metrics: Mapping[str, Metric], step: Step) -> Mapping[str, float | Tensor]:
    """Return floats, copied at once, if the call is the whole step, else this rank's parts."""
    if not step.alone or not metrics:
        return Metrics(metrics)
    values = torch.stack([metric.value.detach().double() for metric in metrics.values()])
    return dict(zip(metrics, values.tolist(), strict=True))


def clip_bounds(clip_range: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    """Return the lower and upper clip range, each `clip_range` if None; ValueError without either."""
    low, high = clip_range if low is None else low, clip_range if high is None else high
    if low is None or high is None:
        raise ValueError(f"clip_range_low = {low} and clip_range_high = {high}: give both, or clip_range for both")
    return low, high


class RatioLossFn(PolicyLossFn):
    """Policy loss with the usual call: log-probs, old log-probs, mask and advantages, all [B, T]."""

    loss_fn: LibraryLoss
    loss_agg_mode: str

    @trinity_call
    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor, *, within: Step
    ) -> Result:
        fields = {"prev_logprobs": old_logprob, "generation_logprobs": logprob.detach(), "advantages": advantages}
        loss, metrics = self.share(dense_batch(logprob, action_mask, fields, within))
        return loss, reported(metrics, within)

    def share(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the local loss of a batch with the fields of the call, and its metrics."""
        shares = self.loss_fn.shares(batch)
        loss = scaled(share_of(shares.loss, None), batch, self.loss_agg_mode)
        with torch.no_grad():
            return loss, self._metrics(batch, shares.terms, Metric("share", loss))

    @abstractmethod
    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        """Return the metrics by the origin's names."""


class PPOPolicyLossFn(RatioLossFn):
    """Clipped surrogate, always with a dual clip; the log-ratio is clamped to ±20 (gradient 0 beyond).

    clip_range: the default of clip_range_low and clip_range_high. clip_ratio_c: of the dual clip, > 1. enable_sequence_masking:
    drop tokens with A < 0 if the sequence's mean of l_old − l exceeds delta_sequence_masking. fallback_to_policy_gradient: the
    ratio is 1 with its gradient, old_logprob is not read.
    Metrics: pg_clipfrac, pg_clipfrac_lower, ppo_kl, pg_loss; with masking seq_mask/masked_tokens (also counts padding with A
    < 0) and seq_mask/mean_sequence_kl. Papers: arXiv 1707.06347, 1912.09729, 2512.02556.
    """

    other_defaults: ClassVar = {"clip_range": 0.2}

    def __init__(
        self,
        backend: str = "verl",
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        clip_ratio_c: float = 3.0,
        loss_agg_mode: str = "token-mean",
        enable_sequence_masking: bool = False,
        delta_sequence_masking: float = 0.1,
        fallback_to_policy_gradient: bool = False,
    ) -> None:
        super().__init__(backend)
        self.clip_range_low, self.clip_range_high = clip_bounds(clip_range, clip_range_low, clip_range_high)
        self.clip_ratio_c, self.loss_agg_mode = clip_ratio_c, loss_agg_mode
        self.enable_sequence_masking, self.delta_sequence_masking = enable_sequence_masking, delta_sequence_masking
        self.fallback_to_policy_gradient = fallback_to_policy_gradient
        # the fallback's drift is from its own log-probs: 0
        behaviour: Literal["prev", "generation"] = "generation" if fallback_to_policy_gradient else "prev"
        masking = OffPolicyMaskConfig(delta_sequence_masking, behaviour) if enable_sequence_masking else None
        self.loss_fn = LibraryLoss(
            PolicyLossConfig(
                PPO(self.clip_range_low, self.clip_range_high, clip_ratio_c),
                aggregation(loss_agg_mode),
                on_policy=fallback_to_policy_gradient,
                log_ratio_clamp=None if fallback_to_policy_gradient else 20.0,
                off_policy_mask=masking,
            )
        )

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        ratio, advantages = terms.ratio, terms.advantages
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_range_low, 1 + self.clip_range_high)
        above = (torch.maximum(plain, clipped) > -advantages * self.clip_ratio_c) & (advantages < 0)
        metrics = {
            "pg_clipfrac": batch.token_mean(clipped > plain),
            "pg_clipfrac_lower": batch.token_mean(above),
            "ppo_kl": batch.token_mean(-terms.token_log_ratio),
            "pg_loss": loss,
        }
        if self.enable_sequence_masking:
            drift = batch.segment_mean(-terms.token_log_ratio)
            masked = (batch.local.data["advantages"] < 0) & (drift > self.delta_sequence_masking)[:, None]
            masked_tokens = Metric("share", masked.sum(dtype=torch.float64) / batch.counts.toks)
            metrics |= {
                "seq_mask/masked_tokens": masked_tokens,
                "seq_mask/mean_sequence_kl": sequence_mean(batch, drift),
            }
        return metrics


class GSPOLossFn(RatioLossFn):
    """GSPO-token: the sequence's geometric mean ratio, gradient per token, clipped; no dual clip.

    Trinity's trainer overrides this loss_agg_mode (Q35); here it holds. Metrics: pg_clipfrac, ppo_kl, pg_loss, ppo_kl_seq (a
    mean over all rows, also empty ones). Paper: arXiv 2507.18071.
    """

    other_defaults: ClassVar = {"clip_range_low": 0.0003, "clip_range_high": 0.0004}

    def __init__(
        self,
        backend: str = "verl",
        clip_range: float | None = None,
        clip_range_low: float | None = None,
        clip_range_high: float | None = None,
        loss_agg_mode: str = "seq-mean-token-mean",
    ) -> None:
        super().__init__(backend)
        self.clip_range_low, self.clip_range_high = clip_bounds(clip_range, clip_range_low, clip_range_high)
        self.loss_agg_mode = loss_agg_mode
        surrogate = PPO(self.clip_range_low, self.clip_range_high)
        self.loss_fn = LibraryLoss(
            PolicyLossConfig(surrogate, aggregation(loss_agg_mode), ratio_level="sequence-mean", ratio_gradient="token")
        )

    def _metrics(self, batch: TokenBatch, terms: PolicyTerms, loss: Metric) -> dict[str, Metric]:
        plain = -terms.advantages * terms.ratio
        clipped = -terms.advantages * terms.ratio.clamp(1 - self.clip_range_low, 1 + self.clip_range_high)
        return {
            "pg_clipfrac": batch.token_mean(clipped > plain),
            "ppo_kl": batch.token_mean(-terms.token_log_ratio),
            "pg_loss": loss,
            "ppo_kl_seq": sequence_mean(batch, batch.segment_mean(-terms.token_log_ratio)),
        }


class OPMDPolicyLossFn(PolicyLossFn):
    """Online policy mirror descent, −A·l / (1 + τ). Metrics: opmd_loss. Papers: 2505.17826, 2509.24203."""

    def __init__(self, backend: str = "verl", tau: float = 1.0, loss_agg_mode: str = "token-mean") -> None:
        super().__init__(backend)
        self.tau, self.loss_agg_mode = tau, loss_agg_mode
        self.loss_fn = LibraryLoss(PolicyLossConfig(OPMD(tau), aggregation(loss_agg_mode)))

    @trinity_call
    def __call__(self, logprob: Tensor, action_mask: Tensor, advantages: Tensor, *, within: Step) -> Result:
        batch = dense_batch(logprob, action_mask, {"advantages": advantages}, within)
        loss = scaled(self.loss_fn.shares(batch).loss, batch, self.loss_agg_mode)
        return loss, reported({"opmd_loss": Metric("share", loss)}, within)
