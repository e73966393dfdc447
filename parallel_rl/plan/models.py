"""The sizes of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel_rl.config.architecture import Experts
from parallel_rl.config.strict import at_least


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
