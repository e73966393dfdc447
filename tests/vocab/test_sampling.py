"""Draws from sharded logits: the right distribution, independent draws, and the same bits on every layout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import parallel_rl.vocab.sampling as sampling
from parallel_rl.testing.pool import WorldError, run_world
from parallel_rl.validation import validation
from parallel_rl.vocab.sampling import sample_keys, sample_tokens
from tests.collectives import recorded
from tests.vocab.sorted_rows import kept_by_sorting
from tests.vocab.test_sample_keys import MASK


def _logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _keys(rows: int) -> torch.Tensor:
    return sample_keys(7, torch.arange(rows), torch.arange(rows) % 5)


def _chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Standard deviations of the chi-square statistic above its mean."""
    freedom = counts.numel() - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


# ---------------------------------------------------------------- the distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    draws, row = 60_000, _logits(1, 12, scale=0.7)
    tokens = sample_tokens(row.expand(draws, -1), _keys(draws), temperature=temperature)
    expected = torch.softmax(row[0].double() / temperature, -1) * draws
    counts = torch.bincount(tokens, minlength=12).double()
    assert expected.min() > 5
    assert _chi_square(counts, expected) < 4.5


def test_the_chi_square_test_can_fail() -> None:
    draws, row = 60_000, _logits(1, 12, scale=0.7)
    tokens = sample_tokens(row.expand(draws, -1), _keys(draws), temperature=1.05)
    counts = torch.bincount(tokens, minlength=12).double()
    assert _chi_square(counts, torch.softmax(row[0].double(), -1) * draws) > 4.5


def test_the_noise_is_gumbel() -> None:
    noise = sampling._gumbel(sample_keys(3, torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64)))
    cdf = (-(-noise.sort().values).exp()).exp()
    steps = torch.arange(1, noise.numel() + 1, dtype=torch.float64) / noise.numel()
    kolmogorov = (cdf - steps).abs().max().item() * math.sqrt(noise.numel())
    assert kolmogorov < 1.95  # one in a thousand


