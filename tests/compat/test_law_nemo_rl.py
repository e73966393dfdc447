"""NeMo-RL's contract over ranks: a loss is whole on every context rank, and loss / cp has the gradient of one process."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from parallel_rl import LMHeadInput
from parallel_rl.compat import nemo_rl
from parallel_rl.layout import SequenceLayout
from parallel_rl.testing.pool import run_world
from tests.compat import nemo_reference as reference
from tests.compat.nemo_reference import Data
from tests.compat.test_nemo_rl import GSPO, IS, truncated

SEQS, TOKS = torch.tensor(4.0), torch.tensor(20.0)
WIDTH, CP = 8, 2
EXTREMA = ("probs_ratio_min", "probs_ratio_clamped_min", "probs_ratio_max", "probs_ratio_clamped_max")


@functools.cache
def losses() -> dict[str, object]:
    """Every loss that takes groups."""
    return {
        "clipped_pg": nemo_rl.ClippedPGLossFn({"reference_policy_kl_penalty": 0.3, **truncated("icepop", 1.3, 0.7)}),
        "gspo": nemo_rl.ClippedPGLossFn({**GSPO, **IS}),
        "seq-mask-tis": nemo_rl.ClippedPGLossFn(truncated("seq-mask-tis", 1.1, 0.9) | {"token_level_loss": False}),
        "vapo": nemo_rl.ClippedPGLossFn({"positive_example_nll_weight": 0.4}),
        "nll": nemo_rl.NLLLoss(),
        "dpo": nemo_rl.DPOLossFn({"sft_loss_weight": 0.3, "sft_average_log_probs": True}),
        "distillation": nemo_rl.DistillationLossFn({"kl_type": "mixed", "zero_outside_topk": True}),
        "distillation inside": nemo_rl.DistillationLossFn({"kl_type": "reverse"}),
    }


def _data(name: str) -> Data:
    return reference.pairs(0) if name == "dpo" else reference.batch(0)


def _local(x: Tensor, rank: int, tensor_rank: int, *, pad: int = 0) -> Tensor:
    """This rank's logits, cut along the sequence (with padding of context ranks) and the vocabulary."""
    x = torch.nn.functional.pad(x, (0, 0, 0, pad))
    layout = SequenceLayout.padded(*x.shape[:2], cp_size=CP, cp_rank=rank)
    return layout.take(x, shift=False).view(len(x), -1, x.shape[-1])[..., 4 * tensor_rank : 4 * tensor_rank + 4]


def _world(rank: int) -> dict[str, tuple]:
    tensor, context = (
        next(group for ranks, group in groups if rank in ranks)
        for groups in (
            [(ranks, dist.new_group(ranks)) for ranks in ([0, 1], [2, 3])],
            [(ranks, dist.new_group(ranks)) for ranks in ([0, 2], [1, 3])],
        )
    )
    of_rank = rank // 2, rank % 2
    groups = {"vocab_parallel_rank": rank % 2, "vocab_parallel_group": tensor, "context_parallel_group": context}
    answers = {}
    for name, fn in losses().items():
        data = _data(name)
        x = data["logits"].clone().requires_grad_()
        loss, metrics = fn(_local(x, *of_rank), data, SEQS, TOKS, **groups)
        answers[name] = loss.detach(), metrics, torch.autograd.grad(loss / CP, x)[0]
        row = torch.cat([_local(x[i : i + 1], *of_rank) for i in range(6)], 1)
        packed = nemo_rl.SequencePackingLossWrapper(fn, torch.arange(7) * WIDTH)
        loss, metrics = packed(row, data, SEQS, TOKS, **groups)
        answers[f"{name}, packed"] = loss.detach(), metrics, torch.autograd.grad(loss / CP, x)[0]
    data = reference.batch(0)
    narrow = {k: v[:, :6] if v.dim() > 1 else v for k, v in data.items()}
    x = narrow["logits"].clone().requires_grad_()  # 6 columns do not divide by 2·cp: the logits have 8
    loss, metrics = losses()["gspo"](_local(x, *of_rank, pad=2), narrow, SEQS, TOKS, **groups)
    answers["gspo, padded"] = loss.detach(), metrics, torch.autograd.grad(loss / CP, x)[0]
    x = data["logits"].clone().requires_grad_()
    loss, _ = nemo_rl.NLLLoss()(_local(x, *of_rank), data, None, TOKS, **groups, dpo_loss=True)
    answers["nll of rows"] = loss.detach(), {}, torch.autograd.grad(loss[1] / CP, x)[0]
    x = data["logits"].clone().requires_grad_()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    shard = DTensor.from_local(x[..., 4 * (rank % 2) : 4 * (rank % 2) + 4], mesh["tp"], [Shard(-1)])
    loss, metrics = losses()["gspo"](shard, data, SEQS, TOKS)
    answers["gspo, DTensor"] = loss.detach(), metrics, torch.autograd.grad(loss, x)[0] / CP
    hidden, weight = _hidden()
    leaf = weight.clone().requires_grad_()
    layout = SequenceLayout.padded(6, WIDTH, cp_size=CP, cp_rank=of_rank[0])
    head = LMHeadInput(layout.take(hidden, shift=False).view(6, -1, 4), leaf[4 * (rank % 2) : 4 * (rank % 2) + 4])
    loss, metrics = losses()["gspo"](head, data, SEQS, TOKS, **groups)
    answers["gspo, hidden"] = loss.detach(), metrics, torch.autograd.grad(loss / CP, leaf)[0]
    return answers


