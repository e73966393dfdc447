"""The sizes of a run's model as `parallel-rl plan` reads them."""

from __future__ import annotations

from parallel_rl.megatron.model_config import default_ffn_hidden_size
from parallel_rl.plan.models import ModelShape
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.alphabet import settle_alphabet
from parallel_rl.training.data.datasets import find_data


def model_shape(config: TrainConfig) -> ModelShape:
    """The sizes of the policy of a run, its vocabulary padded as the trainer pads it."""
    model, unit = config.model, config.model.vocab_multiple * config.parallel.tensor
    tokens = settle_alphabet(config, find_data(config.data)).tokenizer.build().vocabulary
    words, experts = model.vocabulary(tokens).size, model.experts
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        groups=model.query_groups or model.heads,
        head_dim=model.head_dim or model.hidden // model.heads,
        ffn=model.ffn_hidden or default_ffn_hidden_size(model.hidden, model.gated),
        vocab=-(-words // unit) * unit,
        gated=model.gated,
        tied=model.tie_embeddings,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        experts=0 if experts is None else experts.number,
        expert_ffn=0 if experts is None else experts.ffn_hidden,
        experts_per_token=0 if experts is None else experts.per_token,
        positions=model.max_positions if model.position == "learned_absolute" else 0,
    )
