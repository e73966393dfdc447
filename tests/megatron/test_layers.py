"""The table of layers: one function of package, card and dtype chooses, and says why."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

BOTH = (True, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("card", BOTH)
@pytest.mark.parametrize("package", BOTH)
def test_the_engine_needs_package_card_and_half_precision(package: bool, card: bool, dtype: torch.dtype) -> None:
    """Every entry; the reason names the first thing that lacks."""
    from parallel_rl.megatron.model_config import choose_layers

    engine, why = choose_layers(package, card, dtype)
    half = dtype in (torch.bfloat16, torch.float16)
    assert engine == (package and card and half)
    lacks = "no GPU" if not card else "not installed" if not package else "no attention for" if not half else "on a GPU"
    assert lacks in why
