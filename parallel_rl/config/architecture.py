"""The architecture of a decoder, in the terms of Hugging Face's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from parallel_rl.config.strict import at_least

#: families (model_type) that are read and written, and the class of each
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
OTHER_CONVERTERS = "mbridge and Megatron-Bridge convert more models"


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary positions (rope_type "llama3"), in the names of config.json.

    Attributes:
        factor: multiplies wavelengths above original / low_freq_factor.
        low_freq_factor: see `factor`.
        high_freq_factor: wavelengths below original / high_freq_factor stay; those between are interpolated.
        original_max_position_embeddings: longest sequence before the scaling ("original" above).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "original_max_position_embeddings"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be above low_freq_factor = {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of every layer's MLP.

    Attributes:
        number: experts per layer.
        ffn_hidden: width of each expert.
        per_token: experts that a token is routed to.
        normalised: the weights of a token's experts add up to 1 (norm_topk_prob).
    """

    number: int
    ffn_hidden: int
    per_token: int = 2
    normalised: bool = True

    def __post_init__(self) -> None:
        at_least(self, number=1, ffn_hidden=1, per_token=1)
        if self.per_token > self.number:
            raise ValueError(f"per_token = {self.per_token} is more than number = {self.number} experts")


@dataclass(frozen=True)
class Architecture:
    """A decoder as config.json describes it.

    Attributes:
        family: model_type, one of `FAMILIES`.
        layers, hidden, heads, groups, head_dim, ffn, vocab: L, D, attention heads, key-value heads, their width, the MLP's
            width, and V without padding.
        tied: the LM head is the embedding.
        qkv_bias: biases of queries, keys and values. qk_norm: norms of queries and keys.
        experts: of each layer, in place of the MLP. aux_loss: coefficient of the auxiliary loss that balances them.
        obstacles: what the file asks for and this package's models lack, as "key = value".
    """

    family: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    norm_epsilon: float = 1e-6
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    aux_loss: float = 0.0
    obstacles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, layers=1, hidden=1, heads=1, groups=1, head_dim=1, ffn=1, vocab=1, max_positions=1)
        if self.heads % self.groups:
            raise ValueError(f"heads = {self.heads} is not divisible by key-value heads = {self.groups}")

    def to_config(self, *, scalar_head: bool = False) -> dict[str, object]:
        """Return the entries of config.json, in the spelling that transformers 4, 5 and vLLM read."""
        config: dict[str, object] = {
            "model_type": self.family,
            "architectures": [FAMILIES[self.family] + ("ForSequenceClassification" if scalar_head else "ForCausalLM")],
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": self.norm_epsilon,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else {"rope_type": "llama3", **vars(self.rope_scaling)},
            "hidden_act": "silu",
        }
        if self.family == "mistral":
            config["sliding_window"] = None
        if self.experts is not None:
            config |= {
                "num_experts": self.experts.number,
                "moe_intermediate_size": self.experts.ffn_hidden,
                "num_experts_per_tok": self.experts.per_token,
                "norm_topk_prob": self.experts.normalised,
                "router_aux_loss_coef": self.aux_loss,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if scalar_head:
            config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return config