def _hidden() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((6, 8, 4), (8, 4)))  # type: ignore[return-value]


def _alone(name: str) -> tuple[Tensor, dict, Tensor]:
    name, _, form = name.partition(", ")
    data = _data(name)
    if form == "hidden":
        hidden, weight = _hidden()
        weight.requires_grad_()
        loss, metrics = losses()[name](hidden @ weight.T, data, SEQS, TOKS)
        return loss.detach(), metrics, torch.autograd.grad(loss, weight)[0]
    if form == "padded":
        data = {k: v[:, :6] if v.dim() > 1 else v for k, v in data.items()}
    x = data["logits"].clone().requires_grad_()
    if name == "nll of rows":
        loss, _ = nemo_rl.NLLLoss()(x, data, None, TOKS, dpo_loss=True)
        return loss.detach(), {}, torch.autograd.grad(loss[1], x)[0]
    fn = losses()[name]
    if form == "packed":
        fn, first = nemo_rl.SequencePackingLossWrapper(fn, torch.arange(7) * WIDTH), x.view(1, 48, -1)
        loss, metrics = fn(first, data, SEQS, TOKS)
    else:
        loss, metrics = fn(x, data, SEQS, TOKS)
    return loss.detach(), metrics, torch.autograd.grad(loss, x)[0]


@pytest.fixture(scope="module")
def world() -> list[dict[str, tuple]]:
    return run_world(4, _world)


FURTHER = ["gspo, padded", "nll of rows", "gspo, DTensor", "gspo, hidden"]


@pytest.mark.parametrize("name", [*(f"{name}{form}" for name in losses() for form in ("", ", packed")), *FURTHER])
def test_every_rank_has_the_whole_loss(name: str, world: list[dict[str, tuple]]) -> None:
    """TP 2 × CP 2: padded, packed, padded for context ranks, as a DTensor and from hidden states."""
    loss, metrics, grad = _alone(name)
    for answers in world:
        found, means, _ = answers[name]
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
        assert means == pytest.approx(metrics, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(sum(answers[name][2] for answers in world), grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in losses() if name != "vapo"])
@pytest.mark.parametrize("cuts", [(0, 2, 6), (0, 4, 4, 6), (0, 2, 4, 6)], ids=str)
def test_micro_batches_add_up(name: str, cuts: tuple[int, ...]) -> None:
    """Over micro-batches and data ranks losses, gradients and metrics add up; Q4's do not, nor Q2's metric."""
    data, fn = _data(name), losses()[name]
    loss, metrics, grad = _alone(name)
    total, grads, sums = 0.0, [], dict.fromkeys(metrics, 0.0)
    for start, end in itertools.pairwise(cuts):
        part: Data = {key: value[start:end] for key, value in data.items()}
        x = part["logits"].clone().requires_grad_()
        share, found = fn(x, part, SEQS, TOKS)
        total, sums = total + share.detach(), {key: sums[key] + found[key] for key in sums}
        grads.append(torch.autograd.grad(share, x)[0])
    torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(grads), grad, rtol=1e-12, atol=1e-12)
    adds = [key for key in metrics if key not in EXTREMA and (name, key) != ("gspo", "sampling_importance_ratio")]
    assert {key: sums[key] for key in adds} == pytest.approx({key: metrics[key] for key in adds}, rel=1e-10, abs=1e-12)


def test_the_nll_of_positive_examples_does_not_add_up() -> None:
    """Q4: it is divided by the call's own tokens, as in the origin."""
    data, fn = reference.batch(0), losses()["vapo"]
    whole, *parts = (
        fn(data["logits"][rows], {key: value[rows] for key, value in data.items()}, SEQS, TOKS)[1]["positive_nll_loss"]
        for rows in (slice(0, 6), slice(0, 1), slice(1, 6))
    )
    assert sum(parts) > 1.5 * whole > 0
