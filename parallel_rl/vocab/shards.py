"""This rank's columns of the vocabulary, and how they are read: temperature, truncation, padding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from parallel_rl.agreement import communication_device
from parallel_rl.groups import all_gather, group_rank, group_size
from parallel_rl.validation import get_validation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from parallel_rl.vocab.backends.choice import Backend


@dataclass(frozen=True)
class Truncation:
    """Tokens that a row keeps; by default all. The order is temperature, top-k, top-p, as in samplers.

    >>> bool(Truncation()), bool(Truncation(top_k=50))
    (False, True)

    Attributes:
        top_k: the k largest logits, and ties with the k-th.
        top_p: of these the largest that together hold the fraction p: a token stays if all larger ones hold less than p.
        kept_sets: the sampler's recorded ids of each token, and the token itself.

    Raises:
        ValueError: k < 1, p outside (0, 1], kept sets combined with top_k or top_p.
    """

    top_k: int | None = None
    top_p: float | None = None
    kept_sets: bool = False

    def __post_init__(self) -> None:
        if self.top_k is not None and (not _is(int, self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k = {self.top_k!r} must be an integer >= 1; None keeps all")
        if self.top_p is not None and (not _is((int, float), self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p = {self.top_p!r} must lie in (0, 1]; None keeps all")
        if self.kept_sets and (self.top_k, self.top_p) != (None, None):
            raise ValueError(
                f"kept_sets = True replays what the sampler kept: top_k = {self.top_k} and top_p = {self.top_p} would "
                "have no effect; give one or the other"
            )

    def __bool__(self) -> bool:
        return self.kept_sets or (self.top_k, self.top_p) != (None, None)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError for k > V."""
        if self.top_k is not None and self.top_k > vocab_size:
            raise ValueError(f"top_k = {self.top_k} exceeds vocab_size = {vocab_size}; None keeps all")


KEEP_ALL = Truncation()


def _is(kind: type | tuple[type, ...], value: object) -> bool:
    """isinstance, except for True, which is a 1 in Python: it would keep one token, or all."""
    return isinstance(value, kind) and not isinstance(value, bool)


_SPANS: WeakKeyDictionary[ProcessGroup, set[int]] = WeakKeyDictionary()  # vocabulary sizes whose shards fit together


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the vocabulary, and how they are read.

    >>> VocabShard.of(4, vocab_size=3, temperature=0.7).valid  # the last of the four columns is padding
    3

    Attributes:
        start: global id of the first column.
        valid: number of real columns; later ones are padding, outside every softmax and with gradient 0.
        vocab_size: true size V, over all shards.
        group: tensor-parallel group; None is one shard.
        temperature: of softmax(z / temperature): a positive number, or [...] one for each token.
        entropy: compute the entropy.
        sum_pi_squared: compute Σπ² with the entropy.
        logit_scale: s of softmax(s·z / temperature), for a head whose logits are scaled.
        truncation: the ids that each row keeps.
        consume_logits: the backward writes the gradient over the logits.
        backend: of the passes over the logits, see `token_stats`.

    Raises:
        ValueError: a temperature or logit_scale that is not positive and finite; k > V; sum_pi_squared without entropy.
    """

    start: int
    valid: int
    vocab_size: int
    group: ProcessGroup | None = None
    temperature: float | Tensor = 1.0
    entropy: bool = False
    truncation: Truncation = KEEP_ALL
    consume_logits: bool = False
    backend: Backend = "auto"
    sum_pi_squared: bool = False
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        check_logit_scale(self.logit_scale)
        if not isinstance(self.temperature, torch.Tensor) and not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature} must be positive and finite")
        if self.sum_pi_squared and not self.entropy:
            raise ValueError("sum_pi_squared = True needs the entropy; set entropy = True")
        self.truncation.check(self.vocab_size)

    @classmethod
    def of(
        cls,
        width: int,
        group: ProcessGroup | None = None,
        vocab_size: int | None = None,
        vocab_start: int | None = None,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        truncation: Truncation = KEEP_ALL,
        consume_logits: bool = False,
        backend: Backend = "auto",
        sum_pi_squared: bool = False,
        logit_scale: float = 1.0,
    ) -> VocabShard:
        """Find the shard of `width` columns that this rank holds, on the host and without communication.

        Even shards, padded or not (`width · tp >= vocab_size`, Megatron), start at `rank · width`. Narrower ones follow
        `torch.chunk` (DTensor): `ceil(vocab_size / tp)` columns a rank, the last ranks fewer or none. Other splits need
        `vocab_start`.

        Args:
            vocab_size: true size V; None: no padding, even shards.

        Raises:
            ValueError: a width that fits neither rule, `vocab_size` < 1, `vocab_start` outside [0, vocab_size]; errors of the
                class.
        """
        start, valid, size = _span(width, group, vocab_size, vocab_start)
        return cls(
            start, valid, size, group, temperature, entropy, truncation, consume_logits, backend, sum_pi_squared, logit_scale
        )  # fmt: skip

    def at(self, rows: slice | Tensor) -> VocabShard:
        """Restrict to some rows, with their temperatures."""
        per_token = isinstance(self.temperature, torch.Tensor) and self.temperature.dim() > 0
        return replace(self, temperature=self.temperature[rows]) if per_token else self  # type: ignore[index]

    @property
    def temperature_of_rows(self) -> float | Tensor:
        """Return the temperature, as a column if each row has its own."""
        return self.temperature[:, None] if isinstance(self.temperature, torch.Tensor) else self.temperature

    def inverse_temperature(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return logit_scale / temperature: [1, 1], or [T, 1] per token."""
        if isinstance(self.temperature, torch.Tensor):
            inverse = self.temperature.to(dtype).reciprocal().reshape(-1, 1)
            return inverse if self.logit_scale == 1 else inverse * self.logit_scale
        return torch.full((1, 1), self.logit_scale / self.temperature, dtype=dtype, device=device)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return each id's column of this shard (0 if it is elsewhere), and whether it is here."""
        columns = ids.to(torch.int64) - self.start
        here = (columns >= 0) & (columns < self.valid)
        return torch.where(here, columns, 0), here


