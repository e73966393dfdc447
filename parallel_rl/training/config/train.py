"""The config of a run: frozen dataclasses, checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel_rl.experience.rewards import NUMBERS_ONLY, named_reward
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.core.requirements import Field
from parallel_rl.servers.http_reward import HTTPRewardConfig
from parallel_rl.training.config.algorithms import DistillationConfig, RLConfig, SupervisedConfig
from parallel_rl.training.config.data import FIELDS, DataConfig, has_unknown_fields, user_fields
from parallel_rl.training.config.model import ModelConfig, TokenizerConfig, check_model_layout
from parallel_rl.training.config.preference import PreferenceConfig
from parallel_rl.training.config.sections import (
    BatchConfig,
    EvaluationConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    ServerConfig,
)

OBJECTIVES = ("rl", "preference", "sft", "distillation")


@dataclass(frozen=True)
class TrainConfig:
    """A whole run: an optional supervised warm-up, then one of `rl`, `preference`, `sft`, `distillation`.

    run: folder, seed, precision and checkpoints.
    tokenizer: characters, or a Hugging Face folder.
    data: files and data sets.
    reward: name of a reward function, URL or options of a reward server, or one of these for each `source` of the prompts.
    model: sizes of the model, or a Hugging Face folder.
    parallel: sizes of the parallel dimensions.
    batch: size and packing of micro-batches.
    sampling: temperature and truncation of completions.
    evaluation: held-out evaluation. null: none.
    warmup: supervised steps before the main phase. null: none.
    rl: reinforcement learning.
    preference: preference pairs or labelled answers.
    sft: supervised fine-tuning.
    distillation: distillation from a teacher.
    """

    run: RunConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    reward: dict[str, object] | HTTPRewardConfig | str = "exact_match"
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig | None = None
    warmup: SupervisedConfig | None = None
    rl: RLConfig | None = None
    preference: PreferenceConfig | None = None
    sft: SupervisedConfig | None = None
    distillation: DistillationConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _settled(self.reward))
        objectives = [name for name in OBJECTIVES if getattr(self, name) is not None]
        if len(objectives) != 1:
            has = f"{' and '.join(objectives)} are given" if objectives else "none is given"
            raise ValueError(f"exactly one of the sections {', '.join(OBJECTIVES)} is needed; {has}")
        if self.sft is not None and self.warmup is not None:
            raise ValueError("the section 'warmup' has no effect with 'sft', which is supervised throughout; remove it")
        if self.warmup is not None and self.warmup.source != "examples":
            raise ValueError(
                f"warmup.loss.name = {self.warmup.loss.name!r} reads labels of steps; the section 'sft' has them"
            )
        self._check_data()
        self._check_rl()
        self._check_sampling()
        self._check_model()
        self._check_prefixes()
        self._check_experts()

    @property
    def objective(self) -> str:
        """Name the main section: rl, preference, sft or distillation."""
        return next(name for name in OBJECTIVES if getattr(self, name) is not None)

    @property
    def rewards(self) -> Mapping[str | None, str | HTTPRewardConfig]:
        """Map each source to its reward; None: of all prompts."""
        if isinstance(self.reward, dict):
            return {source: named_reward(reward) for source, reward in self.reward.items()}
        return {None: self.reward}

    @property
    def scalar_head(self) -> bool:
        """Return whether the trained model is a reward model, with one number per position."""
        return self.preference is not None and self.preference.loss.requirements.reads == "scalar"

    @property
    def teacher(self) -> str | None:
        if self.rl is not None:
            return self.rl.teacher
        return None if self.distillation is None else self.distillation.teacher

    @property
    def server(self) -> ServerConfig | None:
        """Return the servers that sample the policy's completions in the main phase."""
        if self.rl is not None:
            return self.rl.server
        return None if self.distillation is None else self.distillation.server

    def user_fields(self, source: str) -> tuple[Field, ...]:
        """List the user's fields in the records of a source, for the losses that declare them."""
        fields = {declared.name: declared for loss in self._losses_on(source) for declared in user_fields(loss)}
        return tuple(fields.values())

    @property
    def reward_fields(self) -> tuple[Field, ...]:
        """List the user's fields that the reward function returns with the reward of a sample."""
        return () if self.rl is None or self.data.rollouts is not None else user_fields(self.rl.loss)

    @property
    def unknown_sources(self) -> tuple[str, ...]:
        """List sources whose records may have fields of a loss that this process does not import."""
        sources = (*FIELDS, "rollouts")
        return tuple(source for source in sources if any(map(has_unknown_fields, self._losses_on(source))))

    def _losses_on(self, source: str) -> list[LossConfig]:
        """List the losses that may read extra fields from the records of a source, if it is set."""
        experts = self.rl if self.rl is not None and self.rl.experts else None
        sections = {
            "examples": (self.warmup, self.sft, self.distillation, experts),
            "solutions": (self.sft,),
            "pairs": (self.preference,),
            "answers": (self.preference,),
            "rollouts": (self.rl,),
        }.get(source, ())
        if getattr(self.data, source) is None:
            return []
        return [section.loss for section in sections if section is not None]

    def policy_version(self, step: int) -> int:
        """Count the policy's optimizer steps before step `step` of the main phase."""
        return step if self.rl is None else self.rl.policy_version(step)

    @property
    def needs_reference(self) -> bool:
        """Return whether a frozen copy of the main phase's first policy is kept."""
        if self.rl is not None:
            return self.rl.needs_reference
        return self.preference is not None and "reference_policy_logprobs" in self.preference.loss.requirements.names

    def _check_data(self) -> None:
        data, rl, distillation = self.data, self.rl, self.distillation
        if not self.reward:
            raise ValueError(f"reward = {self.reward!r} is empty; give a name, or one for each source")
        if data.system is not None and (self.tokenizer.hf is None or self.tokenizer.chat is False):
            raise ValueError(f"data.system = {data.system!r} needs a chat template (tokenizer.hf, tokenizer.chat)")
        prompts = (rl is not None and data.rollouts is None) or (
            distillation is not None and distillation.rows == "policy"
        )
        solutions = self.sft is not None and (
            self.sft.source == "solutions" or (data.solutions is not None and has_unknown_fields(self.sft.loss))
        )
        examples = {
            "the supervised phase": self.warmup is not None or (self.sft is not None and not solutions),
            "rl.experts": rl is not None and rl.experts > 0,
            "distillation.rows = 'examples'": distillation is not None and distillation.rows == "examples",
        }
        for name, needed, why in (
            (
                "train",
                prompts,
                "sampling" if distillation is not None else "the section 'rl' without data.rollouts",
            ),
            (
                "examples",
                any(examples.values()),
                next((why for why, so in examples.items() if so), "a supervised phase"),
            ),
            ("pairs", self.preference is not None and self.preference.source == "pairs", "preference.pairs"),
            ("answers", self.preference is not None and self.preference.source == "answers", "preference.answers"),
            ("solutions", solutions, "the section 'sft' with a loss of steps' labels (prm)"),
            ("rollouts", False, "the section 'rl'"),
            ("held_out", self.evaluation is not None, "the section 'evaluation'"),
        ):
            value = getattr(data, name)
            if needed and value is None:
                raise ValueError(f"data.{name} is missing; {why} needs it")
            if value is not None and not needed and not (name == "rollouts" and rl is not None):
                # an unread file would mislead its author
                raise ValueError(f"data.{name} = {value!r} would not be read; only {why} needs it")

    def _check_rl(self) -> None:
        rl = self.rl
        if rl is None:
            return
        recorded, limit = self.data.rollouts is not None, rl.failed_samples.timeout
        if limit is not None and not any(isinstance(reward, str) for reward in self.rewards.values()):
            raise ValueError(
                f"rl.failed_samples.timeout = {limit:g} has no effect on a server, which reward.timeout limits; remove it"
            )
        if limit is not None and limit >= self.run.timeout:
            raise ValueError(
                f"rl.failed_samples.timeout = {limit:g} must be below run.timeout = {self.run.timeout:g}, which ends the run"
            )
        if not recorded and rl.group_size == 1 and getattr(rl.advantages, "singleton", "zero") == "error":
            raise ValueError(
                "rl.group_size = 1 makes groups of one, which rl.advantages.singleton = 'error' refuses; raise it, "
                "or set singleton to 'zero' or 'reward'"
            )
        for name in ("record", "dynamic_sampling", "server"):
            if recorded and getattr(rl, name):
                raise ValueError(
                    f"rl.{name} = {getattr(rl, name)} has no effect with data.rollouts: nothing is sampled"
                )
        for name, key in rl.recorded_fields.items():
            if not recorded:
                raise ValueError(
                    f"rl.loss.name = {rl.loss.name!r} reads {name!r}, which samples do not have; data.rollouts gives it by "
                    f"the field {key!r} of its records"
                )
        for name in [declared.name for declared in self.reward_fields]:
            if numbers := [reward for reward in self.rewards.values() if reward in NUMBERS_ONLY]:
                raise ValueError(
                    f"rl.loss.name = {rl.loss.name!r} reads {name!r}, which reward = {numbers[0]!r} does not return; name "
                    f"one that returns {{'reward': ..., {name!r}: ...}}, or set data.rollouts to records that have it"
                )
        if recorded and "greedy_rewards" in rl.advantages.needs:
            raise ValueError(
                f"rl.advantages.name = {rl.advantages.name!r} reads the rewards of greedy answers, which data.rollouts lacks"
            )

    def _check_sampling(self) -> None:
        sampling = self.sampling
        if not sampling.truncation or self.rl is None:
            return
        text = f"sampling.top_k = {sampling.top_k} with top_p = {sampling.top_p}"
        if not self.rl.loss.requirements.truncatable:
            raise ValueError(
                f"{text} is incompatible with rl.loss.name = {self.rl.loss.name!r}, which does not score a truncated policy"
            )
        if self.model.fused_head and self.rl.loss.build(truncation=sampling.truncation).requirements.untruncated:
            raise ValueError(
                f"{text} and a KL to the reference in rl.loss read two distributions of a token, and model.fused_head = True "
                "gives one; set it to false, or both to null"
            )

    def _check_model(self) -> None:
        model = self.model
        check_model_layout(model, self.parallel)
        update = None if self.server is None else self.server.update
        if update is not None and not (model.position == "rope" and model.gated):
            raise ValueError(
                f"{self.objective}.server.update = {update!r} needs a model of Hugging Face's families; set "  # nosec B608 # no SQL
                f"model.position = {model.position!r} to 'rope' and model.gated = {model.gated} to true"
            )
        if self.parallel.use_distributed_optimizer and self.run.dtype == "float64":
            raise ValueError(
                "parallel.use_distributed_optimizer = True is incompatible with run.dtype = 'float64': Megatron's distributed "
                "optimizer knows float32 and bfloat16 parameters"
            )
        if self.model.fused_head:
            section = getattr(self, self.objective)
            if section.loss.requirements.reads not in ("log-probs", "rows"):
                raise ValueError(
                    f"model.fused_head = True is incompatible with {self.objective}.loss.name = {section.loss.name!r}, which "
                    "reads the model's output itself"
                )
        if self.preference is not None and self.preference.rows != 1 and self.batch.sequences % 2:
            raise ValueError(
                f"batch.micro_batch_size = {self.batch.sequences} must be even: rows of one record stay together"
            )
        has_critic = self.rl is not None and self.rl.critic is not None
        if self.model.hf is None and self.model.tie_embeddings and (self.scalar_head or has_critic):
            raise ValueError("model.tie_embeddings = True is incompatible with a scalar head (critic, reward model)")
        if self.scalar_head:
            for name in ("warmup", "evaluation"):
                if getattr(self, name) is not None:
                    raise ValueError(f"the section {name!r} has no effect on a reward model without logits; remove it")

    def _check_prefixes(self) -> None:
        if self.batch.share_prefixes and self.model.aux_loss:
            raise ValueError(
                f"batch.share_prefixes = True with model.aux_loss = {self.model.aux_loss} would count a shared token once, not "
                "once for each sequence; set model.aux_loss to 0 or batch.share_prefixes to false"
            )

    def _check_experts(self) -> None:
        """Refuse options with unequal forwards per data rank, which expert parallelism cannot run."""
        experts = self.parallel.expert
        if experts == 1:
            return
        if self.batch.tokens is not None:
            raise ValueError(
                f"batch.tokens = {self.batch.tokens} with parallel.expert = {experts} may give data ranks different numbers of "
                "micro-batches; set batch.micro_batch_size"
            )
        on_policy = self.distillation is not None and self.distillation.rows == "policy"
        samples = (self.rl is not None and self.data.rollouts is None) or on_policy
        served = self.server is not None
        for name, uses_sampler in (
            (self.objective, samples and not served),
            ("evaluation", self.evaluation is not None and (self.server is None or self.server.update is None)),
        ):
            if uses_sampler:
                raise ValueError(
                    f"the section {name!r} with parallel.expert = {experts} would use the trainer's own sampler, whose "
                    f"data ranks end at different tokens; set {self.objective}.server with update, or parallel.expert to 1"
                )


def _settled(reward: dict[str, object] | HTTPRewardConfig | str) -> dict[str, object] | HTTPRewardConfig | str:
    """Read the options of reward servers; a mapping with a `url` is one server's."""
    if isinstance(reward, dict) and "url" not in reward:
        return {source: named_reward(options, f"reward.{source}") for source, options in reward.items()}
    return named_reward(reward)
