"""Contents and metadata of the trainer's checkpoints, and whether a run may continue from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from parallel_rl.megatron.model_config import default_ffn_hidden_size, has_transformer_engine
from parallel_rl.training.checkpointing import storage
from parallel_rl.training.checkpointing.checkpoint import Contents, Controllers, Stateful
from parallel_rl.training.checkpointing.manifest import CheckpointMetadata, Value, differing
from parallel_rl.training.config.sections import DTYPES
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.session import Session, TrainProgress

_MODEL = "model."
_TOKENIZER = "tokenizer."


def session_contents(session: Session) -> Contents:
    """Collect the contents of a checkpoint in the middle of a phase."""
    critic = session.critic
    losses = {"loss": session.policy.loss_fn, "critic_loss": None if critic is None else critic.loss_fn}
    scheduled: Controllers = {
        name: loss_fn for name, loss_fn in losses.items() if loss_fn is not None and loss_fn.state_dict()
    }
    kl: Controllers = {} if session.kl_controller is None else {"kl": session.kl_controller}
    extra: dict[str, Stateful] = {} if session.served is None else {"served": session.served}
    return Contents(
        session.engine,
        session.policy.optimizer,
        session.reference,
        None if critic is None else critic.engine,
        None if critic is None else critic.optimizer,
        {**scheduled, **kl},
        extra,
    )


def checkpoint_metadata(
    config: TrainConfig, progress: TrainProgress, values: Mapping[str, float | int | str]
) -> CheckpointMetadata:
    """Make the metadata of a checkpoint of this run; `save` fills in layout and parts."""
    return CheckpointMetadata(progress, values, _identity(config), {}, ())


def same_run(config: TrainConfig, phases: Mapping[str, int]) -> Callable[[Path, CheckpointMetadata], None]:
    """Make a check that model, objective, precision and steps of earlier phases are a checkpoint's."""
    identity = _identity(config)

    def check(path: Path, metadata: CheckpointMetadata) -> None:
        progress, difference = metadata.progress, differing(metadata.model, identity, identity)
        if difference is None and progress.phase not in phases:
            difference = f"it is in the phase {progress.phase!r} and this run has {', '.join(phases)}"
        if difference is None:
            before = sum(list(phases.values())[: list(phases).index(progress.phase)])
            if (number := before + progress.step) != storage.number_of(path):
                where = f"its {progress.phase} step {progress.step} is step {storage.number_of(path)} of all phases"
                difference = f"{where} there and {number} in this run"
        if difference is not None:
            raise ValueError(
                f"run.dir holds the checkpoint {path} of another run: {difference}. Nothing was changed; choose another "
                "run.dir, or set run.resume = 'never' to replace it"
            )

    return check


def same_weights(
    config: TrainConfig, key: str, *, scalar_head: bool = False
) -> Callable[[Path, CheckpointMetadata], None]:
    """Make a check that a checkpoint's weights fit the model of a run; `key` of the config names it."""
    identity = _identity(config)
    names = [name for name in identity if name.startswith((_MODEL, _TOKENIZER))]

    def check(path: Path, metadata: CheckpointMetadata) -> None:
        difference = differing(metadata.model, identity, names)
        if difference is None and metadata.model["scalar_head"] and not scalar_head:
            difference = "it is of a model with a scalar head and one with logits is needed"
        if difference is not None:
            raise ValueError(f"{key} = {str(path)!r} does not fit: {difference}")

    return check


def _layers(config: TrainConfig) -> str:
    """Name the layers, since Transformer Engine's, and its attention, have extra state."""
    if not has_transformer_engine(DTYPES[config.run.dtype]):
        return "Megatron's local layers"
    return "Transformer Engine" + " with SelfAttentionCore" * config.batch.share_prefixes


def _identity(config: TrainConfig) -> dict[str, Value]:
    """Flatten the settings that two runs must share to exchange checkpoints; defaults are written out."""
    model = config.model
    return {
        "objective": config.objective,
        "scalar_head": config.scalar_head,
        "run.dtype": config.run.dtype,
        **config.tokenizer.identity,
        "model.kind": _layers(config),
        "model.layers": model.layers,
        "model.hidden": model.hidden,
        "model.heads": model.heads,
        "model.head_dim": model.head_dim or model.hidden // model.heads,
        "model.vocab_size": model.vocab_size,
        "model.rope_base": model.rope_base if model.position == "rope" else None,
        "model.rope_scaling": None if model.rope_scaling is None else str(model.rope_scaling),
        "model.qk_norm": model.qk_norm,
        "model.qkv_bias": model.qkv_bias,
        "model.norm_epsilon": model.norm_epsilon,
        "model.experts": None if model.experts is None else str(model.experts),
        "model.query_groups": model.query_groups or model.heads,
        "model.gated": model.gated,
        "model.ffn_hidden": model.ffn_hidden or default_ffn_hidden_size(model.hidden, model.gated),
        "model.position": model.position,
        "model.max_positions": model.max_positions if model.position == "learned_absolute" else None,
        "model.tie_embeddings": model.tie_embeddings,
    }
