"""Policy loss: ratio × surrogate × importance weight × masks, aggregated, plus KL, entropy and NLL."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, reduce
from operator import add, and_

import torch
from torch import Tensor

from parallel_rl.functional.kl import kl_with_overflow
from parallel_rl.functional.ratio import bounded_log_ratio, exp_or_zero, safe_exp
from parallel_rl.functional.surrogate import PolicyTerms, follows_overflow
from parallel_rl.losses.core.aggregation import with_units
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.loss import Account, ConfigT
from parallel_rl.losses.core.measures import count_true, overflow_tokens, token_means, token_ranges
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.entropy_bonus import EntropyBonus, EntropyCoefficient
from parallel_rl.losses.off_policy import (
    count_survivors,
    entropy_threshold,
    importance_weight,
    off_policy_keep,
    passed_rules,
    policy_unit,
    policy_weights,
    representable,
)
from parallel_rl.losses.policy_config import PolicyLossConfig
from parallel_rl.losses.policy_metrics import (
    MaskedSurrogate,
    PolicyShares,
    clip_fractions,
    mismatch_metrics,
    mismatch_values,
)
from parallel_rl.losses.registry import register_loss
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics


class PolicyLoss(LossFn[ConfigT]):
    """Base of losses described by a `PolicyLossConfig`: requirements, statistics and terms."""

    @property
    @abstractmethod
    def policy(self) -> PolicyLossConfig:
        """Return the options as a `PolicyLossConfig`."""

    @property
    def on_policy(self) -> bool:
        return self.policy.on_policy

    @cached_property
    def requirements(self) -> Requirements:
        cfg = self.policy
        others = [Field("rewards", per="sequence")] if cfg.positive_nll_weight else []
        if cfg.surrogate.draw_seed is not None:
            others.append(Field("sample_ids", per="sequence", dtype="integer"))
        if cfg.reads_turns:
            others.append(Field("segment_ids", dtype="integer"))
        needs = Requirements(
            (*(Field(name) for name, read in self._token_fields().items() if read), *others),
            optional=() if cfg.reads_generation else (Field("generation_logprobs"),),  # for metrics
            counted=cfg.positive_nll_weight > 0 or (cfg.counts_survivors and self._recorded),
            collected=cfg.collects or (cfg.counts_survivors and not self._recorded),
            entropy=True,
            entropy_measured=not cfg.entropy_bonus and cfg.entropy_filter is None,
            entropy_gradient=bool(cfg.entropy_bonus),
            # a KL's reference is not truncated
            untruncated=bool(self.options.truncation) and cfg.reads_reference,
            truncatable=True,
            token_separable=cfg.token_separable,
            weighs_sequences=cfg.weighs_sequences,
        )
        needs = with_units(needs, cfg.aggregation, cfg.token_weights)
        # `count_survivors` counts the units that a rejection keeps
        return replace(needs, units=None) if cfg.counts_kept else needs

    @cached_property
    def entropy_bonus(self) -> EntropyCoefficient:
        """Return the entropy bonus's coefficient, which may change over the steps; its state is the loss's."""
        return EntropyCoefficient.of(self.policy.entropy_bonus)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.entropy_bonus.step(metrics)

    def state_dict(self) -> dict[str, float]:
        return self.entropy_bonus.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.entropy_bonus.load_state_dict(state)

    def _token_fields(self) -> dict[str, bool]:
        cfg = self.policy
        return {
            "advantages": True,
            "prev_logprobs": cfg.reads_prev,
            "generation_logprobs": cfg.reads_generation,
            "reference_policy_logprobs": cfg.reads_reference,
        }

    @property
    def _recorded(self) -> bool:
        """Return whether recorded log-probs alone decide what corrections keep: not on policy or truncated."""
        return not (self.policy.on_policy or self.options.truncation)

    def count_from(self, batch: TokenBatch) -> Statistics:
        sums = {}
        if self.policy.positive_nll_weight:
            positive = batch.valid & (batch.per_sequence("rewards") > 0)[:, None]
            sums["positive_tokens"] = count_true(batch, positive).value
        if self.policy.counts_survivors and self._recorded:
            return Statistics(sums) | count_survivors(batch, self._prev_recorded(batch), self.policy)
        return Statistics(sums)

    def objective(self, batch: TokenBatch) -> Tensor:
        return self.shares(batch).loss

    def collect_from(self, batch: TokenBatch) -> Statistics:
        cfg, samples = self.policy, {}
        survivors = Statistics({}) if self._recorded else count_survivors(batch, self._prev_recorded(batch), cfg)
        if cfg.entropy_filter is not None:
            samples["entropy"] = batch.entropy
        if cfg.surrogate.needs_statistics:
            samples |= cfg.surrogate.collect(self._terms(batch))
        owned = {name: torch.where(batch.mask, value.double(), torch.nan) for name, value in samples.items()}
        return survivors | Statistics({}, owned)

    def shares(self, batch: TokenBatch) -> PolicyShares:
        """Compute the local losses of all terms in the options."""
        cfg, terms = self.policy, self._terms(batch)
        kept, rules, metrics = self._kept(batch)
        masked = self._masked(batch, cfg.surrogate(terms), terms, kept)
        metrics |= masked.metrics
        values = {} if masked.importance is None else {"importance": masked.importance}
        overflows = [masked.overflow]
        parts = {"policy_loss": (1.0, masked.surrogate)}
        if cfg.kl is not None:
            values["kl"], overflow = self._kl(batch, terms)
            overflows.append(overflow)
            parts["kl_penalty"] = (cfg.kl.coefficient, values["kl"])
        if cfg.entropy_bonus:
            parts["entropy_bonus"] = (-self.entropy_bonus.value, batch.entropy)
        stacked = torch.stack([x for _, x in parts.values()])
        stacked = stacked if kept is batch.mask else torch.where(kept, stacked, 0)
        sums = batch.token_sum(stacked, policy_weights(batch, kept, cfg)).unbind()
        factors = {name: factor for name, (factor, _) in parts.items()}
        shares = {name: x if factors[name] == 1 else factors[name] * x for name, x in zip(parts, sums, strict=True)}
        per = policy_unit(cfg)
        metrics |= {
            name: Metric("share", x, per=per) for name, x in zip(parts, sums, strict=True) if name != "entropy_bonus"
        }
        if cfg.positive_nll_weight:
            count = batch.statistics["positive_tokens"].clamp(min=1)
            nll = batch.weighted_sum(-batch.logprobs, (batch.per_sequence("rewards") > 0) / count)
            shares["positive_nll_loss"] = cfg.positive_nll_weight * nll
            metrics["positive_nll_loss"], per = Metric("share", nll, per="positive tokens"), None
        loss = reduce(add, shares.values())
        if isinstance(cfg.entropy_bonus, EntropyBonus):
            value = torch.full_like(loss, self.entropy_bonus.value, requires_grad=False)
            metrics["entropy_coef"] = Metric("max", value)
        metrics |= overflow_tokens(batch, overflows)
        passed = {**{f"rejection, {words}": x for words, x in rules.items()}, **masked.passed}
        return PolicyShares(loss, {"loss": Metric("share", loss, per=per), **metrics}, terms, shares, passed, values)

    def account(self, batch: TokenBatch) -> Account:
        shares, surrogate = self.shares(batch), self.policy.surrogate
        has_ratio = self.policy.reads_prev and surrogate.uses_ratio
        return shares.account(batch.mask, surrogate.clipped(shares.terms), has_ratio=has_ratio)

    def _prev(self, batch: TokenBatch) -> Tensor:
        return batch["prev_logprobs"] if self.policy.reads_prev else batch.logprobs.detach()

    def _prev_recorded(self, batch: TokenBatch) -> Tensor:
        return batch.recorded("prev_logprobs") if self.policy.reads_prev else batch.logprobs.detach()

    def _terms(self, batch: TokenBatch) -> PolicyTerms:
        cfg, logprobs, prev = self.policy, batch.logprobs, self._prev(batch)
        if cfg.reads_prev:
            token, overflow = bounded_log_ratio(logprobs, prev, cfg.log_ratio_clamp)
        else:
            token, overflow = logprobs - prev, None
        log_ratio = token
        if cfg.ratio_level != "token":
            log_ratio = batch.pooled(token, cfg.ratio_level)
            if cfg.ratio_gradient == "token":
                log_ratio = logprobs - logprobs.detach() + log_ratio.detach()
        return PolicyTerms(
            logprobs,
            prev,
            token,
            log_ratio,
            safe_exp(log_ratio) if cfg.ratio_level.endswith("sum") else log_ratio.exp(),
            batch["advantages"],
            sequence_mean=lambda x: batch.expand(batch.segment_mean(x)),
            sequence_sum=lambda x: batch.expand(batch.segment_sum(x)),
            samples=batch.samples,
            random=None if (seed := cfg.surrogate.draw_seed) is None else batch.random(seed),
            overflow=overflow,
        )

    def _kept(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Metric]]:
        """Return [T_local] bool: tokens that no rejection removes; those that pass each rule; the metric."""
        if self.policy.rejection is None:
            return batch.mask, {}, {}
        rules = passed_rules(batch, self._prev_recorded(batch), self.policy.rejection)
        kept = reduce(and_, rules.values(), batch.mask)
        return kept, rules, {"rejected_fraction": batch.token_mean(~kept)}

    def _masked(self, batch: TokenBatch, surrogate: Tensor, terms: PolicyTerms, kept: Tensor) -> MaskedSurrogate:
        """Apply weights and masks other than `kept` to the surrogate; the caller applies `kept`."""
        cfg, omega = self.policy, None
        metrics: dict[str, Metric] = {}
        passed: dict[str, Tensor] = {}
        overflow = terms.overflow
        if overflow is not None and cfg.surrogate.uses_ratio:
            if cfg.ratio_level.endswith("sum"):
                overflow = overflow | (batch.mask & follows_overflow(terms, surrogate))
            surrogate = surrogate.masked_fill(overflow, 0)
        if cfg.importance is not None:
            omega, metrics = importance_weight(batch, self._prev_recorded(batch), cfg.importance)
            if cfg.importance.normalize:
                omega = omega / (batch.statistics["importance_sum"] / batch.counts.toks).clamp(min=1e-8)
                omega = representable(omega, surrogate.dtype)
            surrogate = omega * surrogate
        if cfg.off_policy_mask is not None:
            near = off_policy_keep(batch, terms.token_log_ratio, cfg.off_policy_mask)
            metrics["off_policy_masked"], passed["off_policy_mask"] = batch.token_mean(~near), near
        if cfg.entropy_filter is not None:
            least = entropy_threshold(batch.samples["entropy"], cfg.entropy_filter)
            passed["entropy_filter"] = batch.entropy.detach() >= least
        surrogate = torch.where(reduce(and_, passed.values(), kept), surrogate, 0) if passed else surrogate
        return MaskedSurrogate(surrogate, metrics, passed, omega, overflow)

    def _kl(self, batch: TokenBatch, terms: PolicyTerms) -> tuple[Tensor, Tensor | None]:
        kl = self.policy.kl
        assert kl is not None
        output = batch.output
        stats = output.stats if kl.against == "prev" or output.untruncated is None else output.untruncated
        assert stats is not None
        logprobs = stats.logprobs
        against = terms.old_logprobs if kl.against == "prev" else batch["reference_policy_logprobs"]
        weight = None
        if kl.gradient == "score-function":
            weight = exp_or_zero(logprobs - logprobs.detach())
        elif kl.gradient == "generation":
            weight = exp_or_zero(logprobs - batch["generation_logprobs"])
        elif kl.gradient == "old":
            weight = exp_or_zero(batch.logprobs - terms.old_logprobs)
            weight = weight if kl.weight_clamp is None else weight.clamp(0, kl.weight_clamp)
        if kl.gradient == "ratio" and terms.overflow is not None:
            weight = terms.ratio.masked_fill(terms.overflow, 0)
        return kl_with_overflow(
            logprobs, against, kl.estimator, input_clamp=kl.input_clamp, output_clamp=kl.output_clamp, weight=weight,
            gradient_of_k2=kl.gradient == "straight-through",
        )  # fmt: skip


@register_loss("policy")
class PolicyLossFn(PolicyLoss[PolicyLossConfig]):
    """Policy gradient of every recipe; the local loss.

        L = AGG(ω·x(ρ, A, l)·1[kept]) + β·AGG(kl) − c·AGG(entropy) + μ·NLL(reward > 0)

    x is the surrogate, ρ = π/π_prev at the level of the options, ω = π_prev/π_generation (constant). `data` holds the common
    fields and advantages; depending on the options prev_logprobs, generation_logprobs and reference_policy_logprobs, all [B,
    S] float and token-aligned, rewards [B] and sample_ids [B]. Options on the whole step (entropy_filter, clip_cov, kl_cov,
    ...) need `statistics`, see `Statistics`.

    Metrics: see `parallel_rl.losses.policy_metrics.DESCRIPTIONS`; those of trainer against sampler need generation_logprobs.
    Call and errors: see `LossFn`.

    >>> import torch
    >>> from parallel_rl import PolicyLossFn, count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2]]), "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    >>> data |= {"advantages": torch.ones(1, 3), "prev_logprobs": torch.full((1, 3), -1.5)}
    >>> loss_fn = PolicyLossFn({"surrogate": {"name": "ppo", "clip_high": 0.28}})
    >>> loss, _ = loss_fn(torch.zeros(1, 3, 4), data, *count_valid(data))
    >>> round(loss.item(), 4)
    -1.1204
    """

    config_class = PolicyLossConfig

    @property
    def policy(self) -> PolicyLossConfig:
        return self.config

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        shares = self.shares(batch)
        return shares.loss, Metrics({**shares.metrics, **self._diagnostics(batch, shares.terms)})

    @torch.no_grad()
    def _diagnostics(self, batch: TokenBatch, terms: PolicyTerms) -> dict[str, Metric]:
        means = clip_fractions(self.policy.surrogate.clipped(terms))
        metrics = {"num_valid_samples": count_true(batch, batch.sequence_mask)}
        ranges = {}
        if batch.has_entropy:
            means["entropy"] = batch.entropy
        if self.policy.reads_prev and self.policy.surrogate.uses_ratio:
            means |= {"probs_ratio": terms.ratio, "approx_kl": -terms.token_log_ratio}
            ranges["probs_ratio"] = terms.ratio
        if not batch.has("generation_logprobs"):
            return metrics | token_ranges(batch, ranges) | token_means(batch, means)
        means |= mismatch_values(self._prev(batch), batch["generation_logprobs"])
        ranges["sampling_logp_difference"] = means["sampling_logp_difference"]
        metrics |= token_ranges(batch, ranges)
        del metrics["sampling_logp_difference_min"]
        return metrics | mismatch_metrics(token_means(batch, means))