def test_extreme_hashes_give_finite_noise() -> None:
    def inverse(y: int) -> int:  # what _mix maps to y
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            x = y
            for _ in range(64 // shift + 1):
                x = y ^ (x >> shift)
            y = x * pow(factor, -1, 1 << 64) & MASK
        return (y + (1 << 63)) % (1 << 64) - (1 << 63)

    low, high = sampling._gumbel(torch.tensor([inverse(0), inverse(MASK)])).tolist()
    assert low == pytest.approx(-math.log(53 * math.log(2)), rel=1e-12)
    assert high == pytest.approx(53 * math.log(2), rel=1e-12)


@pytest.mark.parametrize("neighbours", ["positions", "samples", "seeds", "raw keys", "gamma apart"])
def test_neighbouring_draws_are_independent(neighbours: str) -> None:
    draws, vocab = 40_000, 4
    ids, zero = torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    first, second = {
        "positions": (sample_keys(1, ids, zero), sample_keys(1, ids, zero + 1)),
        "samples": (sample_keys(1, 2 * ids, zero), sample_keys(1, 2 * ids + 1, zero)),
        "seeds": (sample_keys(1, ids, zero), sample_keys(2, ids, zero)),
        "raw keys": (2 * ids, 2 * ids + 1),
        "gamma apart": (ids, ids + sampling._GAMMA),
    }[neighbours]
    row = _logits(1, vocab, scale=0.7).expand(draws, -1)
    pairs = sample_tokens(row, first) * vocab + sample_tokens(row, second)
    p = torch.softmax(row[0].double(), -1)
    counts = torch.bincount(pairs, minlength=vocab * vocab).double()
    assert _chi_square(counts, torch.outer(p, p).flatten() * draws) < 4.5


def test_leading_dimensions_and_dtypes() -> None:
    logits, keys = _logits(24, 50).view(2, 3, 4, 50), _keys(24).view(2, 3, 4)
    tokens = sample_tokens(logits, keys)
    assert tokens.shape == (2, 3, 4) and tokens.dtype == torch.int64
    assert torch.equal(tokens.flatten(), sample_tokens(logits.view(24, 50), keys.view(24)))
    assert torch.equal(tokens, sample_tokens(logits.double(), keys))
    low = logits.bfloat16()
    assert torch.equal(sample_tokens(low, keys), sample_tokens(low.float(), keys))
    assert sample_tokens(logits[:0], keys[:0]).shape == (0, 3, 4)


def test_greedy_and_low_temperature() -> None:
    logits, keys = _logits(100, 30), _keys(100)
    assert torch.equal(sample_tokens(logits, keys, temperature=0), logits.argmax(-1))
    assert torch.equal(sample_tokens(logits, keys, temperature=1e-6), logits.argmax(-1))
    tied = torch.zeros(3, 8)
    tied[1, 5] = tied[1, 3] = 1.0
    assert sample_tokens(tied, _keys(3), temperature=0).tolist() == [0, 3, 0]


def test_masked_and_padded_columns_are_never_drawn() -> None:
    logits = _logits(500, 16)
    logits[:, ::2] = -math.inf
    assert bool((sample_tokens(logits, _keys(500)) % 2 == 1).all())
    padded = _logits(500, 16)
    padded[:, 11:] = 1e4
    tokens = sample_tokens(padded, _keys(500), vocab_size=11)
    assert torch.equal(tokens, sample_tokens(padded[:, :11], _keys(500)))
    padded[:, 11:] = math.nan
    assert torch.equal(tokens, sample_tokens(padded, _keys(500), vocab_size=11))


# ---------------------------------------------------------------- the same bits everywhere


@pytest.mark.parametrize("block", [1, 100, 1 << 10, 1 << 30])
def test_blocks_order_and_batch_size_do_not_matter(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, keys = _logits(67, 101), _keys(67)
    whole = sample_tokens(logits, keys)
    monkeypatch.setattr(sampling, "_CPU_BLOCK", block)
    assert torch.equal(sample_tokens(logits, keys), whole)
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample_tokens(logits[order], keys[order]), whole[order])
    assert torch.equal(torch.cat([sample_tokens(logits[i : i + 1], keys[i : i + 1]) for i in range(67)]), whole)


def test_the_noise_is_never_whole() -> None:
    class Largest(torch.overrides.TorchFunctionMode):
        elements = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype in (torch.int64, torch.float64):
                Largest.elements = max(Largest.elements, out.numel())
            return out

    logits, keys = _logits(4096, 512), _keys(4096)
    with Largest():
        sample_tokens(logits, keys)
    assert 0 < Largest.elements <= sampling._CPU_BLOCK < logits.numel() // 8


def _shard(logits: torch.Tensor, rank: int, split: str, size: int) -> tuple[torch.Tensor, int, int | None]:
    """This rank's columns, the true vocabulary size and an explicit start."""
    vocab = logits.shape[-1]
    if split == "chunk":
        return torch.chunk(logits, size, -1)[rank], vocab, None
    if split == "padded":  # Megatron: even shards, the last ones with padding that must not be read
        width = -(-vocab // size) + 3
        padded = torch.nn.functional.pad(logits, (0, width * size - vocab), value=math.nan)
        return padded[..., rank * width : (rank + 1) * width], vocab, None
    bounds = [0, *(7 + 11 * r for r in range(size - 1)), vocab]
    return logits[..., bounds[rank] : bounds[rank + 1]], vocab, bounds[rank]


def _draw(rank: int, split: str, temperature: float, dtype: torch.dtype) -> tuple[torch.Tensor, bool, int]:
    size = dist.get_world_size()
    logits = _logits(200, 103).to(dtype)
    logits[0] = logits[1, :] = 0.25  # ties over the shards
    part, vocab, start = _shard(logits, rank, split, size)
    shard = {"group": dist.group.WORLD, "vocab_size": vocab, "vocab_start": start}
    sample_tokens(part, _keys(200), **shard)  # the first call on a group compares where the shards start
    with recorded() as collectives:
        tokens = sample_tokens(part, _keys(200), temperature=temperature, **shard)
    one = sample_tokens(logits, _keys(200), temperature=temperature)
    return tokens, torch.equal(tokens, one), collectives.count("_allgather_base_")


SPLITS = ("chunk", "padded", "explicit")
DRAWS = ((1.0, torch.float32), (0.0, torch.float32), (0.7, torch.bfloat16))


def _draws(rank: int) -> list[tuple[torch.Tensor, bool, int]]:
    return [_draw(rank, split, *draw) for split in SPLITS for draw in DRAWS]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_draw_what_one_process_draws(size: int) -> None:
    for first, *others in zip(*run_world(size, _draws), strict=True):
        for tokens, same, gathers in (first, *others):
            assert same and gathers == 1
            assert torch.equal(tokens, first[0])
    assert first[0].unique().numel() > 20


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(3, 4, dtype=torch.int64)}, "logits must be floating point"),
        ({"keys": torch.zeros(3)}, "keys must be int64"),
        ({"keys": torch.zeros(4, dtype=torch.int64)}, r"keys must be int64 \[3\]"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"vocab_size": 9}, "vocab_size = 9"),
        ({"logits": torch.full((3, 4), -math.inf)}, "row 0 of the logits .* has only -inf"),
        ({"logits": torch.tensor([[0.0, 1], [0, math.nan], [0, 0]])}, "row 1 of the logits .* has NaN"),
        ({"logits": torch.tensor([[0.0, 1], [0, 0], [0, math.inf]])}, r"row 2 of the logits .* has \+inf"),
    ],
)
def test_bad_input(change: dict, words: str) -> None:
    call = {"logits": torch.zeros(3, 4), "keys": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=words):
        sample_tokens(call.pop("logits"), call.pop("keys"), **call)


