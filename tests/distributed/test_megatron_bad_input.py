"""Every bad input is a ValueError on every rank, and nothing hangs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.distributed.megatron_cases import VOCAB, WIDTH, Case, make_model
from tests.distributed.pool import WorldError, preload, run_world

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")


def _bad(rank: int, what: str) -> None:
    import parallel_rl.megatron as M

    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    if what == "world":
        M.initialize(tp=3)
    elif what == "size":
        M.initialize(cp=0)
    elif what in ("dropout", "heads", "layers", "overrides", "attention"):
        M.initialize(tp=1 if what == "layers" else 2, pp=2 if what == "layers" else 1)
        if what == "dropout":
            M.build_config(**sizes, dropout=0.1)
        if what == "heads":
            M.build_config(**(sizes | {"num_attention_heads": 1}))
        if what == "layers":
            M.build_config(**(sizes | {"num_layers": 3}))
        if what == "overrides":
            M.build_config(**sizes, overrides={"hiden_dropout": 0.0})
        M.build_model(M.build_config(**sizes, overrides={"window_size": (4, 0)}), VOCAB, WIDTH)
    elif what in ("zigzag", "bounds", "total"):
        M.initialize(cp=2)
        ids = torch.zeros(2, 6, dtype=torch.int64)
        if what == "zigzag":
            M.padded_input(ids)
        if what == "bounds":
            M.packed_input(ids, torch.tensor([0, 6, 12]))
        M.packed_bounds(torch.tensor([3, 5]), total=11)
    elif what == "sequence parallel":
        M.initialize(tp=2)
        model = make_model(Case(tp=2, sp=True))
        M.forward_logits(model, M.padded_input(torch.zeros(1, 5, dtype=torch.int64)))
    elif what == "experts":
        M.initialize()
        config = SimpleNamespace(num_moe_experts=2, mtp_num_layers=None, calculate_per_token_loss=True)
        M.megatron_loss_func(None, {}, None, None, config=config, num_microbatches=1, ddp=False)
    elif what == "micro-batches":
        M.initialize()
        M.megatron_loss_func(None, {}, None, None, config=SimpleNamespace(), num_microbatches=0)
    elif what == "position":
        M.initialize()
        M.build_model(M.build_config(**sizes), VOCAB, WIDTH, position_embedding="alibi")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("world", "the world has 2 ranks, which is not divisible by tp 3 × cp 1 × pp 1 = 3"),
        ("size", "cp = 0 must be at least 1"),
        ("dropout", "hidden_dropout = 0.1 must be 0"),
        ("heads", "num_attention_heads = 1 is not divisible by 2 tensor parallel ranks"),
        ("layers", "num_layers = 3 is not divisible by 2 pipeline stages"),
        ("overrides", "hiden_dropout"),
        ("attention", "window_size = (4, 0) is not supported"),
        ("zigzag", "sequence length 6 is not divisible by 4"),
        ("bounds", "padded lengths [6, 6] are not divisible by 4"),
        ("total", "total = 11 must be at least 12"),
        ("sequence parallel", "sequence_parallel splits the 5 local positions over tp = 2"),
        ("experts", "needs Megatron's DDP"),
        ("micro-batches", "num_microbatches = 0 must be at least 1"),
        ("position", "position_embedding = 'alibi' is not valid"),
    ],
)
def test_bad_input_is_an_error_on_every_rank(what: str, message: str) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, _bad, what)
    assert not caught.value.silent and sorted(caught.value.errors) == [0, 1]
    for text in caught.value.errors.values():
        assert text.startswith("ValueError") and message in text
