"""Norms for Megatron's sequence parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class ShardedNorm(torch.nn.Module):
    """RMSNorm or LayerNorm (`config.normalization`) whose parameters are marked for sequence parallelism.

    RMSNorm: y = x / sqrt(mean(x²) + ε) · w (Zhang & Sennrich 2019, arXiv:1910.07467). LayerNorm: y = (x − mean) / sqrt(var +
    ε) · w + b. The mathematics runs in max(float32, dtype of x). With sequence parallelism each tensor rank has a slice of
    the tokens, so the weight's gradient is a part; `sequence_parallel` on the parameter makes Megatron sum the parts.

    Raises:
        ValueError: `config.normalization` is neither "RMSNorm" nor "LayerNorm".
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(
                f"normalization = {config.normalization!r} is not supported here; choose 'RMSNorm' or 'LayerNorm'"
            )
        self.shape = (hidden_size,)
        self.eps = eps
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(dtype) + 1 if self.zero_centered else self.weight.to(dtype)
        if self.bias is None:
            y = torch.nn.functional.rms_norm(x.to(dtype), self.shape, weight, self.eps)
        else:
            y = torch.nn.functional.layer_norm(x.to(dtype), self.shape, weight, self.bias.to(dtype), self.eps)
        return y.to(x.dtype)
