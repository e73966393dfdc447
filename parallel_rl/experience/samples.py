"""What was sampled, and what was made of it: N sequences whose fields travel, split, join, pack and pad together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SamplesT = TypeVar("SamplesT", bound="Samples")

_TOKEN = {"per": "token"}
_SAMPLE = {"per": "sample"}


@dataclass(frozen=True, eq=False)
class Samples:
    """N sequences of prompt and response, token-aligned: padded behind to [N, S], or packed one after the other as [1, T].

    Attributes:
        input_ids: [N, S] or [1, T].
        token_mask: [N, S] or [1, T] bool: the tokens of the response that the policy sampled.
        lengths: [N] tokens of prompt and response; T is their sum.
        packed: which of the two layouts.
        generation_logprobs: as `input_ids`: what the sampler said of each token.
        truncated: [N] bool: the response was cut off, it has no end token.
        group_ids: [N] the prompt that a sample belongs to, the same for no other prompt of the step on any rank.
        sample_ids: [N] names of the samples over the whole run.
        prompts, completions, answers: N texts each, for rewards.

    Raises:
        ValueError: fields that do not fit each other.
    """

    input_ids: Tensor = field(metadata=_TOKEN)
    token_mask: Tensor = field(metadata=_TOKEN)
    lengths: Tensor = field(metadata=_SAMPLE)
    packed: bool = False
    generation_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)
    truncated: Tensor | None = field(default=None, metadata=_SAMPLE)
    group_ids: Tensor | None = field(default=None, metadata=_SAMPLE)
    sample_ids: Tensor | None = field(default=None, metadata=_SAMPLE)
    prompts: tuple[str, ...] | None = field(default=None, metadata=_SAMPLE)
    completions: tuple[str, ...] | None = field(default=None, metadata=_SAMPLE)
    answers: tuple[str, ...] | None = field(default=None, metadata=_SAMPLE)

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.lengths.dim() != 1:
            shapes = f"{list(self.input_ids.shape)} and {list(self.lengths.shape)}"
            raise ValueError(f"input_ids must be [N, S] or packed [1, T] and lengths [N], got {shapes}")
        shape, count = list(self.input_ids.shape), len(self)
        if shape[0] != (1 if self.packed else count):
            expected = "[1, T] when packed" if self.packed else f"[{count}, S], one row a length"
            raise ValueError(f"input_ids must be {expected}, got {shape}")
        if self.lengths.device.type == "cpu":
            total, longest = int(self.lengths.sum()), int(self.lengths.max()) if count else 0
            if (total != shape[1]) if self.packed else (longest > shape[1]):
                raise ValueError(f"lengths {self.lengths.tolist()} do not fit input_ids {shape}")
        for name, per, value in self._items():
            found = list(value.shape[:2]) if per == "token" and isinstance(value, Tensor) else [len(value)]
            expected_shape = shape if per == "token" else [count]
            if found != expected_shape:
                raise ValueError(f"{name} must be {expected_shape}, got {found}")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        """[N + 1] int32: where each sequence begins when packed, and where the last ends."""
        zero = torch.zeros(1, dtype=torch.int32, device=self.lengths.device)
        return torch.cat([zero, self.lengths.cumsum(0).to(torch.int32)])

    @property
    def attention_mask(self) -> Tensor:
        """[N, S] or [1, T] bool: what is not padding."""
        if self.packed:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device) < self.lengths[:, None]

    def to_device(self: SamplesT, device: torch.device | str, *, non_blocking: bool = False) -> SamplesT:
        """Every tensor on `device`."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self: SamplesT) -> SamplesT:
        """Every tensor of the host in pinned memory, for copies that do not block; as it is where there is no accelerator."""
        if not torch.accelerator.is_available():
            return self
        return self._map(lambda x: x.pin_memory() if x.device.type == "cpu" else x)

    def select(self: SamplesT, rows: Sequence[int] | Tensor) -> SamplesT:
        """The sequences with these numbers, in this order."""
        picked = torch.as_tensor(rows, device=self.lengths.device, dtype=torch.int64)
        if not self.packed:
            return self._rebuild(lambda per, x: x.index_select(0, picked.to(x.device)), picked.tolist())
        sizes = self.lengths.tolist()

        def take(per: str, x: Tensor) -> Tensor:
            if per == "sample":
                return x.index_select(0, picked.to(x.device))
            parts = x[0].split(sizes)
            return torch.cat([parts[row] for row in picked.tolist()] or [x[0, :0]])[None]

        return self._rebuild(take, picked.tolist())

    def split(self: SamplesT, size: int) -> list[SamplesT]:
        """In order, `size` sequences each; the last may have fewer.

        Raises:
            ValueError: `size` below 1.
        """
        if size < 1:
            raise ValueError(f"size = {size} must be at least 1")
        return [self.select(range(first, min(first + size, len(self)))) for first in range(0, len(self), size)]

    @classmethod
    def concat(cls: type[SamplesT], parts: Sequence[SamplesT]) -> SamplesT:
        """All sequences of the parts, in order; padded ones to the widest.

        Raises:
            ValueError: no part, padded and packed parts, or a field that some parts have and some lack.
        """
        if not parts or len({part.packed for part in parts}) > 1:
            raise ValueError("concat needs at least one part, all of them padded or all packed")
        width = max(part.input_ids.shape[1] for part in parts)
        joined: dict[str, object] = {}
        for spec in dataclasses.fields(cls):
            values = [getattr(part, spec.name) for part in parts]
            per = spec.metadata.get("per")
            if len({value is None for value in values}) > 1:
                raise ValueError(f"some parts have {spec.name} and some lack it")
            if per is None or values[0] is None:
                joined[spec.name] = values[0]
            elif isinstance(values[0], Mapping):
                if any(set(value) != set(values[0]) for value in values):
                    raise ValueError(f"the parts differ in the names of {spec.name}")
                joined[spec.name] = {key: torch.cat([value[key] for value in values]) for key in values[0]}
            elif isinstance(values[0], tuple):
                joined[spec.name] = sum(values, ())
            elif per == "token" and parts[0].packed:
                joined[spec.name] = torch.cat(values, 1)
            else:
                joined[spec.name] = torch.cat([_widen(x, width) if per == "token" else x for x in values])
        return cls(**joined)  # type: ignore[arg-type]

    def pack(self: SamplesT) -> SamplesT:
        """The same sequences as [1, T], without padding; packed ones as they are."""
        if self.packed:
            return self
        keep = self.attention_mask
        return self._rebuild(lambda per, x: x[keep.to(x.device)][None] if per == "token" else x, None, packed=True)

    def pad(self: SamplesT) -> SamplesT:
        """The same sequences as [N, S], zeros behind; padded ones as they are."""
        if not self.packed:
            return self
        sizes = self.lengths.tolist()

        def spread(per: str, x: Tensor) -> Tensor:
            if per == "sample":
                return x
            return pad_sequence(list(x[0].split(sizes)), batch_first=True) if sizes else x[:0]

        return self._rebuild(spread, None, packed=False)

    def _items(self) -> list[tuple[str, str, Tensor | tuple[str, ...]]]:
        """(name, token or sample, value) of what is there, mappings opened."""
        items = []
        for spec in dataclasses.fields(self):
            value, per = getattr(self, spec.name), spec.metadata.get("per")
            if per is not None and value is not None:
                opened = value.items() if isinstance(value, Mapping) else [(spec.name, value)]
                items += [(name, per, part) for name, part in opened]
        return items

    def _map(self: SamplesT, change: Callable[[Tensor], Tensor]) -> SamplesT:
        return self._rebuild(lambda per, x: change(x), None)

    def _rebuild(
        self: SamplesT, change: Callable[[str, Tensor], Tensor], rows: list[int] | None, **others: bool
    ) -> SamplesT:
        """Every tensor changed, whatever field it is in, and the texts of `rows`."""
        fields: dict[str, object] = {}
        for spec in dataclasses.fields(self):
            value, per = getattr(self, spec.name), spec.metadata.get("per", "")
            if isinstance(value, Tensor):
                value = change(per, value)
            elif isinstance(value, Mapping):
                value = {key: change(per, part) for key, part in value.items()}
            elif isinstance(value, tuple) and rows is not None:
                value = tuple(value[row] for row in rows)
            fields[spec.name] = value
        return type(self)(**{**fields, **others})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Experience(Samples):
    """Samples with what a loss reads of them.

    Attributes:
        prev_logprobs, reference_policy_logprobs: as `input_ids`: of the policy at the start of the step, of the frozen one.
        values: as `input_ids`: `values[:, t]` is the critic's value before token t.
        kl: as `input_ids`: the estimate of the KL to the reference.
        advantages, returns: as `input_ids`.
        rewards: [N] shaped.
        sample_mask: [N] which samples are trained on.
        info: [N] each: raw reward, KL, lengths, ... of each sample, to log.
    """

    prev_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)
    reference_policy_logprobs: Tensor | None = field(default=None, metadata=_TOKEN)
    values: Tensor | None = field(default=None, metadata=_TOKEN)
    kl: Tensor | None = field(default=None, metadata=_TOKEN)
    advantages: Tensor | None = field(default=None, metadata=_TOKEN)
    returns: Tensor | None = field(default=None, metadata=_TOKEN)
    rewards: Tensor | None = field(default=None, metadata=_SAMPLE)
    sample_mask: Tensor | None = field(default=None, metadata=_SAMPLE)
    info: Mapping[str, Tensor] | None = field(default=None, metadata=_SAMPLE)

    @classmethod
    def of(cls, samples: Samples) -> Experience:
        """The samples, with nothing made of them yet."""
        return cls(**{spec.name: getattr(samples, spec.name) for spec in dataclasses.fields(Samples)})

    def data(self) -> dict[str, Tensor]:
        """What the losses take as `data`: the whole padded tensors by name.

        Raises:
            ValueError: the sequences are packed.
        """
        if self.packed:
            raise ValueError("losses read padded data, also when the logits are packed; call pad() first")
        own = {
            spec.name: value
            for spec in dataclasses.fields(self)
            if isinstance(value := getattr(self, spec.name), Tensor)
        }
        return {"sample_mask": torch.ones_like(self.lengths), **own}


