"""Requirements of Transformer Engine's FP8 on the rows and the number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def positions_unit(config: TransformerConfig) -> int:
    """Return the unit of a context rank's positions in a micro-batch: 1 without FP8."""
    if not config.fp8:
        return 1
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    unit = 16  # bytes of a row for cuBLAS: positions, in the product for a weight's gradient
    if config.fp8_recipe == "mxfp8":
        unit = 32
    elif config.fp8_recipe == "blockwise" and parts > 1:
        unit = 128  # blocks are gathered whole over tensor ranks
    return unit * parts


def check_positions(config: TransformerConfig, tokens: Iterable[Tensor]) -> None:
    """Raise ValueError for tokens [B, S/cp] or [1, T/cp] on which Transformer Engine would fail."""
    unit = positions_unit(config)
    for each in tokens:
        if each.numel() % unit:
            raise ValueError(
                f"a micro-batch has {each.shape[0]} × {each.shape[1]} positions on a context rank, which with fp8 = "
                f"{config.fp8!r} must be a multiple of {unit}: pad its rows, or give `packed_batch` a `total` that is one × cp"
            )


def compares_data_ranks(config: TransformerConfig) -> bool:
    """Return whether passes reduce maxima over data ranks, which must then run equally many."""
    return bool(config.fp8) and config.fp8_recipe == "delayed" and not config.tp_only_amax_red