def check_spans(
    group: ProcessGroup | None, width: int, vocab_size: int | None, vocab_start: int | None, like: Tensor
) -> None:
    """Refuse shards with `vocab_start` that overlap or leave a hole; ValueError on all ranks of the group.

    The group's first call with this vocabulary size costs one all-gather of two integers and a copy to the host; others, mode
    "never" and calls without `vocab_start` cost nothing. All ranks of the group call it, with or without `vocab_start`.
    """
    if vocab_start is None or get_validation() == "never" or torch.compiler.is_compiling():
        return
    known = _SPANS.setdefault(group, set()) if group is not None else set()
    if vocab_size in known:
        return
    start, valid, size = _span(width, group, vocab_size, vocab_start)
    spans = all_gather(torch.tensor([start, valid], device=communication_device(group, like.device)), group).tolist()
    end = 0
    for first, count in sorted(span for span in spans if span[1]):
        if first != end:
            break
        end += count
    if end != size or any(first + count > end for first, count in spans):
        listed = ", ".join(f"[{first}, {first + count})" for first, count in spans)
        raise ValueError(
            f"vocab_start: the columns of the tensor ranks are {listed}; they must be [0, vocab_size = {size}) without a hole "
            "and without overlap"
        )
    known.add(size)


def check_logit_scale(scale: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"logit_scale = {scale} must be positive and finite; 1 leaves the logits as they are")


def _span(
    width: int, group: ProcessGroup | None, vocab_size: int | None, vocab_start: int | None
) -> tuple[int, int, int]:
    """Return (first column's id, real columns, V), see `VocabShard.of`."""
    tp, rank = group_size(group), group_rank(group)
    if vocab_size is None:
        if vocab_start is not None:
            raise ValueError(
                f"vocab_start = {vocab_start} needs vocab_size, the true number of columns over all shards"
            )
        if width < 1:
            raise ValueError(
                f"the logits have no column on tensor rank {rank} of {tp}, so the shards are not even; give vocab_size, the "
                "true number of columns"
            )
        return rank * width, width, tp * width
    if vocab_size < 1:
        raise ValueError(f"vocab_size = {vocab_size} must be at least 1")
    if vocab_start is not None:
        if not 0 <= vocab_start <= vocab_size:
            raise ValueError(f"vocab_start = {vocab_start} must lie in [0, vocab_size = {vocab_size}]")
        start = vocab_start
    elif width * tp >= vocab_size:
        start = rank * width
    else:
        chunk = -(-vocab_size // tp)
        start = min(rank * chunk, vocab_size)
        if width != min(chunk, vocab_size - start):
            raise ValueError(
                f"the logits' last dimension is {width} on tensor rank {rank} of {tp}, but vocab_size = {vocab_size} splits "
                f"into {chunk} columns a rank ({min(chunk, vocab_size - start)} here); give vocab_start for another split"
            )
    return start, max(0, min(width, vocab_size - start)), vocab_size
