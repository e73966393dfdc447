"""Our norm, attention and CPU support against plain mathematics and against Megatron's own layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_rl.layout import SequenceLayout
from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import VOCAB, WIDTH, Case, make_data, make_model

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")


def _against_megatron(rank: int, normalization: str, position: str) -> tuple[float, float]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    import parallel_rl.megatron as M

    M.initialize()
    config = M.build_config(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, dtype=torch.float64, init_std=0.3,
        normalization=normalization,
    )  # fmt: skip
    ours = M.build_model(config, VOCAB, WIDTH, position_embedding=position)
    config.persist_layer_norm = False
    spec = get_gpt_layer_local_spec(normalization=normalization)
    theirs = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=WIDTH,
        position_embedding_type=position,
    ).double()
    theirs.load_state_dict(ours.state_dict())
    ids = make_data("ragged")["input_ids"]
    hidden = torch.ones(1, 1, WIDTH, WIDTH, dtype=torch.bool).triu(1)
    places = torch.arange(WIDTH).expand_as(ids)
    logits = theirs(ids, places, hidden), M.forward_logits(ours, M.padded_input(ids)), ours(ids, places, hidden)
    for z in logits:
        z.square().sum().backward()
    error = max((logits[0] - z).abs().max().item() for z in logits[1:])
    grad = max(
        (2 * p.grad - q.grad).norm().item() / q.grad.norm().item()
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True)
    )
    M.destroy()
    return error, grad


@pytest.mark.parametrize(("normalization", "position"), [("RMSNorm", "rope"), ("LayerNorm", "learned_absolute")])
def test_own_layers_equal_megatrons(normalization: str, position: str) -> None:
    ((error, grad),) = run_world(1, _against_megatron, normalization, position)
    assert error < 1e-11 and grad < 1e-12


def _attention(rank: int, cp: int, lengths: list[int], dtype: torch.dtype) -> dict[str, float]:
    """Largest relative error of the output and of the three gradients on this rank against softmax(q kᵀ) v per
    sequence.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    import parallel_rl.megatron as M

    M.initialize(cp=cp)
    config = M.build_config(num_layers=1, hidden_size=24, num_attention_heads=4, num_query_groups=2, dtype=dtype)
    attend = M.SelfAttentionCore(config, 1, AttnMaskType.causal, "self")
    g = torch.Generator().manual_seed(7)
    total = sum(lengths)
    query, weight = (torch.randn(total, 4, 6, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    key, value = (torch.randn(total, 2, 6, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    out = torch.cat(
        [_naive(*(x.double() for x in part)) for part in zip(*(x.split(lengths) for x in whole), strict=True)]
    )
    (out * weight.double().flatten(1)).sum().backward()

    bounds = torch.tensor([0, *lengths]).cumsum(0)
    layout = SequenceLayout.packed(
        bounds, seq_len=total, total=total, cp_size=cp, cp_rank=parallel_state.get_context_parallel_rank()
    )
    mine = bounds[layout.sequence_ids] + layout.positions
    local = [x[mine].requires_grad_() for x in (query, key, value)]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds.int(), cu_seqlens_kv=bounds.int())
    got = attend(*local, None, packed_seq_params=packed)
    (got * weight[mine].flatten(1)).sum().backward()
    M.destroy()
    errors = {"output": _error(got, out[mine])}
    errors |= {name: _error(x.grad, y.grad[mine]) for name, x, y in zip("qkv", local, whole, strict=True)}
    return errors


def _naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def _error(got: Tensor, right: Tensor) -> float:
    return ((got.double() - right.double()).norm() / right.double().norm()).item()


@pytest.mark.parametrize(
    ("cp", "dtype", "bound"),
    [
        pytest.param(cp, dtype, bound, marks=() if cp == 4 or dtype == torch.float64 else pytest.mark.slow)
        for cp in (1, 2, 4)
        for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2))
        if (cp, dtype) != (4, torch.float32)
    ],
)
def test_packed_attention_is_causal_attention_within_each_sequence(cp: int, dtype: torch.dtype, bound: float) -> None:
    # A sequence above the block size, one that fills it, and many small ones.
    lengths = [8, 600, 16, 8, 512, 24, 40]
    for errors in run_world(cp, _attention, cp, lengths, dtype):
        assert max(errors.values()) < bound, errors


def test_a_long_packed_row_never_gets_a_mask_of_its_own_size() -> None:
    from parallel_rl.megatron.layers import BLOCK, _plan

    bounds = tuple(range(0, 64 * 1000 + 1, 64))
    for cp in (1, 2):
        plan = _plan(bounds, (cp, 0, "zigzag"), torch.device("cpu"))
        assert [block.start for block in plan] == [0, *(block.stop for block in plan[:-1])]
        assert plan[-1].stop == bounds[-1] // cp
        assert max(block.mask.numel() for block in plan if block.mask is not None) <= BLOCK * BLOCK


def test_a_layer_does_not_read_the_bounds_from_the_device() -> None:
    """On a GPU each layer of each micro-batch would wait for all that is queued; the meta device has nothing to read."""
    from parallel_rl.megatron import ALONE, packed_input
    from parallel_rl.megatron.layers import _bounds

    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = packed_input(torch.zeros(2, 5, dtype=torch.int64, device="meta"), cu_seqlens, context=ALONE).packed
    assert packed is not None and packed.cu_seqlens_q.is_meta
    assert _bounds(packed, 8, 1) == (0, 3, 8)


def _bf16(rank: int) -> tuple[str, str, float]:
    import parallel_rl.megatron as M

    M.initialize(tp=2)
    case = Case(tp=2, sp=True)
    inputs = M.padded_input(make_data("ragged")["input_ids"])
    exact = M.forward_logits(M.wrap_model(make_model(case), ddp=False), inputs)
    model = M.wrap_model(make_model(case, torch.bfloat16))
    logits = M.forward_logits(model, inputs)
    logits.float().square().mean().backward()
    grad = M.gradient(next(iter(model.parameters())))
    M.destroy()
    return str(logits.dtype), str(grad.dtype), _error(logits, exact)


def test_logits_stay_in_bf16_and_gradients_accumulate_in_float32() -> None:
    for logits, grad, error in run_world(2, _bf16):
        assert (logits, grad) == ("torch.bfloat16", "torch.float32")
        assert 1e-4 < error < 5e-2


def _copies_of_logits(rank: int) -> list[str]:
    """What was allocated in the logits' dtype and size between the last layer's output and the end of the backward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss, SequencePackingLossWrapper

    vocab, width = 2048, 32
    M.initialize(tp=2)
    config = M.build_config(
        num_layers=1, hidden_size=16, num_attention_heads=2, dtype=torch.bfloat16, sequence_parallel=True
    )
    model = M.wrap_model(M.build_model(config, vocab, width))
    data = {"input_ids": torch.zeros(2, width, dtype=torch.int64), "token_mask": torch.ones(2, width)}
    data["token_mask"][1, width - 3 :] = 0
    data["sample_mask"] = torch.ones(2)
    bounds = M.packed_bounds(torch.tensor([width, width - 3]))
    storages, names = {}, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                if not isinstance(x, Tensor) or x.dtype != torch.bfloat16 or x.shape[-1:] != (vocab // 2,):
                    continue
                storage = x.untyped_storage()
                if storage.nbytes() >= width * vocab and storage.data_ptr() not in storages:
                    storages[storage.data_ptr()] = storage  # kept, so that no address is used twice
                    names.append(str(func))
            return out

    with Watch():
        logits = M.forward_logits(model, M.packed_input(data["input_ids"], *bounds))
        loss_fn = SequencePackingLossWrapper(NLLLoss(vocab_size=vocab, consume_logits=True), *bounds)
        counts = torch.tensor(2), torch.tensor(2 * width - 5)
        loss, *_ = M.megatron_loss_func(loss_fn, data, *counts, config=config, num_microbatches=1)(logits)
        loss.backward()
    M.destroy()
    return names


def test_packed_logits_are_never_copied_on_their_way_from_the_head_and_back() -> None:
    assert run_world(2, _copies_of_logits) == [["aten.mm.default"]] * 2


def _cpu(rank: int) -> None:
    import parallel_rl.megatron as M
    from parallel_rl.megatron.cpu import plain_torch

    assert M.enable_cpu() and M.enable_cpu()
    assert len(torch.overrides._get_current_function_mode_stack()) == 1
    x = torch.zeros(2, device="cuda")
    assert x.device.type == "cpu" and x.cuda() is x and x.to("cuda:0").device.type == "cpu"
    assert torch.tensor([1], device=torch.cuda.current_device(), pin_memory=True).device.type == "cpu"
    assert (
        x.type() == "torch.FloatTensor"
        and x.type(torch.int64).dtype == torch.int64
        and x.to(torch.float64).dtype == torch.float64
    )
    with plain_torch():
        assert not torch.overrides._get_current_function_mode_stack()
    assert len(torch.overrides._get_current_function_mode_stack()) == 1


def test_cpu_support_is_idempotent_and_leaves_the_rest_alone() -> None:
    run_world(1, _cpu)
