"""Find tokens of wrong weight: fit one factor for each micro-batch and context rank to a gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_rl.testing.whole_step.layouts import ROWS, WIDTH, Rows, StepLayout
from parallel_rl.testing.whole_step.subject import RankResult, part

_RESIDUAL, _PLAIN = 1e-3, 1e-4  # relative


_HOLDERS: Mapping[str, Callable[[TokenPart], object]] = {
    "micro-batch": lambda part: part.micro,
    "micro-batch and context rank": lambda part: (part.micro, part.context),
    "data rank": lambda part: part.data,
    "context rank": lambda part: part.context,
    "data and context rank": lambda part: (part.data, part.context),
}


class TokenPart(NamedTuple):
    """The tokens of one micro-batch on one context rank: a mask [B, S] and the number of loss tokens."""

    micro: int
    context: int
    data: int
    tokens: Tensor
    number: int


class Weighing(NamedTuple):
    """The part with the largest error of weight."""

    factor: float  # of this part
    text: str  # a sentence on all parts
    local: bool  # each part is divided by its own count


def token_parts(rows: Rows, layout: StepLayout) -> list[TokenPart]:
    """Split the loss tokens as the layout does; a token belongs to the position before it, its predictor."""
    position = (torch.arange(WIDTH) - 1).clamp(min=0)
    lengths = rows["lengths"][:, None] if layout.packed else torch.full((ROWS, 1), WIDTH)
    chunk = (position * 2 * layout.cp) // lengths
    rank = torch.minimum(chunk, 2 * layout.cp - 1 - chunk)
    size = ROWS // layout.micro
    parts = []
    for micro in range(layout.micro):
        of_batch = (torch.arange(ROWS) // size == micro)[:, None]
        for context in range(layout.cp):
            tokens = of_batch & (rank == context)
            count = int((rows["token_mask"][:, 1:] * tokens[:, 1:]).sum())
            if count:
                parts.append(TokenPart(micro, context, micro % layout.dp, tokens, count))
    return parts


def weigh(
    parts: Sequence[TokenPart],
    gradients: Sequence[Mapping[str, Tensor]],
    whole: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    names: Sequence[str],
) -> Weighing | None:
    """Explain the gradients `names` of a layout by one factor for each part, if such factors exist.

    `gradients` of the `parts` are of one process and sum to `truth`; `whole` are the layout's, see `joined`.
    """
    columns = torch.stack([_flat(gradient, names) for gradient in gradients], 1)
    right, got = _flat(truth, names), _flat(whole, names)
    if len(right) < 2 * len(parts) or not float((columns.sum(1) - right).norm()) <= _RESIDUAL * float(right.norm()):
        return None  # parts do not add up, such as means in the script's own loss
    factors = torch.linalg.lstsq(columns, got[:, None]).solution[:, 0]
    if not float((columns @ factors - got).norm()) <= _RESIDUAL * float(got.norm()):
        return None
    worst = int((factors.abs().clamp(min=1e-6).log().abs() * 1e6).round().argmax())
    if abs(float(factors[worst]) - 1) <= _PLAIN:
        return None
    total, token_part, factor = (
        sum(token_part.number for token_part in parts),
        parts[worst],
        round(float(factors[worst]), 6),
    )
    number, place = token_part.number, f"micro-batch {token_part.micro}"
    of_micro = [i for i, other in enumerate(parts) if other.micro == token_part.micro]
    others = int(((factors - 1).abs() > _RESIDUAL).sum()) - 1
    if bool((factors[of_micro] - factor).abs().max() <= _RESIDUAL):
        others -= len(of_micro) - 1
        number = sum(parts[i].number for i in of_micro)
    else:
        place += f", context rank {token_part.context}"
    holder = _divided_by(parts, factors.tolist())
    why = ""
    if holder:
        held = sum(other.number for other in parts if _HOLDERS[holder](other) == _HOLDERS[holder](token_part))
        why = f", as if each {holder}'s tokens were divided by their own count (1/{total / (factor * held):.3g} of their sum)"
    elif others > 0:
        why = f", and {others} more part{'s' * (others > 1)} of the step not × 1 either"
    text = f"the {number} of {total} tokens of {place} weigh × {factor:.4g}{why}"
    return Weighing(factor, text, bool(holder))


def _divided_by(parts: Sequence[TokenPart], factors: Sequence[float]) -> str:
    """Name the ranks or micro-batches whose own count divides their tokens, or return ""."""
    for holder, key in _HOLDERS.items():
        counts: dict[object, int] = defaultdict(int)
        for token_part in parts:
            counts[key(token_part)] += token_part.number
        weights = [factor * counts[key(token_part)] for token_part, factor in zip(parts, factors, strict=True)]
        if len(counts) > 1 and max(weights) - min(weights) <= 1e-2:
            return holder
    return ""


def joined(results: Sequence[RankResult], truth: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Assemble the ranks' parts of each gradient whose copies agree."""
    copies: dict[str, list[tuple[object, Tensor]]] = defaultdict(list)
    for result in results:
        for piece in result.pieces:
            if piece.gradient is not None:
                copies[piece.name].append((piece.cut, piece.gradient.double()))
    whole = {}
    for name, pieces in copies.items():
        by_cut: dict[object, Tensor] = {}
        if not all(torch.allclose(by_cut.setdefault(cut, g), g, rtol=1e-6, atol=1e-12) for cut, g in pieces):
            continue
        joined = torch.zeros_like(truth[name], dtype=torch.float64)
        index = torch.arange(joined.numel()).view_as(joined)
        for cut, gradient in by_cut.items():
            places = part(index + 1, cut, gradient.shape)  # type: ignore[arg-type]
            real = places > 0  # padding of the vocabulary is 0
            joined.view(-1)[places[real] - 1] = gradient[real]
        whole[name] = joined
    return whole


def _flat(gradients: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([gradients[name].double().reshape(-1) for name in names])
