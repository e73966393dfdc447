"""Sampling from vocabulary shards without gathering: the same tokens from the same logits on any layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from parallel_rl.agreement import raise_on_all_ranks, shape_facts
from parallel_rl.groups import all_gather
from parallel_rl.validation import checks_values
from parallel_rl.vocab.shards import Truncation, VocabShard, check_spans
from parallel_rl.vocab.threshold import kept_floor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

# SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), in wrapping signed 64-bit
# integers
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

_CPU_BLOCK = 1 << 16  # noise elements at a time: fits the second-level cache
_DEVICE_BLOCK = 1 << 22


@torch.no_grad()
def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
) -> Tensor:
    """Draw one int64 token a row from softmax(z / temperature), the same on all ranks of the group.

    Gumbel-max per shard (Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014), one all-gather [rows, 2].

        token = argmax_v  z_v / temperature − log(−log u(key, v)),     u a hash of (key, v), uniform on (0, 1)

    The noise of column v depends only on the row's key and v, not on the shards or the batch's order and size. It is float64,
    in blocks of rows. Ties go to the smallest id.

    >>> sample_tokens(torch.tensor([[0.0, 9.0, 1.0]]), sample_keys(0, torch.tensor([7]), torch.tensor([3])), temperature=0)
    tensor([1])

    Args:
        logits: [..., V/tp] this rank's columns, any float dtype. −inf is never drawn.
        keys: [...] int64, one per row, the same on all ranks of the group; see `sample_keys`. Equal keys give equal noise.
        temperature: 0 is greedy: the largest logit, for any keys.
        top_k, top_p: draw from the truncated distribution, see `parallel_rl.vocab.shards.Truncation`; a few small
            all-reduces more.
        group: tensor-parallel group; None is one shard.
        vocab_size: true size V; columns at or beyond it are padding and never drawn.
        vocab_start: first column's id, for a split that is neither even nor `torch.chunk`'s.

    Raises:
        ValueError: on all ranks of the group: shapes, dtypes or options that do not fit; where values are checked (see
            `set_validation`) a row with NaN, +inf or only −inf.
    """

    def check() -> VocabShard:
        truncation = Truncation(top_k, top_p)
        if logits.dim() < 1 or not logits.is_floating_point():
            raise ValueError(f"logits must be floating point [..., V/tp], got {logits.dtype} {list(logits.shape)}")
        if keys.dtype != torch.int64 or keys.shape != logits.shape[:-1]:
            shape = list(logits.shape[:-1])
            raise ValueError(
                f"keys must be int64 {shape}, one per row of the logits, got {keys.dtype} {list(keys.shape)}"
            )
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature = {temperature} must be a number >= 0 (0 is greedy)")
        if temperature == 0 and truncation:
            raise ValueError(
                f"top_k = {top_k} and top_p = {top_p} have no effect with temperature = 0, which takes the largest logit"
            )
        return VocabShard.of(
            logits.shape[-1], group, vocab_size, vocab_start, temperature=temperature or 1.0, truncation=truncation
        )

    shard = raise_on_all_ranks(check, [group], logits, shape_facts(logits, vocab_size, vocab_start))
    check_spans(group, logits.shape[-1], vocab_size, vocab_start, logits)
    flat, row_keys = logits.reshape(keys.numel(), logits.shape[-1])[:, : shard.valid], keys.reshape(-1)
    floor = kept_floor(flat, shard) if shard.truncation else None
    best = flat.new_empty(flat.shape[0], 2, dtype=torch.float64)  # value, id
    if shard.valid == 0:
        best[:, 0], best[:, 1] = -math.inf, shard.vocab_size
    else:
        _best_of_shard(flat, floor, row_keys, temperature, shard.start, best)
    value, token = _best_of_group(best, group)
    if checks_values(logits) and not bool(value.isfinite().all()):
        row = int((~value.isfinite()).nonzero()[0])
        values = {math.inf: "+inf", -math.inf: "only -inf"}.get(float(value[row]), "NaN")
        raise ValueError(
            f"row {row} of the logits (counted over all leading dimensions) has {values}, so no token can be sampled"
        )
    return token.view(keys.shape)


def sample_keys(seed: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """Hash (seed, sample id, position) to 64-bit keys for `sample_tokens`, the same on every layout.

    >>> sample_keys(0, torch.tensor([7]), torch.tensor([3, 4])).shape
    torch.Size([2])

    Args:
        seed: any integer, modulo 2^64.
        sample_ids: [N] integers that name the sample (not its row in the batch).
        positions: [N] integers, positions of the drawn tokens; the two broadcast.

    Raises:
        ValueError: dtypes that are not integers, or shapes that do not broadcast.
    """
    for name, value in (("sample_ids", sample_ids), ("positions", positions)):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {value.dtype}")
    try:
        shape = torch.broadcast_shapes(sample_ids.shape, positions.shape)
    except RuntimeError:
        shapes = f"{list(sample_ids.shape)} and {list(positions.shape)}"
        raise ValueError(f"sample_ids and positions must have the same shape, got {shapes}") from None
    signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    key = _mix(torch.full(shape, signed, dtype=torch.int64, device=sample_ids.device).add_(_GAMMA))
    for value in (sample_ids, positions):
        key = _mix(key + value.to(torch.int64) * _GAMMA)
    return key


def _best_of_shard(z: Tensor, floor: Tensor | None, keys: Tensor, temperature: float, start: int, best: Tensor) -> None:
    """Write each row's largest noisy score and its global id into `best` [rows, 2]."""
    width = z.shape[1]
    block = max(1, (_CPU_BLOCK if z.device.type == "cpu" else _DEVICE_BLOCK) // width)
    # hash the key before adding the column: neighbouring keys share no noise
    rows = _mix(keys.clone())[:, None]
    columns = torch.arange(start + 1, start + width + 1, dtype=torch.int64, device=z.device).mul_(_GAMMA)
    for first in range(0, z.shape[0], block):
        part = slice(first, first + block)
        score = z[part].to(torch.float64)
        if temperature > 0:
            score = _gumbel(rows[part] + columns).add_(score / temperature)
        if floor is not None:
            score.masked_fill_(z[part] < floor[part], -math.inf)
        value, column = score.max(dim=1)  # the first of equals
        best[part, 0], best[part, 1] = value, (column + start).to(torch.float64)


def _best_of_group(best: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    best = all_gather(best, group)
    value = best[..., 0].amax(0)  # NaN wins
    token = best[..., 1].masked_fill(best[..., 0] < value, math.inf).amin(0)
    return value, token.to(torch.int64)


def _gumbel(counter: Tensor) -> Tensor:
    """Compute −log(−log u) in float64; `counter` is overwritten and hashes to u, a 2^-52 cell's middle."""
    u = _shift(_mix(counter), 12).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser, a bijection of 64-bit integers, in place."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift x right by `bits`, filling with zeros (torch repeats the sign)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
