"""The sizes of a decoder, from a Hugging Face config.json or from Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_rl.config.architecture import Architecture
from parallel_rl.config.hf_config import Keys, read_architecture, read_json
from parallel_rl.config.strict import at_least
from parallel_rl.config.yaml_files import read_tree

_MEGATRON = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, whole.

    >>> ModelShape(2, 64, 4, 4, 16, 176, 128, gated=True).parameters
    117056

    Attributes:
        layers, hidden, heads, groups, head_dim, ffn, vocab: L, D, attention heads, key-value heads, their width, the MLP's
            width, and V, padding included.
        gated: SwiGLU. tied: the LM head is the embedding.
        qkv_bias: biases of queries, keys and values. qk_norm: norms of queries and keys.
        biases: in every linear layer. layer_norm: norms with a bias. positions: rows of a learned table, or 0.
        experts, expert_ffn, experts_per_token: of each layer, in place of the MLP; 0 is a dense model.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    biases: bool = False
    layer_norm: bool = False
    positions: int = 0
    experts: int = 0
    expert_ffn: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        at_least(self, layers=1, hidden=1, heads=1, groups=1, head_dim=1, vocab=1)
        if self.heads % self.groups:
            raise ValueError(f"heads = {self.heads} is not divisible by key-value heads = {self.groups}")

    @property
    def embedding(self) -> int:
        """Weights of the embedding, or of an LM head of its own."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        ends = self.embedding * (1 if self.tied else 2) + self.positions * self.hidden + self._norm
        return ends + self.layers * (self.attention + self.mlp + self.replicated)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with, the embedding's look-up left out."""
        experts = self.experts_per_token * self._mlp(self.expert_ffn) if self.experts else self.mlp
        return self.layers * (self.attention + experts) + self.embedding

    @property
    def attention(self) -> int:
        """Weights of a layer's attention that tensor ranks split."""
        queries, keys = self.heads * self.head_dim, 2 * self.groups * self.head_dim
        return self.hidden * (2 * queries + keys) + (queries + keys if self.qkv_bias or self.biases else 0)

    @property
    def mlp(self) -> int:
        """Weights of a layer's MLP or experts that tensor (or expert) ranks split."""
        return self.experts * self._mlp(self.expert_ffn) if self.experts else self._mlp(self.ffn)

    @property
    def replicated(self) -> int:
        """Weights of a layer that every tensor rank holds: norms, router, biases of what tensor ranks add up."""
        return (
            2 * self._norm
            + (2 * self.head_dim if self.qk_norm else 0)
            + self.experts * self.hidden
            + (2 * self.hidden if self.biases else 0)
        )

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.layer_norm else 1)

    def _mlp(self, ffn: int) -> int:
        parts = 2 if self.gated else 1
        return (parts + 1) * self.hidden * ffn + (parts * ffn if self.biases else 0)


def read_model(path: str | Path) -> ModelShape:
    """Read a model's sizes from config.json (or its folder), or from Megatron's arguments in YAML or JSON.

    Raises:
        ValueError: no such file, a family that is not known, a key that is missing or not a number.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} is not there; a config.json or Megatron's arguments are needed")
    return model_of(read_json(path) if path.suffix == ".json" else read_tree(path), str(path))


def model_of(tree: Mapping[str, object], where: str = "the model") -> ModelShape:
    """Make a model's sizes from a mapping of one of either kind, see `read_model`.

    >>> model_of({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 128, "swiglu": True}).ffn
    128
    """
    if "num_hidden_layers" in tree or "model_type" in tree:
        return _hugging_face(read_architecture(tree, where))
    if all(key in tree for key in _MEGATRON):
        return _megatron(Keys(tree, where))
    raise ValueError(f"{where} has neither num_hidden_layers (Hugging Face) nor {', '.join(_MEGATRON)} (Megatron)")


def _hugging_face(model: Architecture) -> ModelShape:
    experts = model.experts
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        groups=model.groups,
        head_dim=model.head_dim,
        ffn=model.ffn,
        vocab=model.vocab,
        tied=model.tied,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        experts=0 if experts is None else experts.number,
        expert_ffn=0 if experts is None else experts.ffn_hidden,
        experts_per_token=0 if experts is None else experts.per_token,
    )


def _megatron(keys: Keys) -> ModelShape:
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    gated = keys.flag("swiglu") or keys.flag("gated_linear_unit")
    experts = keys.integer("num_experts", "num_moe_experts", default=0)
    return ModelShape(
        layers=keys.integer("num_layers"),
        hidden=hidden,
        heads=heads,
        groups=keys.integer("num_query_groups", default=heads),
        head_dim=keys.integer("kv_channels", default=hidden // max(heads, 1)),
        ffn=keys.integer("ffn_hidden_size", default=_ffn(hidden, gated)),
        vocab=keys.integer("padded_vocab_size", "vocab_size"),
        gated=gated,
        tied=not keys.flag("untie_embeddings_and_output_weights"),
        qkv_bias=keys.flag("add_qkv_bias"),
        qk_norm=keys.flag("qk_layernorm"),
        biases=keys.flag("add_bias_linear", not keys.flag("disable_bias_linear", True)),
        layer_norm=keys.tree.get("normalization", "RMSNorm") == "LayerNorm",
        experts=experts,
        expert_ffn=keys.integer("moe_ffn_hidden_size", default=_ffn(hidden, gated)) if experts else 0,
        experts_per_token=keys.integer("moe_router_topk", default=2) if experts else 0,
    )


def _ffn(hidden: int, gated: bool) -> int:
    """The width of the MLP that Megatron's arguments mean where they name none."""
    return 8 * hidden // 3 // 64 * 64 if gated else 4 * hidden
