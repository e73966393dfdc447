"""Batches of hard cases: ragged, with empty rows, ranks and micro-batches; and their poisoned twins."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.call import LossFunction
from parallel_rl.losses.prm import PRMLossFn
from parallel_rl.losses.value import PooledHeadLoss
from parallel_rl.prefix_tree import build_tree
from parallel_rl.testing.cases import Batch, has_scalar_head

ROWS, WIDTH, VOCAB = 12, 16, 23
PLACEHOLDER, REWARD_IDS = 21, [19, 2]  # for a process reward model, on different shards
UNIT_BASE = 2**62 + 1  # float64 cannot distinguish the ids
POISON = (math.nan, math.inf, -math.inf)


class Sizes(NamedTuple):
    rows: int = ROWS
    width: int = WIDTH
    vocab: int = VOCAB


SIZES = Sizes()


def make_batch(
    seed: int,
    half_masked: bool,
    loss: str | type[LossFn],
    dtype: torch.dtype,
    shift: float = 0.0,
    *,
    truncated: bool = False,
    sizes: Sizes = SIZES,
) -> Batch:
    """Make a valid batch of ragged rows; fully masked rows fill a micro-batch.

    `truncated` adds kept sets, and tokens outside an earlier policy's truncation.
    """
    rows, width, vocab = sizes
    scalar = has_scalar_head(loss)
    g = torch.Generator().manual_seed(seed)
    kind = torch.promote_types(dtype, torch.float32)
    lengths = _cycled([2, 16, 5, 9, 7, 7, 13, 4, 16, 3, 11, 8], rows)
    lengths = [length * width // WIDTH for length in lengths]
    logits = torch.randn(rows, width, 1 if scalar else vocab, generator=g, dtype=torch.float64) * 1.5
    logits += shift * torch.randint(0, 2, (rows, width, 1), generator=g).mul(2).sub(1)
    logits = logits.to(dtype).double()
    ids = torch.randint(0, vocab, (rows, width), generator=g)
    ids[:, 2::4] = PLACEHOLDER
    every_third = torch.arange(0, vocab, 3)[:width]
    ids[1, : len(every_third)] = every_third  # targets on every shard
    token_mask = torch.rand(rows, width, generator=g) < 0.8
    token_mask &= torch.arange(width) < torch.tensor(lengths)[:, None]
    token_mask[:, 1] = True  # never two empty rows
    token_mask[3] = False
    sample_mask = torch.ones(rows)
    sample_mask[4:6] = 0  # at 2 data ranks x 3 micro-batches, one whole micro-batch
    sample_mask[10:12] = 0
    if half_masked:
        sample_mask[rows // 2 :] = 0  # all of data rank 1
    base = logits.roll(1, 1)[..., 0] if scalar else _logprobs(logits, ids)

    def near(scale: float) -> Tensor:
        return (base + scale * torch.randn(rows, width, generator=g).double()).to(kind).double()

    data = {
        "input_ids": ids,
        "token_mask": token_mask.to(torch.int64),
        "sample_mask": sample_mask,
        "advantages": (torch.randn(rows, width, generator=g).double() + 0.4).to(kind).double(),
        "prev_logprobs": near(0.2).clamp(max=0),
        "generation_logprobs": near(0.25).clamp(max=0),
        "reference_policy_logprobs": near(0.3).clamp(max=0),
        "rewards": torch.randn(rows, generator=g).double().to(kind).double(),
        "sample_ids": torch.randperm(max(1000, rows), generator=g)[:rows],
        "returns": near(0.5),
        "values": near(0.4),
        "preference_labels": torch.tensor(_cycled([1, -1, 0, 1, 1, 1, 0, 1, 1, -1, -1, 0], rows)).double(),
        "preference_margins": torch.rand(rows, generator=g).to(kind).double(),
        "reward_labels": torch.tensor([*REWARD_IDS, -100])[torch.randint(0, 3, (rows, width), generator=g)],
    }
    teacher = (torch.randn(rows, width, vocab, generator=g) * 1.5).to(kind).double()
    best, turns = teacher.roll(1, 1).topk(4, -1), torch.Generator().manual_seed(seed + 1)
    others = torch.Generator().manual_seed(seed + 2)
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    data |= {
        # groups and trajectories cross data ranks and micro-batches
        "group_ids": UNIT_BASE + torch.tensor(_cycled([3, 0, 1, 0, 7, 1, 0, 3, 2, 1, 0, 8], rows)),
        "run_ids": torch.tensor(_cycled([5, 6, 0, 4, 5, 0, 6, 5, 9, 0, 4, 2], rows)),
        "segment_ids": (torch.rand(rows, width, generator=turns) < 0.25).cumsum(1) * 3 + 5,
        "teacher_logits": teacher,
        "teacher_topk_logits": best.values,
        "teacher_topk_indices": best.indices,
        "teacher_logsumexp": teacher.roll(1, 1).logsumexp(-1).to(kind).double(),
        "token_weights": (torch.rand(rows, width, generator=others) * 3 - 1).clamp(min=0).to(kind).double(),
        "observation_mask": inside & ~token_mask & (torch.rand(rows, width, generator=others) < 0.7),
        "teacher_token_logprobs": (base + 0.4 * torch.randn(rows, width, generator=others).double()).to(kind).double(),
        "feedback_mask": torch.tensor(_cycled([1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1], rows)).bool(),
        "expert_mask": torch.tensor(_cycled([0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0], rows)).bool(),
    }
    data["temperature"] = 0.6 + torch.rand(rows, generator=others).double().to(kind).double()
    if truncated:
        kept = torch.rand(rows, width, vocab, generator=g).argsort(-1)[..., :7]
        data["kept_ids"] = torch.where(torch.rand(kept.shape, generator=g) < 0.8, kept, -1)
        for name in ("prev_logprobs", "generation_logprobs"):
            data[name][torch.rand(rows, width, generator=g) < 0.05] = -math.inf
    return Batch(logits, data, lengths)


def _cycled(pattern: list[int], number: int) -> list[int]:
    return [pattern[i % len(pattern)] for i in range(number)]


def local_names(loss_fn: LossFunction) -> list[str]:
    """List the fields that only this rank has, in the order of the logits."""
    return [field.name for field in loss_fn.requirements.fields if field.per == "local"]


def poisoned(data: dict[str, Tensor], loss_fn: LossFunction) -> dict[str, Tensor]:
    """Put NaN, inf and wild ids at places without loss."""
    bad = {name: value.clone() for name, value in data.items()}
    for name, value in bad.items():
        masked = ~(_scored(data, loss_fn) if name == "input_ids" else _token_mask(data))
        if loss_fn.requirements.token_weights is not None and name != "token_weights":
            masked |= data["token_weights"] == 0
        masked[:, 0] |= loss_fn.requirements.shift
        wild = torch.where(torch.arange(int(masked.sum())) % 2 == 0, -7, 10**6)
        poison = torch.tensor(POISON).repeat(masked.numel())[: len(wild)]
        there = masked.roll(-1, 1) if loss_fn.requirements.field(name).alignment == "predictor" else masked
        if name in ("input_ids", "reward_labels", "teacher_topk_indices", "kept_ids", "segment_ids"):
            value[there] = wild.view(-1, *[1] * (value.dim() - 2)).expand_as(value[there])
        elif value.dim() >= 2 and value.is_floating_point() and name not in local_names(loss_fn):
            value[there] = poison.view(-1, *[1] * (value.dim() - 2)).expand_as(value[there]).to(value.dtype)
        elif value.dim() == 1 and value.is_floating_point() and name != "sample_mask":
            value[data["sample_mask"] == 0] = math.nan
        elif name in ("group_ids", "run_ids"):  # ids of no valid row, of valid ones, and none
            rows = (data["sample_mask"] == 0).nonzero()[:, 0]
            value[rows] = torch.tensor([10**6, int(value[0]), -7]).repeat(len(value))[: len(rows)]
    return bad


def _token_mask(data: dict[str, Tensor]) -> Tensor:
    return (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]


def _scored(data: dict[str, Tensor], loss_fn: LossFunction) -> Tensor:
    """Return the tokens [B, S] with loss, by `token_mask` and masks of components."""
    mask = _token_mask(data)
    if loss_fn.requirements.token_weights is not None:
        mask &= data["token_weights"] > 0
    for component in getattr(loss_fn, "components", ()):
        if component.view.mask is not None:
            mask |= data[component.view.mask] & (data["sample_mask"] != 0)[:, None]
    return mask


def carries_loss(data: dict[str, Tensor], loss_fn: LossFunction) -> Tensor:
    """Return the positions [B, S] whose output matters to the loss."""
    mask = _scored(data, loss_fn)
    if isinstance(loss_fn, PRMLossFn):
        config = loss_fn.config
        return (
            mask & (data["input_ids"] == config.placeholder_token_id) & (data["reward_labels"] != config.ignore_index)
        )
    if isinstance(loss_fn, PooledHeadLoss):
        place = torch.arange(mask.shape[1])
        return mask & (place == torch.where(mask, place, -1).amax(1, keepdim=True))
    if not loss_fn.requirements.shift:
        return mask
    return torch.cat([mask[:, 1:], torch.zeros(len(mask), 1, dtype=torch.bool)], 1)


def _logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return token-aligned log-probs [B, S]; column 0 is 0."""
    picked = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([logits.new_zeros(len(ids), 1), picked], 1)


