"""Rule of a truncated policy: top-k, top-p (nucleus), or the sampler's recorded kept sets."""

from __future__ import annotations

from dataclasses import dataclass


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
