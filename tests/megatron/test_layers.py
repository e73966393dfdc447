"""The table of layers: one function of package, card and dtype chooses, says why, and whoever builds a model follows it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch

from parallel_rl.testing.pool import preload, run_world

pytest.importorskip("megatron.core")
preload("megatron.core")

BOTH = (True, False)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Entry = tuple[bool, bool, torch.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
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


@contextmanager
def _machine(package: bool, card: bool) -> Iterator[dict[str, mock.Mock]]:
    """A machine with the package and a card, or without; Megatron's makers of what needs the package only note their calls."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from parallel_rl.megatron import model, model_config

    find = importlib.util.find_spec
    found = object() if package else None
    makers = ("get_gpt_layer_with_transformer_engine_spec", "get_gpt_mtp_block_spec", "GPTModel")
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(torch.cuda, "is_available", lambda: card))
        enter(mock.patch.object(importlib.util, "find_spec", lambda x: found if x == "transformer_engine" else find(x)))
        enter(mock.patch.object(model_config, "_import_fault", lambda: None))
        # it refuses the fusion of rotary positions where the package is missing, as here
        enter(mock.patch.object(TransformerConfig, "__post_init__", lambda self: None))
        made = {name: enter(mock.patch.object(model, name)) for name in makers}
        made["GPTModel"].side_effect = InterruptedError
        yield made


def _built(rank: int) -> dict[Entry, list[bool]]:
    """Whether each part of a model is Transformer Engine's, by the entries of the table."""
    import parallel_rl.megatron as M
    from parallel_rl.config.architecture import Experts
    from parallel_rl.megatron.model import ShardedNorm

    M.initialize()
    rows = {}
    for package, card, dtype in product(BOTH, BOTH, DTYPES):
        with _machine(package, card) as made:
            config = M.build_config(
                num_layers=1, hidden_size=8, num_attention_heads=2, dtype=dtype, overrides={"mtp_num_layers": 1}
            )
            plain = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "gated": False, "bias": True}
            experts = M.build_config(dtype=dtype, experts=Experts(2, 8), **plain)
            # Megatron's grouped experts refuse it in their forward
            assert not experts.bias_activation_fusion
            engines = made["get_gpt_layer_with_transformer_engine_spec"].return_value
            head = made["get_gpt_mtp_block_spec"]
            head.return_value.layer_specs = [mock.Mock()]
            layer, trees = M.layer_spec(config), M.layer_spec(config, prefix_trees=True)
            with pytest.raises(InterruptedError):
                M.build_model(config, 8, 4)
            block = made["GPTModel"].call_args.kwargs["transformer_layer_spec"]
        own = layer is not engines and layer.submodules.self_attention.submodules.core_attention is M.SelfAttentionCore
        assert own or layer is engines
        assert trees.submodules.self_attention.submodules.core_attention is M.SelfAttentionCore
        assert (trees is engines) == (layer is engines)
        norms = head.return_value.layer_specs[0].submodules
        rows[package, card, dtype] = [
            config.apply_rope_fusion,
            config.persist_layer_norm,
            experts.moe_grouped_gemm,
            layer is engines,
            block is engines,
            block is engines or block.layer_norm is not ShardedNorm,
            head.call_args.args[2],
            norms.enorm is not ShardedNorm,
        ]
    M.destroy()
    return rows


def test_every_part_of_a_model_follows_the_table() -> None:
    """Each asks for itself: one that asked for another dtype would mix the engine's parts with ours, on a card alone."""
    from parallel_rl.megatron.model_config import choose_layers

    [rows] = run_world(1, _built)
    assert len(rows) == 16
    for entry, parts in rows.items():
        assert parts == [choose_layers(*entry).engine] * 8, entry


def test_an_engine_that_does_not_import_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One built for another torch is found, and Megatron runs without: the config ended in "Please install TE"."""
    from parallel_rl.megatron import model_config

    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c105Error')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model_config._import_fault.cache_clear()
    try:
        found = model_config.layers_here(torch.bfloat16)
    finally:
        model_config._import_fault.cache_clear()
    assert found == (False, "Transformer Engine does not import: ImportError: undefined symbol: _ZN3c105Error")
    assert model_config.layers_here(torch.float32).why.startswith("Transformer Engine has no attention for float32")


def _quantized(rank: int) -> dict[str, str]:
    """What the config says of FP8, on a machine with the engine and on one without."""
    import parallel_rl.megatron as M

    M.initialize()
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    found = {}
    for package, dtype, kept in product(BOTH, (torch.bfloat16, torch.float32), BOTH):
        with _machine(package, card=True):
            try:
                config = M.build_config(**sizes, dtype=dtype, overrides={"fp8": "hybrid", "fp8_param": kept})
                found[package, dtype, kept] = str(config.fp8)
            except ValueError as error:
                found[package, dtype, kept] = str(error)
    M.destroy()
    return found


def test_fp8_that_would_be_left_out_is_refused() -> None:
    """Local layers computed in the dtype of the parameters, and said nothing."""
    [found] = run_world(1, _quantized)
    for (package, dtype, kept), said in found.items():
        if not package:
            assert "fp8 = 'hybrid' has no effect" in said and "Transformer Engine is not installed" in said
        elif dtype == torch.float32:
            assert "fp8 = 'hybrid' has no effect" in said and "no attention for float32" in said
        else:
            assert ("fp8_param = True is not supported" in said) if kept else said == "hybrid"


OTHERS = {"moe_layer_freq": [0, 1], "qk_l2_norm": True, "multi_latent_attention": True}


def _others(rank: int) -> list[str]:
    import parallel_rl.megatron as M
    from parallel_rl.config.architecture import Experts

    M.initialize()
    found = []
    for name, value in OTHERS.items():
        config = M.build_config(
            num_layers=2, hidden_size=8, num_attention_heads=2, experts=Experts(2, 8), overrides={name: value}
        )
        with pytest.raises(ValueError) as caught:
            M.build_model(config, 8, 4)
        found.append(str(caught.value))
    M.destroy()
    return found


def test_layers_that_would_be_left_out_are_refused() -> None:
    """Experts stood in every layer, whatever `moe_layer_freq` said; without latent attention there were no positions at all."""
    [found] = run_world(1, _others)
    for said, (name, value) in zip(found, OTHERS.items(), strict=True):
        assert f"{name} = {value!r} has no effect on these layers" in said
