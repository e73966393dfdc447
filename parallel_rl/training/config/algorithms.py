"""The main sections of a config; a run has exactly one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from parallel_rl.advantages import AdvantageEstimator
from parallel_rl.advantages.grouped import GRPO
from parallel_rl.config.strict import at_least
from parallel_rl.experience import AdaptiveKLController, DynamicSampling, FailedSamplesConfig, Overlong
from parallel_rl.functional.kl import KLType
from parallel_rl.losses.choice import LossConfig
from parallel_rl.training.config.data import (
    ESTIMATOR_FIELDS,
    OBSERVED,
    OF_TEACHER,
    RECORDED_FIELDS,
    STEP_LABELS,
    check_fields_available,
    own_names,
)
from parallel_rl.training.config.sections import OptimizerConfig, ServerConfig


@dataclass(frozen=True)
class SupervisedConfig:
    """Supervised steps on `data.examples`: the warm-up, or supervised fine-tuning itself.

    steps: number of optimizer steps.
    batch_size: sequences per step.
    optimizer: AdamW of this phase.
    loss: a loss of tokens: nll (SFT), sft_is, sft_phi; or prm, a process reward model, which learns from `data.solutions`.
    """

    steps: int
    batch_size: int
    optimizer: OptimizerConfig
    loss: LossConfig = field(default_factory=lambda: LossConfig("nll"))

    def __post_init__(self) -> None:
        at_least(self, steps=1, batch_size=1)
        check_fields_available(self.loss, {STEP_LABELS: "", **dict.fromkeys(own_names(self.loss), "")})
        ids = self.loss.options.get("reward_token_ids")
        if self.source == "solutions" and (not isinstance(ids, list | tuple) or len(ids) != 2):
            raise ValueError(
                f"loss.options.reward_token_ids = {ids} is not valid: the steps of data.solutions are good or bad; two "
                "token ids are needed, the good one first"
            )

    @property
    def source(self) -> str:
        """Return the source of the records: examples, or solutions for a loss on labelled steps."""
        return "solutions" if STEP_LABELS in self.loss.requirements.names else "examples"


@dataclass(frozen=True)
class CriticConfig:
    """A value function of the policy's shape with a scalar head, initialised from the policy's trunk.

    optimizer: AdamW of the critic. It makes as many optimizer steps as the policy.
    loss: a loss on a scalar head that reads `values` and `returns`.
    warmup_steps: first steps of the run in which the critic alone is trained.
    """

    optimizer: OptimizerConfig
    loss: LossConfig = field(default_factory=lambda: LossConfig("value"))
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        at_least(self, warmup_steps=0)
        check_fields_available(self.loss, dict.fromkeys(("values", "returns", "group_ids"), ""), scalar_head=True)
        needs = self.loss.requirements
        if self.loss.unseen:
            return
        if needs.reads == "scalar" and not needs.shift:
            raise ValueError(
                "loss.options.head_position must be 'predictor': the values come one position before their token"
            )
        if needs.reads != "scalar":
            raise ValueError(f"loss.name = {self.loss.name!r} reads logits; a critic has a scalar head")


@dataclass(frozen=True)
class KLControllerConfig:
    """Adaptive coefficient of the KL in the reward (arXiv 1909.08593), see `AdaptiveKLController`.

    target: mean KL per token to reach.
    horizon: number of samples; the larger, the slower the coefficient moves.
    """

    target: float
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        AdaptiveKLController(1.0, self.target, self.horizon)

    def check(self, coefficient: float, samples: int) -> None:
        """Refuse a coefficient of 0, which no factor changes, and `samples` above the horizon's bound."""
        if coefficient == 0:
            raise ValueError(
                "kl_controller has no effect with advantages.kl_coefficient = 0; set that coefficient to its start value, or "
                "remove kl_controller"
            )
        if samples >= 5 * self.horizon:
            raise ValueError(
                f"kl_controller.horizon = {self.horizon:g} is too short for prompts × group_size = {samples} samples a step; "
                f"it must be above {samples / 5:g}"
            )


