"""The sections `model` and `tokenizer`: sizes and an alphabet, or a Hugging Face folder."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from parallel_rl.config.architecture import Experts, RopeScaling
from parallel_rl.config.hf_config import HFModel, read_hf
from parallel_rl.config.strict import at_least
from parallel_rl.training.config.sections import ParallelConfig
from parallel_rl.training.tokenizer.chat_template import RESERVED, ChatOptions
from parallel_rl.training.tokenizer.hugging_face import HuggingFaceTokenizer, fingerprint, has_chat_template
from parallel_rl.training.tokenizer.protocol import CharTokenizer, Tokenizer, Vocabulary


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that the backward recomputes, by Megatron's names; the numbers stay the same.

    Attributes:
        granularity: "full" keeps the inputs of layers only, "selective" recomputes the inside of `modules`.
        method: for "full": "uniform" keeps the input of each `num_layers` layers, "block" recomputes the first `num_layers`
            layers of a stage and keeps the others whole. null: "uniform".
        num_layers: for "full": see `method`. null: 1.
        modules: for "selective": parts of a layer. Empty: the core attention. "layernorm" needs Transformer Engine.
    """

    granularity: Literal["full", "selective"] = "full"
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe", "shared_experts"], ...] = ()

    def __post_init__(self) -> None:
        full = self.granularity == "full"
        if self.num_layers is not None and self.num_layers < 1:
            raise ValueError(f"num_layers = {self.num_layers} must be at least 1")
        for name in ("modules",) if full else ("method", "num_layers"):
            if value := getattr(self, name):
                raise ValueError(f"{name} = {value!r} has no effect with granularity = {self.granularity!r}; remove it")

    @property
    def fields(self) -> dict[str, object]:
        """Return the fields of Megatron's TransformerConfig."""
        full = self.granularity == "full"
        return {
            "recompute_granularity": self.granularity,
            "recompute_method": (self.method or "uniform") if full else None,
            "recompute_num_layers": (self.num_layers or 1) if full else None,
            "recompute_modules": None if full else [*(self.modules or ("core_attn",))],
        }


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of megatron-core: from a Hugging Face folder, or with random weights in the given sizes.

    Attributes:
        hf: a folder with config.json and safetensors (llama, mistral, qwen2, qwen3, qwen3_moe); relative to the config file.
            The run starts from its weights. Its config.json sets every key up to `aux_loss`.
        layers: number of layers.
        hidden: width of the hidden states.
        heads: attention heads.
        query_groups: key-value heads (GQA). null: as many as `heads`.
        ffn_hidden: width of the MLP. null: 4 × hidden, or 8/3 × hidden if gated.
        head_dim: width of a head. null: hidden / heads.
        vocab_size: vocabulary of the model, at least that of the tokenizer. null: the tokenizer's.
        max_positions: longest sequence, padding for the layout included.
        position: rotary positions, or a learned table of `max_positions` rows.
        rope_base: base of rotary positions.
        rope_scaling: Llama 3.1's scaling of rotary positions.
        gated: SwiGLU instead of GELU.
        qk_norm: normalise queries and keys.
        qkv_bias: add biases to queries, keys and values.
        norm_epsilon: added to the variance in every norm.
        experts: a mixture of experts in place of every MLP.
        tie_embeddings: the LM head shares the embedding's weights.
        aux_loss: coefficient of the auxiliary loss that balances experts.
        recompute: activations that the backward recomputes. null: none.
        init_std: standard deviation of the random initial weights.
        vocab_multiple: pad the vocabulary to a multiple of this × tensor.
        fused_head: compute losses and log-probs from hidden states, a chunk of tokens at a time. Logits are never whole.
    """

    hf: str | None = None
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    query_groups: int | None = None
    ffn_hidden: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    max_positions: int = 64
    position: Literal["rope", "learned_absolute"] = "learned_absolute"
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    gated: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    norm_epsilon: float = 1e-5
    experts: Experts | None = None
    tie_embeddings: bool = False
    aux_loss: float = 0.0
    recompute: RecomputeConfig | None = None
    init_std: float = 0.02
    vocab_multiple: int = 1
    fused_head: bool = False

    def __post_init__(self) -> None:
        if self.hf is not None:
            self._set_from(read_hf(self.hf))
        at_least(self, layers=1, hidden=1, heads=1, max_positions=2, vocab_multiple=1, aux_loss=0)
        for name in ("head_dim", "vocab_size"):
            if getattr(self, name) is not None:
                at_least(self, **{name: 1})
        for name in ("rope_base", "norm_epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)} must be a finite number above 0")
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden = {self.hidden} is not divisible by heads = {self.heads}; set head_dim to their width"
            )
        if self.heads % (self.query_groups or self.heads):
            raise ValueError(f"heads = {self.heads} is not divisible by query_groups = {self.query_groups}")
        if self.position != "rope":
            for name in ("rope_base", "rope_scaling"):
                self._refuse(name, f"has no effect with position = {self.position!r}")
        if self.experts is None:
            self._refuse("aux_loss", "has no effect without experts")

    def _set_from(self, described: HFModel) -> None:
        model = described.architecture
        settings = {
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "query_groups": model.groups,
            "ffn_hidden": model.ffn,
            "head_dim": model.head_dim,
            "vocab_size": model.vocab,
            "position": "rope",
            "rope_base": model.rope_theta,
            "rope_scaling": model.rope_scaling,
            "gated": True,
            "qk_norm": model.qk_norm,
            "qkv_bias": model.qkv_bias,
            "norm_epsilon": model.norm_epsilon,
            "experts": model.experts,
            "tie_embeddings": model.tied,
        }
        for name, value in settings.items():
            if getattr(self, name) != value:
                self._refuse(name, f"contradicts hf = {self.hf!r}, whose config.json means {value!r}; leave it out")
            object.__setattr__(self, name, value)
        self._refuse("init_std", f"has no effect with hf = {self.hf!r}, whose weights are loaded")
        if self.max_positions == _DEFAULTS["max_positions"]:
            object.__setattr__(self, "max_positions", model.max_positions)
        elif self.max_positions > model.max_positions:
            raise ValueError(
                f"max_positions = {self.max_positions} is above the {model.max_positions} of hf = {self.hf!r}"
            )

    def _refuse(self, name: str, why: str) -> None:
        value = getattr(self, name)
        if value != _DEFAULTS[name]:
            raise ValueError(f"{name} = {value!r} {why}")

    def vocabulary(self, tokenizer: Vocabulary) -> Vocabulary:
        """Return the token ids to sample from, with a tokenizer's end tokens; ValueError if it has too many."""
        if self.vocab_size is None:
            return tokenizer
        if tokenizer.size > self.vocab_size:
            where = "model.vocab_size" if self.hf is None else f"the vocabulary of model.hf = {self.hf!r}"
            raise ValueError(f"{where}, {self.vocab_size}, is too small for the tokenizer, which has {tokenizer.size}")
        return replace(tokenizer, size=self.vocab_size)


_DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}


def check_model_layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that the layout divides the model's sizes; ValueError also for expert options without effect."""
    groups, experts = model.query_groups or model.heads, model.experts
    parts = [
        ("model.heads", model.heads, "tensor", parallel.tensor),
        ("model.layers", model.layers, "pipeline", parallel.pipeline),
    ]
    if experts is None:
        parts += [("model.ffn_hidden", model.ffn_hidden or 0, "tensor", parallel.tensor)]
        for name, default in (("expert", 1), ("expert_tensor", None)):
            if (value := getattr(parallel, name)) != default:
                raise ValueError(f"parallel.{name} = {value} has no effect without model.experts")
    else:
        parts += [
            ("model.experts.number", experts.number, "expert", parallel.expert),
            (
                "model.experts.ffn_hidden",
                experts.ffn_hidden,
                "expert_tensor",
                parallel.expert_tensor or parallel.tensor,
            ),
        ]
        if parallel.tensor > 1 and not parallel.sequence_parallel:
            raise ValueError(
                f"parallel.tensor = {parallel.tensor} with model.experts needs parallel.sequence_parallel = true"
            )
    if groups > parallel.tensor or parallel.tensor % groups:  # Megatron splits a group over several ranks
        parts += [("model.query_groups", groups, "tensor", parallel.tensor)]
    for name, size, what, ranks in parts:
        if size % ranks:
            raise ValueError(f"{name} = {size} is not divisible by parallel.{what} = {ranks}")


AUTO = "auto"


@dataclass(frozen=True)
class TokenizerConfig:
    """Either `alphabet` or `hf`. The other keys configure the chat template of `hf`.

    Attributes:
        alphabet: every character that the data uses. "auto": the characters of the data when the run begins.
        hf: a folder with tokenizer.json, tokenizer_config.json and the like; relative to the config file.
        chat: true: prompts and answers go through the folder's chat template. null: true if the folder has one.
        template: name of the chat template, if the folder has several.
        variables: extra variables of the template, such as {enable_thinking: false}.
        date: the date that the template takes for today (2026-01-31). A run that is resumed later keeps its prompts.
    """

    alphabet: str | None = None
    hf: str | None = None
    chat: bool | None = None
    template: str | None = None
    variables: dict[str, object] = field(default_factory=dict)
    date: datetime.date | None = None

    def __post_init__(self) -> None:
        if (self.alphabet is None) == (self.hf is None):
            fault = "both are given" if self.hf is not None else "neither is given"
            raise ValueError(f"exactly one of alphabet and hf is needed; {fault}")
        if self.alphabet not in (None, AUTO):
            self.build()
        for name in ("chat", "template", "variables", "date"):
            value = getattr(self, name)
            if value in (None, {}):
                continue
            if self.hf is None:
                raise ValueError(f"{name} = {value!r} has no effect with alphabet, which has no chat template")
            if name != "chat" and self.chat is False:
                raise ValueError(f"{name} = {value!r} has no effect with chat = False; leave one of them out")
        for name in self.variables:
            if name in RESERVED:
                raise ValueError(f"variables.{name} is not valid: the trainer gives a template its {name!r} itself")

    def build(self) -> Tokenizer:
        """Make the tokenizer; ValueError for an unsettled alphabet or a folder without a tokenizer."""
        if self.hf is None:
            assert self.alphabet is not None
            if self.alphabet == AUTO:
                raise ValueError(
                    "tokenizer.alphabet = 'auto' is known when a run has seen its data; give the config.yaml of its folder"
                )
            return CharTokenizer(self.alphabet)
        folder, options = Path(self.hf), ChatOptions(self.template, self.variables, self.date)
        wanted = options != ChatOptions() if self.chat is None else self.chat
        chat = wanted or (self.chat is None and has_chat_template(folder))
        return HuggingFaceTokenizer(folder, options if chat else None)

    @property
    def identity(self) -> Mapping[str, str | None]:
        """Identify the vocabulary that a model's weights depend on, for a checkpoint."""
        tokens = None if self.hf is None else f"tokenizer.json with the SHA-256 {fingerprint(Path(self.hf))}"
        return {"tokenizer.alphabet": self.alphabet, "tokenizer.hf": tokens}
