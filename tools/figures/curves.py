"""Loss and gradient of each surrogate over the ratio, by calling the loss on one token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from parallel_rl import PolicyLossFn
from parallel_rl.functional.surrogate import Surrogate
from parallel_rl.validation import validation
from tools.figures.svg import Drawing

RATIOS = [0.02 * step for step in range(15, 101)]  # 0.3 to 2
OLD = 0.4  # probability of the token under the old policy
SIGNS = ((1.0, "#1d6fd1"), (-1.0, "#c2571a"))
WIDTH, HEIGHT, TOP = 300, 150, 40


def drawn() -> list[str]:
    """List the surrogates that one token can show: those without statistics of the whole step."""
    return [name for name in Surrogate.variants if not _loss(name).needs_statistics]


def file_of(folder: Path, name: str) -> Path:
    return folder / f"surrogate_{name}.svg"


def curves(name: str, advantage: float) -> tuple[list[float], list[float]]:
    """Return the loss of a token and its gradient with respect to log π, for each of RATIOS."""
    loss_fn, losses, gradients = _loss(name), [], []
    old = torch.full((1, 1), OLD, dtype=torch.float64).log()
    fixed = {"response_mask": torch.ones(1, 1), "advantages": torch.full((1, 1), advantage), "prev_logprobs": old}
    data = fixed | {"generation_logprobs": old, "sample_ids": torch.zeros(1, dtype=torch.int64)}
    for ratio in RATIOS:
        logprobs = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
        with validation("never"):  # half the time of a call on one token
            loss, _ = loss_fn.from_logprobs(logprobs, data=data, global_valid_seqs=1, global_valid_toks=1)
        loss.backward()
        assert logprobs.grad is not None
        losses.append(loss.item())
        gradients.append(logprobs.grad.item())
    return losses, gradients


def drawing(name: str) -> Drawing:
    """Draw both curves for A = 1 and A = −1."""
    found = Drawing(2 * WIDTH + 120, HEIGHT + 80, f"Loss and gradient of the surrogate {name} over the ratio")
    pairs = [curves(name, advantage) for advantage, _ in SIGNS]
    for panel, title in enumerate(("loss of the token", "gradient with respect to log π")):
        x = 50 + panel * (WIDTH + 56)
        found.text(x, 24, title, bold=True)
        _panel(found, x, [pair[panel] for pair in pairs])
    for place, (advantage, colour) in enumerate(SIGNS):
        found.line([(500 + 90 * place, HEIGHT + 66), (520 + 90 * place, HEIGHT + 66)], colour)
        found.text(525 + 90 * place, HEIGHT + 70, f"A = {'+' if advantage > 0 else '−'}1")
    return found


def _panel(drawing: Drawing, x: float, lines: Sequence[Sequence[float]]) -> None:
    low, high = min(map(min, lines)), max(map(max, lines))
    room = 0.08 * (high - low) or 1.0
    low, high = low - room, high + room

    def point(ratio: float, value: float) -> tuple[float, float]:
        across = (ratio - RATIOS[0]) / (RATIOS[-1] - RATIOS[0])
        return x + across * WIDTH, TOP + (high - value) / (high - low) * HEIGHT

    for ratio in (0.5, 1.0, 1.5, 2.0):
        at = point(ratio, low)[0]
        drawing.line([(at, TOP), (at, TOP + HEIGHT)], "#d5dae0")
        drawing.text(at, TOP + HEIGHT + 16, f"{ratio:g}", anchor="middle")
    if low < 0 < high:
        drawing.line([point(RATIOS[0], 0), point(RATIOS[-1], 0)], "#9aa5b1")
    for value in (low + room, high - room):
        drawing.text(x - 6, point(1, value)[1] + 4, f"{value:.2g}".replace("-", "−"), anchor="end")
    for (_, colour), values in zip(SIGNS, lines, strict=True):
        drawing.line([point(ratio, value) for ratio, value in zip(RATIOS, values, strict=True)], colour)


def _loss(name: str) -> PolicyLossFn:
    return PolicyLossFn({"surrogate": {"name": name}})


def files(folder: Path) -> dict[Path, partial[Drawing]]:
    """Return each surrogate's drawing by its file."""
    return {file_of(folder, name): partial(drawing, name) for name in drawn()}