@dataclass(frozen=True)
class RLConfig:
    """RL: a step samples `prompts` × `group_size` completions for `updates` optimizer steps.

    Attributes:
        steps: number of steps after the warm-up.
        prompts: prompts per step.
        group_size: samples per prompt. With recorded rollouts, prompts × group_size is the number of sequences per step.
        optimizer: AdamW of the policy.
        updates: optimizer steps on one step's samples.
        prev_logprobs: "recompute" runs the training forward before the first update; "generation" takes `generation_logprobs`.
        record: write each step's samples to run.dir/rollouts/step_<number>_<data rank>.jsonl, for `data.rollouts`.
        dynamic_sampling: replace prompts whose samples have too low or too high a mean reward (DAPO). null: keep all.
        overlong: change the rewards of long or truncated completions. null: keep them.
        failed_samples: what happens to samples whose reward function fails or whose log-probs are not finite.
        server: rollout servers that sample completions. null: the trainer samples them.
        experts: demonstrations from `data.examples` added to the samples of each step, for a loss that reads `expert_mask`.
        advantages: advantage estimator and its options.
        reward_kl: estimator of the KL to the reference policy that `advantages.kl_coefficient` subtracts from the reward.
        kl_controller: adapts the coefficient of `reward_kl`, from `advantages.kl_coefficient` on, to reach a target KL.
        critic: a value function, for an estimator that reads `values`.
        teacher: checkpoint folder of a model of the same shape and vocabulary, relative to the config file. For an estimator or
            loss that reads `teacher_token_logprobs` (on-policy distillation) or a loss that reads `teacher_logits`.
        loss: any registered loss whose fields the trainer provides.
    """

    steps: int
    prompts: int
    group_size: int
    optimizer: OptimizerConfig
    updates: int = 1
    prev_logprobs: Literal["recompute", "generation"] = "recompute"
    record: bool = False
    dynamic_sampling: DynamicSampling | None = None
    overlong: Overlong | None = None
    failed_samples: FailedSamplesConfig = field(default_factory=FailedSamplesConfig)
    server: ServerConfig | None = None
    experts: int = 0
    advantages: AdvantageEstimator = field(default_factory=GRPO)
    reward_kl: KLType | None = None
    kl_controller: KLControllerConfig | None = None
    critic: CriticConfig | None = None
    teacher: str | None = None
    loss: LossConfig = field(default_factory=lambda: LossConfig("policy"))

    def __post_init__(self) -> None:
        at_least(self, steps=1, prompts=1, group_size=1, updates=1, experts=0)
        for name in ("prompts", "experts"):
            if getattr(self, name) % self.updates:
                raise ValueError(f"{name} = {getattr(self, name)} is not divisible by updates = {self.updates}")
        self._check_estimator()
        self._check_loss()

    def build_kl_controller(self) -> AdaptiveKLController | None:
        kl = self.kl_controller
        return None if kl is None else AdaptiveKLController(self.advantages.kl_coefficient, kl.target, kl.horizon)

    @property
    def rounds(self) -> int:
        """Return the most rounds in which a step samples."""
        return 1 if self.dynamic_sampling is None else self.dynamic_sampling.max_rounds

    def policy_version(self, step: int) -> int:
        """Count the policy's optimizer steps before step `step`."""
        alone = 0 if self.critic is None else self.critic.warmup_steps
        return max(0, step - alone) * self.updates

    @property
    def fields(self) -> dict[str, str]:
        """List the fields that a loss may read, each with the missing setting ("": none)."""
        experts = "" if self.experts else "which rl.experts = 0 leaves out; set it to a number of demonstrations a step"
        names = (
            "advantages",
            "prev_logprobs",
            "generation_logprobs",
            "reference_policy_logprobs",
            "rewards",
            "sample_ids",
            "group_ids",
            OBSERVED,
            *RECORDED_FIELDS,
        )
        names += own_names(self.loss)
        taught = "" if self.teacher is not None else "which rl.teacher gives; it is missing"
        return {**dict.fromkeys(names, ""), "expert_mask": experts, **dict.fromkeys(OF_TEACHER, taught)}

    @property
    def recorded_fields(self) -> dict[str, str]:
        """List the fields that only recorded rollouts give, with the keys that their records need."""
        return {name: key for name, key in RECORDED_FIELDS.items() if name in self.loss.requirements.names}

    @property
    def needs_reference(self) -> bool:
        return "reference_policy_logprobs" in self.loss.requirements.names or "kl" in self.advantages.needs

    @property
    def recomputes_prev_logprobs(self) -> bool:
        """Return whether a forward before the first update scores the samples."""
        read = {*self.loss.requirements.names, *self.advantages.needs}
        return self.prev_logprobs == "recompute" and not read.isdisjoint({"prev_logprobs", "kl"})

    def _check_estimator(self) -> None:
        needs, name = self.advantages.needs, self.advantages.name
        for key in needs:
            if key not in ESTIMATOR_FIELDS:
                raise ValueError(f"advantages.name = {name!r} reads {key!r}, which this trainer does not have")
        for section, key in (("critic", "values"), ("teacher", "teacher_token_logprobs")):
            if key in needs and getattr(self, section) is None:
                raise ValueError(f"advantages.name = {name!r} reads {key}, which {section!r} gives; it is missing")
            read = {*needs, *(self.loss.requirements.names if section == "teacher" else ())}
            unread = read.isdisjoint({key, *OF_TEACHER}) and not self.loss.unseen
            if getattr(self, section) is not None and unread:
                raise ValueError(f"{section!r} has no effect with advantages.name = {name!r}, which reads no {key}")
        if ("kl" in needs) != (self.reward_kl is not None):
            raise ValueError(
                f"advantages.kl_coefficient = {self.advantages.kl_coefficient} needs reward_kl, the estimator of that KL"
                if self.reward_kl is None
                else f"reward_kl = {self.reward_kl!r} has no effect with advantages.kl_coefficient = 0"
            )
        if self.kl_controller is not None:
            self.kl_controller.check(self.advantages.kl_coefficient, self.prompts * self.group_size)

    def _check_loss(self) -> None:
        check_fields_available(self.loss, self.fields)
        if self.experts and "expert_mask" not in self.loss.requirements.names and not self.loss.unseen:
            raise ValueError(
                f"experts = {self.experts} has no effect with loss.name = {self.loss.name!r}, which reads no expert_mask"
            )
        loss_fn = self.loss.build()
        if loss_fn.kl_in_reward and self.reward_kl is None:
            raise ValueError(
                f"loss.name = {self.loss.name!r} with these options expects the KL in the reward; set "
                "advantages.kl_coefficient and reward_kl"
            )
        if loss_fn.on_policy and self.updates > 1:
            raise ValueError(
                f"loss {self.loss.name!r} on policy is incompatible with updates = {self.updates}: the second is off-policy"
            )


