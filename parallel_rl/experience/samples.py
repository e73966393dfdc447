"""Samples and experience: N sequences whose fields move, split, join, pack and pad together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SamplesT = TypeVar("SamplesT", bound="Samples")

_TOKEN = {"per": "token"}
_SAMPLE = {"per": "sample"}
_EITHER = {"per": "token or sample"}  # by the number of dimensions


@dataclass(frozen=True, eq=False)
class Samples:
    """N sequences of prompt and response, token-aligned: right-padded [N, S], or packed [1, T].

    Attributes:
        input_ids: [N, S] or [1, T].
        token_mask: [N, S] or [1, T] bool: the response tokens that the policy sampled.
        lengths: [N] tokens of prompt and response; T is their sum.
        packed: which of the two layouts.
        generation_logprobs: as `input_ids`: the sampler's log-prob of each sampled token.
        truncated: [N] bool: the response was cut off, without end token.
        group_ids: [N] the prompt of each sample, unique in the step over all ranks.
        sample_ids: [N] names of the samples over the whole run.
        prompts, completions, answers: N texts each, for rewards.
        others: more fields by name, each [N] or as `input_ids`.

    Raises:
        ValueError: fields whose shapes do not match.
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
    others: Mapping[str, Tensor] = field(default_factory=dict, metadata=_EITHER)

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
            actual = list(value.shape[:2]) if per == "token" and isinstance(value, Tensor) else [len(value)]
            wanted = shape if per == "token" else [count]
            if actual != wanted:
                raise ValueError(f"{name} must be {wanted}, got {actual}")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor:
        """Return [N + 1] int32 bounds of the packed sequences."""
        return torch.nn.functional.pad(self.lengths.cumsum(0).to(torch.int32), (1, 0))

    @property
    def attention_mask(self) -> Tensor:
        """Return [N, S] or [1, T] bool: everything but padding."""
        if self.packed:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device) < self.lengths[:, None]

    @property
    def response_lengths(self) -> Tensor:
        """Return [N] sampled tokens of each padded sequence."""
        return self.token_mask.bool().sum(1)

    def responses(self) -> list[list[int]]:
        """Return the sampled token ids of each padded sequence."""
        return [ids[mask].tolist() for ids, mask in zip(self.input_ids, self.token_mask.bool(), strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name."""
        fields = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return {**{name: value for name, value in fields.items() if isinstance(value, Tensor)}, **self.others}

    def data(self) -> dict[str, Tensor]:
        """Return the losses' `data`: whole padded tensors by name; ValueError for packed sequences."""
        if self.packed:
            raise ValueError("losses read padded data, also when the logits are packed; call pad() first")
        return {"sample_mask": torch.ones_like(self.lengths), **self.tensors()}

    def with_fields(self: SamplesT, **fields: Tensor) -> SamplesT:
        """Set or replace fields; names other than attributes go to `others`."""
        names = {spec.name for spec in dataclasses.fields(self)}
        others = {**self.others, **{name: fields.pop(name) for name in [*fields] if name not in names}}
        return dataclasses.replace(self, **fields, others=others)  # type: ignore[arg-type]

    def to_device(self: SamplesT, device: torch.device | str, *, non_blocking: bool = False) -> SamplesT:
        """Move every tensor to `device`."""
        return self._rebuild(lambda per, x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self: SamplesT) -> SamplesT:
        """Pin host tensors for copies that do not block; unchanged without an accelerator."""
        if not torch.accelerator.is_available():
            return self
        return self._rebuild(lambda per, x: x.pin_memory() if x.device.type == "cpu" else x)

    def select(self: SamplesT, rows: Sequence[int] | Tensor) -> SamplesT:
        """Return the sequences at these indices, in this order."""
        picked = torch.as_tensor(rows, device=self.lengths.device, dtype=torch.int64)

        def take(per: str, x: Tensor) -> Tensor:
            if per == "sample" or not self.packed:
                return x.index_select(0, picked.to(x.device))
            parts = x[0].split(self.lengths.tolist())
            return torch.cat([parts[row] for row in picked.tolist()] or [x[0, :0]])[None]

        return self._rebuild(take, picked.tolist())

    def split(self: SamplesT, size: int | Sequence[int]) -> list[SamplesT]:
        """Split in order into parts of `size` sequences, or by sizes; ValueError if they do not add up."""
        if isinstance(size, int):
            if size < 1:
                raise ValueError(f"size = {size} must be at least 1")
            size = [min(size, len(self) - first) for first in range(0, len(self), size)]
        if (ends := [0, *itertools.accumulate(size)])[-1] != len(self):
            raise ValueError(f"size = {list(size)} adds up to {ends[-1]}, and there are {len(self)} sequences")
        return [self.select(range(*bounds)) for bounds in itertools.pairwise(ends)]

    @classmethod
    def concat(cls: type[SamplesT], parts: Sequence[SamplesT], *, fill: bool = False) -> SamplesT:
        """Join all sequences of the parts, in order, padded ones to the widest.

        Args:
            fill: use 0 where a part lacks a tensor.

        Raises:
            ValueError: no part, padded and packed parts, or, unless `fill`, a field that some parts lack.
        """
        if not parts or len({part.packed for part in parts}) > 1:
            raise ValueError("concat needs at least one part, all of them padded or all packed")
        joined: dict[str, object] = {}
        for spec in dataclasses.fields(cls):
            values, per = [getattr(part, spec.name) for part in parts], spec.metadata.get("per")
            if per is None or all(value is None for value in values):
                joined[spec.name] = values[0]
            elif any(isinstance(value, Mapping) for value in values):
                names = list(dict.fromkeys(name for value in values for name in value or ()))
                if not fill and any(set(value or ()) != set(names) for value in values):
                    raise ValueError(f"the parts differ in the names of {spec.name}")
                columns = {name: [(value or {}).get(name) for value in values] for name in names}
                joined[spec.name] = {name: _join(parts, column, per) for name, column in columns.items()}
            elif any(value is None for value in values) and not (fill and any(isinstance(x, Tensor) for x in values)):
                raise ValueError(f"some parts have {spec.name} and some lack it")
            else:
                joined[spec.name] = sum(values, ()) if isinstance(values[0], tuple) else _join(parts, values, per)
        return cls(**joined)  # type: ignore[arg-type]

    def pack(self: SamplesT) -> SamplesT:
        """Pack the sequences into [1, T], without padding; packed ones unchanged."""
        if self.packed:
            return self
        keep = self.attention_mask
        return self._rebuild(lambda per, x: x[keep.to(x.device)][None] if per == "token" else x, packed=True)

    def pad(self: SamplesT) -> SamplesT:
        """Pad the sequences to [N, S] on the right with 0; padded ones unchanged."""
        if not self.packed:
            return self
        sizes = self.lengths.tolist()

        def spread(per: str, x: Tensor) -> Tensor:
            if per == "sample":
                return x
            return pad_sequence(list(x[0].split(sizes)), batch_first=True) if sizes else x[:0]

        return self._rebuild(spread, packed=False)

    def _items(self) -> list[tuple[str, str, Tensor | tuple[str, ...]]]:
        """List (name, "token" or "sample", value) of each field that is set, with mappings expanded."""
        items = []
        for spec in dataclasses.fields(self):
            value, per = getattr(self, spec.name), spec.metadata.get("per")
            if per is not None and value is not None:
                opened = value.items() if isinstance(value, Mapping) else [(spec.name, value)]
                items += [(name, _unit(per, part), part) for name, part in opened]
        return items

    def _rebuild(
        self: SamplesT, change: Callable[[str, Tensor], Tensor], rows: list[int] | None = None, **others: bool
    ) -> SamplesT:
        """Apply `change` to every tensor, and select the texts of `rows`."""
        fields: dict[str, object] = {}
        for spec in dataclasses.fields(self):
            value, per = getattr(self, spec.name), spec.metadata.get("per", "")
            if isinstance(value, Tensor):
                value = change(per, value)
            elif isinstance(value, Mapping):
                value = {key: change(_unit(per, part), part) for key, part in value.items()}
            elif isinstance(value, tuple) and rows is not None:
                value = tuple(value[row] for row in rows)
            fields[spec.name] = value
        return type(self)(**{**fields, **others})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Experience(Samples):
    """Samples with the fields of a loss.

    Attributes:
        prev_logprobs, reference_policy_logprobs: as `input_ids`, of the policy at the step's start and of the frozen one.
        values: as `input_ids`: `values[:, t]` is the critic's value before token t.
        kl: as `input_ids`: the estimate of the KL to the reference.
        advantages, returns: as `input_ids`.
        rewards: [N] shaped.
        sample_mask: [N] bool: the samples to train on.
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
        """Make experience of samples, all to train on, with no other field set."""
        fields = {spec.name: getattr(samples, spec.name) for spec in dataclasses.fields(Samples)}
        return cls(**fields, sample_mask=torch.ones_like(samples.lengths, dtype=torch.bool))


def padded_samples(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    logprobs: Sequence[Sequence[float]] | None = None,
    masks: Sequence[Sequence[int] | None] | None = None,
    pad: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Samples:
    """Make `Samples` from token lists: prompt, response, then `pad` up to the widest.

    >>> samples = padded_samples([[5, 6], [7]], [[8], [9, 10, 11]])
    >>> samples.input_ids.tolist(), samples.token_mask.sum(1).tolist()
    ([[5, 6, 8, 0], [7, 9, 10, 11]], [1, 3])

    Args:
        prompts, responses: N token lists each.
        logprobs: the sampler's log-prob of each response token.
        masks: of each response, 0 for tokens that the policy did not sample; None: it sampled all.
        pad: the token id of the padding.
        dtype: of the log-probs.

    Raises:
        ValueError: lists of different lengths.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses; their numbers must be equal")
    for name, values in (("logprobs", logprobs), ("masks", masks)):
        if values is not None and any(
            x is not None and len(x) != len(r) for x, r in zip(values, responses, strict=True)
        ):
            raise ValueError(f"{name} must be one number per token of the responses")
    lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], dtype=torch.int64)
    shape = len(prompts), int(lengths.max()) if len(prompts) else 0
    ids, mask, scores = torch.full(shape, pad), torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=dtype)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *response], dtype=torch.int64)
        said, kept = slice(len(prompt), len(prompt) + len(response)), None if masks is None else masks[row]
        mask[row, said] = True if kept is None else torch.tensor(kept, dtype=torch.bool)
        if logprobs is not None:
            scores[row, said] = torch.tensor(logprobs[row], dtype=dtype)
    return Samples(ids, mask, lengths, generation_logprobs=None if logprobs is None else scores)


def _unit(per: str, value: object) -> str:
    if per != _EITHER["per"]:
        return per
    return "token" if isinstance(value, Tensor) and value.dim() > 1 else "sample"


def _join(parts: Sequence[Samples], values: Sequence[Tensor | None], per: str) -> Tensor:
    like = next(value for value in values if value is not None)
    token = _unit(per, like) == "token"
    shapes = [(*part.input_ids.shape, *like.shape[2:]) if token else (len(part), *like.shape[1:]) for part in parts]
    filled = [like.new_zeros(shape) if x is None else x for x, shape in zip(values, shapes, strict=True)]
    if token and not parts[0].packed:
        width = max(part.input_ids.shape[1] for part in parts)
        filled = [torch.cat([x, x.new_zeros(len(x), width - x.shape[1], *x.shape[2:])], 1) for x in filled]
    return torch.cat(filled, 1 if token and parts[0].packed else 0)