def with_fields(batch: Batch, loss_fn: LossFunction, seed: int = 7) -> Batch:
    """Add the loss's missing fields: normal floats, and integers 0 and 1."""
    g = torch.Generator().manual_seed(seed)
    data = dict(batch.data)
    for field in loss_fn.requirements.fields:
        if field.name in data:
            continue
        shape = (batch.rows,) if field.per == "sequence" else (batch.rows, batch.width)
        shape = (*shape, 4) if field.width else shape
        integers = torch.randint(0, 2, shape, generator=g)
        data[field.name] = torch.randn(shape, generator=g).double() if field.dtype in ("float", "label") else integers
    return batch._replace(data=data)


def with_shared_prefixes(batch: Batch, loss_fn: LossFunction, seed: int = 7) -> Batch:
    """Make rows share prefixes: deep trees, a row inside another, two equal rows.

    Logits and fields in their order are equal where tokens are shared.
    """
    g = torch.Generator().manual_seed(seed)
    ids, lengths = batch.data["input_ids"].clone(), batch.lengths
    for row in range(1, batch.rows):
        other = int(torch.randint(0, row, (), generator=g))
        least = min(lengths[row], lengths[other])
        length = least if row % 5 == 4 else int(torch.randint(least // 2, least + 1, (), generator=g))
        ids[row, :length] = ids[other, :length]
    tree = build_tree(ids, torch.tensor(lengths))

    def alike(field: Tensor) -> Tensor:
        return torch.where(tree.real[..., None], tree.row(field)[tree.where], field)

    of_rows = {name: alike(batch.data[name]) for name in local_names(loss_fn)}
    return Batch(alike(batch.logits), {**batch.data, "input_ids": ids, **of_rows}, lengths)