@dataclass(frozen=True)
class DistillationConfig:
    """Steps towards a teacher's distributions.

    steps: number of optimizer steps.
    batch_size: sequences per step.
    optimizer: AdamW of the student.
    teacher: checkpoint folder of a model of the same shape and vocabulary, relative to the config file.
    rows: "examples" are demonstrations from `data.examples`. "policy" are the student's own completions of `data.train`
        (on-policy distillation, GKD).
    server: rollout servers that sample the student's completions. null: the trainer samples them.
    top_k: keep the teacher's k most likely tokens per position, for a loss that reads `teacher_topk_logits` and
        `teacher_topk_indices`. null: the whole distribution.
    loss: a loss that reads `teacher_logits`, or the fields that `top_k` provides.
    """

    steps: int
    batch_size: int
    optimizer: OptimizerConfig
    teacher: str
    rows: Literal["examples", "policy"] = "examples"
    server: ServerConfig | None = None
    top_k: int | None = None
    loss: LossConfig = field(default_factory=lambda: LossConfig("full_distillation"))

    def __post_init__(self) -> None:
        at_least(self, steps=1, batch_size=1)
        self._check_server()
        of_topk = ("teacher_topk_logits", "teacher_topk_indices", "teacher_logsumexp")
        of_records = dict.fromkeys(own_names(self.loss) if self.rows == "examples" else (), "")
        if self.top_k is None:
            wanted = "which distillation.top_k gives; set it to a number of tokens"
            return check_fields_available(
                self.loss, {"teacher_logits": "", **dict.fromkeys(of_topk, wanted), **of_records}
            )
        at_least(self, top_k=1)
        check_fields_available(self.loss, {**dict.fromkeys(of_topk, ""), **of_records})
        needs = self.loss.requirements
        if self.loss.unseen:
            return
        if of_topk[0] not in needs.names:
            raise ValueError(
                f"top_k = {self.top_k} has no effect with loss.name = {self.loss.name!r}, which reads no top-k"
            )
        if needs.field(of_topk[0]).alignment != "token":
            raise ValueError("loss.options.topk_alignment must be 'token', as the trainer's teacher gives its top-k")

    def _check_server(self) -> None:
        if self.server is None:
            return
        if self.rows != "policy":
            raise ValueError(
                f"'server' has no effect with rows = {self.rows!r}; set rows to 'policy' to sample from it"
            )
        for name, default in (("ahead", 0), ("max_staleness", None), ("max_mismatch", ServerConfig.max_mismatch)):
            if (value := getattr(self.server, name)) != default:
                raise ValueError(f"server.{name} = {value} has no effect in distillation; leave it out")