def padded_samples(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    logprobs: Sequence[Sequence[float]] | None = None,
    pad: int = 0,
) -> Samples:
    """`Samples` from token lists: prompt, response, then `pad` up to the widest.

    Args:
        prompts, responses: N token lists each.
        logprobs: what the sampler said of each token of the responses.
        pad: the token behind.

    Raises:
        ValueError: lists that are not as many or as long.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses; they must be as many")
    if logprobs is not None and list(map(len, logprobs)) != list(map(len, responses)):
        raise ValueError("logprobs must be one number a token of the responses")
    lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], dtype=torch.int64)
    starts = torch.tensor([len(p) for p in prompts], dtype=torch.int64)
    shape = len(prompts), int(lengths.max()) if len(prompts) else 0
    ids, scores = torch.full(shape, pad), torch.zeros(shape) if logprobs is not None else None
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *response], dtype=torch.int64)
        if scores is not None and logprobs is not None:
            scores[row, starts[row] : lengths[row]] = torch.tensor(logprobs[row])
    column = torch.arange(shape[1])
    mask = (column >= starts[:, None]) & (column < lengths[:, None])
    return Samples(ids, mask, lengths, generation_logprobs=scores)


def _widen(x: Tensor, width: int) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], width - x.shape[1], *x.shape[2:])], 1)
