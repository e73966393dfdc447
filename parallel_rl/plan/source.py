"""Sizes of a decoder, and model and layout from a file: a Hugging Face config.json, or Megatron's arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from parallel_rl.config.architecture import Architecture, Experts
from parallel_rl.config.hf_config import Keys, read_architecture, read_json
from parallel_rl.config.shown import shown
from parallel_rl.config.strict import at_least, closest
from parallel_rl.config.yaml_files import read_tree


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a whole decoder.

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

    def with_experts(self, experts: Experts | None) -> ModelShape:
        """Return a copy with these experts in every layer; None: an unchanged copy."""
        if experts is None:
            return self
        number, ffn, per_token = experts.number, experts.ffn_hidden, experts.per_token
        return replace(self, experts=number, expert_ffn=ffn, experts_per_token=per_token)

    @property
    def embedding(self) -> int:
        """Weights of the embedding, or of an untied LM head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        ends = self.embedding * (1 if self.tied else 2) + self.positions * self.hidden + self._norm
        return ends + self.layers * (self.attention + self.mlp + self.replicated)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with; the embedding's look-up is excluded."""
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
        """Weights of a layer that every tensor rank holds: norms, router, biases of summed outputs."""
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


_MEGATRON = ("num_layers", "hidden_size", "num_attention_heads")
#: Megatron arguments whose effect on memory is not counted, and the value without effect
_NOT_COUNTED: Mapping[str, object] = {
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "attention_output_gate": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "experimental_attention_variant": None,
    "expert_model_parallel_size": 1,
    "heterogeneous_layers_config_encoded_json": None,
    "heterogeneous_layers_config_path": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "is_hybrid_model": False,
    "moe_latent_size": None,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": 0,
    "mtp_hybrid_override_pattern": None,
    "mtp_num_layers": 0,
    "multi_latent_attention": False,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
}
#: arguments of multi_latent_attention
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_NEAR = 0.9  # likeness of a slip of the fingers; no two relevant Megatron arguments are as near


@dataclass(frozen=True)
class Source:
    """Model sizes and layout as a file sets them.

    Attributes:
        shape: sizes of the model.
        layout: fields of `Layout` that it sets. unread: its other keys.
        data: lines on the data of a run that drops or cuts records, or shares prefixes.
    """

    shape: ModelShape
    layout: Mapping[str, object] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    data: tuple[str, ...] = ()


def read_source(path: str | Path) -> Source:
    """Read config.json (or its folder), or Megatron's arguments in YAML or JSON; ValueError for others."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a config.json or Megatron's arguments are needed")
    return source_of(read_json(path) if path.suffix == ".json" else read_tree(path), str(path))


def source_of(tree: Mapping[str, object], where: str = "the model") -> Source:
    """Read a mapping of either kind, see `read_source`.

    >>> sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 128, "swiglu": True}
    >>> source = source_of({**sizes, "lr": 1e-6})
    >>> source.shape.ffn, source.unread
    (128, ('lr',))
    """
    if "num_hidden_layers" in tree or "model_type" in tree:
        architecture = read_architecture(tree, where)
        return Source(_hugging_face(architecture), unread=architecture.obstacles)
    if all(key in tree for key in _MEGATRON):
        return _megatron(Keys(tree, where))
    raise ValueError(f"{where} has neither num_hidden_layers (Hugging Face) nor {', '.join(_MEGATRON)} (Megatron)")


def _hugging_face(model: Architecture) -> ModelShape:
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
    ).with_experts(model.experts)


def _megatron(keys: Keys) -> Source:
    _refuse_not_counted(keys)
    source = Source(_megatron_shape(keys), _megatron_layout(keys))
    known = keys.asked | {*_NOT_COUNTED, *_LATENT}
    return replace(source, unread=tuple(_others(keys, known)))


def _refuse_not_counted(keys: Keys) -> None:
    latent = {} if "multi_latent_attention" in keys.tree else dict.fromkeys(_LATENT)
    tensor = {"expert_tensor_parallel_size": keys.integer("tensor_model_parallel_size", default=1)}
    without: dict[str, object] = {**_NOT_COUNTED, **latent, **tensor}
    for name, nothing in without.items():
        value = keys.tree.get(name)
        if value is not None and value != nothing:
            raise ValueError(f"{keys.where}: {name} = {shown(value)} is not supported: what it changes is not counted")


def _others(keys: Keys, known: Collection[str]) -> Iterator[str]:
    for key, value in keys.tree.items():
        if key not in known:
            near = closest(key, known, _NEAR)
            if near is not None:
                raise ValueError(f"{keys.where}: unknown key {key} = {shown(value)}; did you mean {near!r}?")
            yield key


def _megatron_layout(keys: Keys) -> dict[str, object]:
    names = {
        "tensor": "tensor_model_parallel_size",
        "context": "context_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "data": "data_parallel_size",
    }
    sizes = {name: keys.integer(theirs, default=0) for name, theirs in names.items()}
    layout: dict[str, object] = {name: size for name, size in sizes.items() if keys.tree.get(names[name]) is not None}
    flags = {"sequence_parallel": "sequence_parallel", "distributed_optimizer": "use_distributed_optimizer"}
    layout |= {name: keys.flag(theirs) for name, theirs in flags.items() if keys.tree.get(theirs) is not None}
    bf16, fp16 = keys.flag("bf16"), keys.flag("fp16")
    if bf16 or fp16 or "bf16" in keys.tree:
        layout["dtype"] = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    return layout


def _megatron_shape(keys: Keys) -> ModelShape:
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    gated = any([keys.flag("swiglu"), keys.flag("gated_linear_unit")])  # both are looked up
    groups = keys.integer("num_query_groups", default=heads)
    learned = keys.text("position_embedding_type", "rope") == "learned_absolute"
    positions = keys.integer("max_position_embeddings", default=None if learned else 0)
    experts = keys.integer("num_experts", "num_moe_experts", default=0)
    ffn = keys.integer("ffn_hidden_size", default=_ffn(hidden, gated))
    of_expert, per_token = keys.integer("moe_ffn_hidden_size", default=ffn), keys.integer("moe_router_topk", default=2)
    return ModelShape(
        layers=keys.integer("num_layers"),
        hidden=hidden,
        heads=heads,
        groups=groups if keys.flag("group_query_attention", True) else heads,
        head_dim=keys.integer("kv_channels", default=hidden // max(heads, 1)),
        ffn=ffn,
        vocab=keys.integer("padded_vocab_size", "vocab_size"),
        gated=gated,
        tied=not keys.flag("untie_embeddings_and_output_weights"),
        qkv_bias=keys.flag("add_qkv_bias"),
        qk_norm=keys.flag("qk_layernorm"),
        biases=keys.flag("add_bias_linear", not keys.flag("disable_bias_linear", True)),
        layer_norm=keys.text("normalization", "RMSNorm") == "LayerNorm",
        positions=positions if learned else 0,
        experts=experts,
        expert_ffn=of_expert if experts else 0,
        experts_per_token=per_token if experts else 0,
    )


def _ffn(hidden: int, gated: bool) -> int:
    return 8 * hidden // 3 // 64 * 64 if gated else 4 * hidden
