"""The section model.recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that the backward recomputes, by Megatron's names; the numbers stay the same.

    Attributes:
        granularity: "full" keeps the inputs of layers only, "selective" recomputes the inside of `modules`.
        method: for "full": "uniform" keeps the input of each `num_layers` layers, "block" recomputes the first `num_layers`
            layers of a stage and keeps the others whole. null: "uniform".
        num_layers: for "full": see `method`. null: 1.
        modules: for "selective": parts of a layer. None: the core attention. "layernorm" needs Transformer Engine.
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