def test_values_are_not_looked_at_when_validation_is_off() -> None:
    with validation("never"):
        tokens = sample_tokens(torch.tensor([[-math.inf, -math.inf], [0.0, math.nan]]), _keys(2))
    assert bool(((tokens >= 0) & (tokens < 2)).all())


def _bad_shard(rank: int, fault: str) -> None:
    logits, keys = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    if fault == "value" and rank == 1:
        logits[2, 1] = math.nan
    if fault == "shape" and rank == 1:
        keys = keys[:2]
    sample_tokens(logits, keys, group=dist.group.WORLD)


@pytest.mark.parametrize(("fault", "words"), [("value", "row 2 of the logits"), ("shape", "keys must be int64 [3]")])
def test_a_fault_on_one_rank_is_raised_on_all(fault: str, words: str) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(3, _bad_shard, fault)
    assert sorted(caught.value.errors) == [0, 1, 2]
    assert all(text.startswith("ValueError") and words in text for text in caught.value.errors.values())


# ---------------------------------------------------------------- truncated


TRUNCATIONS = ({"top_k": 5}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.8})


@pytest.mark.parametrize("rule", TRUNCATIONS, ids=str)
def test_truncated_draws_follow_the_truncated_softmax(rule: dict) -> None:
    draws, row = 30_000, _logits(1, 12, scale=0.7)
    parts = _keys(draws).chunk(2)  # each too small to be compiled for
    tokens = torch.cat([sample_tokens(row.expand(len(keys), -1), keys, temperature=0.8, **rule) for keys in parts])
    keep = kept_by_sorting(row, temperature=0.8, **rule)
    assert 1 < int(keep.sum()) < 12
    expected = torch.where(keep, row.double() / 0.8, -math.inf).softmax(-1)[0] * draws
    counts = torch.bincount(tokens, minlength=12).double()
    assert not counts[~keep[0]].any()
    assert _chi_square(counts[keep[0]], expected[keep[0]]) < 4.5


def test_a_truncated_draw_is_the_plain_one_where_that_is_kept() -> None:
    logits, keys = _logits(500, 40), _keys(500)
    plain, drawn = sample_tokens(logits, keys), sample_tokens(logits, keys, top_p=0.7)
    inside = kept_by_sorting(logits, top_p=0.7).gather(1, plain[:, None])[:, 0]
    assert torch.equal(plain[inside], drawn[inside]) and not bool((plain == drawn)[~inside].any())
    assert torch.equal(sample_tokens(logits, keys, top_k=1), logits.argmax(1))
    assert torch.equal(sample_tokens(logits, keys, top_k=40, top_p=1.0), plain)


def _draw_truncated(rank: int, split: str, rule: dict) -> tuple[torch.Tensor, bool]:
    logits = _logits(200, 103)
    logits[0], logits[1, ::3] = 0.25, logits[1].max()  # ties over the shards
    part, vocab, start = _shard(logits, rank, split, dist.get_world_size())
    call = {"group": dist.group.WORLD, "vocab_size": vocab, "vocab_start": start, "temperature": 1.3}
    tokens = sample_tokens(part, _keys(200), **call, **rule)
    return tokens, torch.equal(tokens, sample_tokens(logits, _keys(200), temperature=1.3, **rule))


def _truncated_draws(rank: int) -> list[tuple[torch.Tensor, bool]]:
    """Each rule on one split."""
    return [_draw_truncated(rank, *case) for case in zip(SPLITS, TRUNCATIONS, strict=True)]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_draw_the_same_truncated_tokens(size: int) -> None:
    for first, *others in zip(*run_world(size, _truncated_draws), strict=True):
        for tokens, same in (first, *others):
            assert same and torch.equal(tokens, first[0])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"top_k": 5}, "top_k = 5 exceeds vocab_size = 4"),
        ({"top_k": 0}, "top_k = 0 must be"),
        ({"top_k": True}, "top_k = True must be"),
        ({"top_p": True}, "top_p = True must lie"),
        ({"top_p": 0.0}, "top_p = 0.0 must lie"),
        ({"top_p": 1.5}, "top_p = 1.5 must lie"),
        ({"top_k": 2, "temperature": 0.0}, "top_k = 2 and top_p = None have no effect with temperature = 0"),
    ],
)
def test_bad_truncation(rule: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample_tokens(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), **rule)
