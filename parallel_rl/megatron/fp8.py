"""FP8 of Transformer Engine's layers: what it asks of the rows of micro-batches, and of how many there are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def positions_unit(config: TransformerConfig) -> int:
    """Return the number of which a context rank's positions in a micro-batch are a multiple: 1 without FP8.

    >>> positions_unit(config)
    1
    """
    if not config.fp8:
        return 1
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    unit = 16  # bytes of a matrix's row, as cuBLAS takes them: positions in the product that gives a weight's gradient
    if config.fp8_recipe == "mxfp8":
        unit = 32
    elif config.fp8_recipe == "blockwise" and parts > 1:
        unit = 128  # blocks are gathered whole over tensor ranks
    return unit * parts


def check_positions(config: TransformerConfig, tokens: Iterable[Tensor]) -> None:
    """Check the tokens of micro-batches on this context rank, [B, S/cp] or packed [1, T/cp].

    Raises:
        ValueError: Transformer Engine would end in its first layer, or in its backward.
    """
    unit = positions_unit(config)
    for each in tokens:
        if each.numel() % unit:
            raise ValueError(
                f"a micro-batch has {each.shape[0]} × {each.shape[1]} positions on a context rank, which with fp8 = "
                f"{config.fp8!r} must be a multiple of {unit}: pad its rows, or give `packed_batch` a `total` that is one × cp"
            )


def compares_data_ranks(config: TransformerConfig) -> bool:
    """Whether a forward and a backward take the largest values over data ranks, which then must run as many of them.

    >>> compares_data_ranks(config)
    False
    """
    return bool(config.fp8) and config.fp8_recipe == "delayed" and not config.tp_only_amax_red
