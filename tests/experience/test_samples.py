"""Samples and experience: every field moves, splits, joins, packs and pads with the others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel_rl.experience import Experience, Samples, padded_samples

TOKEN_FIELDS = (
    "generation_logprobs",
    "prev_logprobs",
    "reference_policy_logprobs",
    "values",
    "kl",
    "advantages",
    "returns",
)


def experience(sizes: list[tuple[int, int]], seed: int = 0) -> Experience:
    """Every field set; (prompt, response) lengths as told."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, 50, (p + r,), generator=generator).tolist() for p, r in sizes]
    base = padded_samples(
        [row[:p] for row, (p, _) in zip(tokens, sizes, strict=True)],
        [row[p:] for row, (p, _) in zip(tokens, sizes, strict=True)],
    )
    n = len(sizes)
    valid = base.attention_mask
    wide = {name: torch.where(valid, torch.rand(valid.shape, generator=generator), 0.0) for name in TOKEN_FIELDS}
    names = tuple(f"s{seed}.{i}" for i in range(n))
    return dataclasses.replace(
        Experience.of(base),
        **wide,
        truncated=torch.arange(n) % 2 == 0,
        group_ids=torch.arange(n) // 2,
        sample_ids=torch.arange(n) + 100 * seed,
        prompts=names,
        completions=names,
        answers=names,
        rewards=torch.rand(n, generator=generator),
        sample_mask=torch.ones(n),
        info={"reward": torch.rand(n, generator=generator), "kl": torch.rand(n, generator=generator)},
    )


def same(a: Samples, b: Samples) -> None:
    for spec in dataclasses.fields(a):
        mine, other = getattr(a, spec.name), getattr(b, spec.name)
        assert mine is not None, f"{spec.name} is not covered"
        if isinstance(mine, Mapping):
            assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)
        elif isinstance(mine, Tensor):
            assert torch.equal(mine, other), spec.name
        else:
            assert mine == other, spec.name


SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, size=st.integers(1, 7), seed=st.integers(0, 99))
def test_split_join_pack_and_pad_are_inverse(sizes: list[tuple[int, int]], size: int, seed: int) -> None:
    whole = experience(sizes, seed)
    same(Experience.concat(whole.split(size)), whole)
    packed = whole.pack()
    assert packed.packed and packed.input_ids.shape == (1, sum(map(sum, sizes)))
    same(packed.pad(), whole)
    same(Experience.concat(packed.split(size)), packed)
    bounds = packed.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == packed.input_ids.shape[1] and packed.attention_mask.all()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        assert torch.equal(packed.values[0, start:end], whole.values[i, : end - start])  # type: ignore[index]
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    same(packed.select(order).pad(), whole.select(order.tolist()) if max(map(sum, sizes)) else whole)
    assert packed.pack() is packed and whole.pad() is whole


def test_parts_of_different_width() -> None:
    short, long = experience([(1, 1), (1, 2)], 1), experience([(2, 4)], 2)
    joined = Experience.concat([short, long])
    assert joined.input_ids.shape == (3, 6) and joined.lengths.tolist() == [2, 3, 6]
    assert joined.prompts == ("s1.0", "s1.1", "s2.0") and joined.info is not None and joined.info["kl"].shape == (3,)
    assert not joined.advantages[:2, 3:].any()  # type: ignore[index]
    assert torch.equal(joined.token_mask.sum(1), torch.tensor([1, 2, 4]))


@pytest.mark.parametrize("packed", [False, True])
def test_everything_moves(packed: bool) -> None:  # Q59 of the specification: two fields stayed behind
    whole = experience([(2, 3), (1, 4)])
    whole = whole.pack() if packed else whole
    moved = whole.to_device("meta")
    count = 0
    for _, _, value in moved._items():
        if isinstance(value, Tensor):
            assert value.device.type == "meta"
            count += 1
    assert count == 3 + len(TOKEN_FIELDS) + 3 + 2 + 2
    assert moved.prompts == whole.prompts and moved.packed == packed


def test_pinned_memory() -> None:
    whole = experience([(2, 3)])
    pinned = whole.pin_memory()
    if torch.accelerator.is_available():
        assert all(value.is_pinned() for _, _, value in pinned._items() if isinstance(value, Tensor))
    same(pinned, whole)


def test_what_the_losses_take() -> None:
    whole = experience([(2, 3), (1, 4)])
    data = whole.data()
    assert set(data) == {
        *("input_ids", "token_mask", "sample_mask", "lengths", "rewards", "group_ids", "sample_ids", "truncated"),
        *TOKEN_FIELDS,
    }
    bare = Experience.of(padded_samples([[1]], [[2, 3]])).data()
    assert set(bare) == {"input_ids", "token_mask", "sample_mask", "lengths"} and bare["sample_mask"].tolist() == [1]
    with pytest.raises(ValueError, match=r"call pad\(\) first"):
        whole.pack().data()


def test_samples_from_lists() -> None:
    found = padded_samples([[5, 6], [7]], [[8], [9, 10, 11]], logprobs=[[-1.0], [-2.0, -3.0, -4.0]], pad=99)
    assert found.input_ids.tolist() == [[5, 6, 8, 99], [7, 9, 10, 11]]
    assert found.token_mask.tolist() == [[False, False, True, False], [False, True, True, True]]
    assert found.generation_logprobs is not None
    assert found.generation_logprobs.tolist() == [[0, 0, -1, 0], [0, -2, -3, -4]]
    assert found.lengths.tolist() == [3, 4] and found.cu_seqlens.tolist() == [0, 3, 7]
    assert padded_samples([], []).input_ids.shape == (0, 0)
    with pytest.raises(ValueError, match="1 prompts and 0 responses"):
        padded_samples([[1]], [])
    with pytest.raises(ValueError, match="logprobs must be one number per token"):
        padded_samples([[1]], [[2]], logprobs=[[]])
    masked = padded_samples([[1], [1]], [[2, 3], [2]], masks=[[1, 0], None])
    assert masked.token_mask.tolist() == [[False, True, False], [False, True, False]]
    with pytest.raises(ValueError, match="masks must be one number per token"):
        padded_samples([[1]], [[2]], masks=[[1, 0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([5, 9])}, r"lengths \[5, 9\] do not fit input_ids \[2, 5\]"),
        ({"lengths": torch.tensor([5])}, r"input_ids must be \[1, S\], one row a length, got \[2, 5\]"),
        ({"token_mask": torch.ones(2, 4)}, r"token_mask must be \[2, 5\], got \[2, 4\]"),
        ({"values": torch.ones(2)}, r"values must be \[2, 5\], got \[2\]"),
        ({"rewards": torch.ones(3)}, r"rewards must be \[2\], got \[3\]"),
        ({"info": {"kl": torch.ones(1)}}, r"kl must be \[2\], got \[1\]"),
        ({"prompts": ("a",)}, r"prompts must be \[2\], got \[1\]"),
        ({"input_ids": torch.ones(5)}, r"input_ids must be \[N, S\] or packed \[1, T\]"),
        ({"packed": True}, r"input_ids must be \[1, T\] when packed, got \[2, 5\]"),
    ],
)
def test_fields_that_do_not_fit(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experience([(2, 3), (1, 4)]), **change)


def test_parts_that_lack_a_field_are_filled() -> None:
    whole = experience([(2, 3), (1, 4)])
    filled = Experience.concat([dataclasses.replace(whole, kl=None), whole], fill=True)
    assert filled.kl is not None and not filled.kl[:2].any() and torch.equal(filled.kl[2:], whole.kl)  # type: ignore[arg-type]
    for parts in ([whole, dataclasses.replace(whole, prompts=None)], [dataclasses.replace(whole, prompts=None), whole]):
        with pytest.raises(ValueError, match="some parts have prompts and some lack it"):
            Experience.concat(parts, fill=True)


def test_parts_that_do_not_fit() -> None:
    whole = experience([(2, 3), (1, 4)])
    with pytest.raises(ValueError, match="all of them padded or all packed"):
        Experience.concat([whole, whole.pack()])
    with pytest.raises(ValueError, match="at least one part"):
        Experience.concat([])
    with pytest.raises(ValueError, match="some parts have kl and some lack it"):
        Experience.concat([whole, dataclasses.replace(whole, kl=None)])
    with pytest.raises(ValueError, match="the parts differ in the names of info"):
        Experience.concat([whole, dataclasses.replace(whole, info={})])
    with pytest.raises(ValueError, match="size = 0 must be at least 1"):
        whole.split(0)
    with pytest.raises(ValueError, match=rf"size = \[1\] adds up to 1, and there are {len(whole)} sequences"):
        whole.split([1])
    with pytest.raises(ValueError, match="do not fit"):
        dataclasses.replace(whole.pack(), lengths=torch.tensor([1, 2]))
