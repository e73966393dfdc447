"""Statistics of a step: histograms, effective sample sizes, means by position, reasons for no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from parallel_rl.functional.kl import kl_estimate
from parallel_rl.losses.policy_metrics import mismatch_values

if TYPE_CHECKING:
    from parallel_rl.explain.read import Step

_OF_RANGE = ("below_range", "above_range")  # outside the clip's range, with or without effect on the gradient
NOT_OWN = "not one of the loss's own tokens, or of weight 0"
NO_GRADIENT, CARRIES = "no gradient for another reason, such as A = 0", "nothing is taken: it carries gradient"
REJECTED, _REJECTION = "rejected, trainer and sampler too far apart by ", "rejection, "  # of each of its rules
_WORDS = {
    "not_kept": "not kept by the sampler's truncation",
    "off_policy_mask": "off-policy mask: the sequence has drifted",
    "entropy_filter": "below the step's entropy threshold",
    "importance_weight_0": "importance weight set to 0",
    "clipped": "held back by the clip",
    "dual_clipped": "held back by the second bound on A < 0",
}


@dataclass(frozen=True, eq=False)
class LogHistogram:
    """Counts [K] of positive numbers in bins with edges [K + 1], equal on a log axis, and outside."""

    edges: np.ndarray
    counts: np.ndarray
    below: int
    above: int


def log_edges(logs: np.ndarray) -> np.ndarray:
    """Choose [61] edges around all exp(logs), symmetric about 1, within a factor of 1000."""
    finite = logs[np.isfinite(logs)]
    reach = min(float(np.abs(finite).max(initial=0.0)) / np.log(10), 3.0)
    reach = max(reach * 1.0001, 1e-3)
    return 10 ** np.linspace(-reach, reach, 61)


def log_histogram(logs: np.ndarray, edges: np.ndarray) -> LogHistogram:
    """Return the histogram of exp(logs)."""
    inner = np.log(edges)
    below, above = int((logs < inner[0]).sum()), int((logs > inner[-1]).sum())
    return LogHistogram(edges, np.histogram(logs, inner)[0], below, above)


def log_ratio(step: Step) -> tuple[np.ndarray, bool] | None:
    """Return [T scored] log ρ at the loss's level and True; log π − log π_prev and False without a ratio."""
    ratio = step.value("ratio")
    if ratio is not None:
        return np.log(np.maximum(ratio[step.scored].astype(np.float64), 1e-300)), True
    if "prev_logprobs" not in step.tokens or "logprobs" not in step.tokens:
        return None
    return _of(step, "logprobs") - _of(step, "prev_logprobs"), False


def log_mismatch(step: Step) -> np.ndarray | None:
    """Return [T scored] log π_prev − log π_generation; 0 for tokens not in the sampling mask."""
    if "generation_logprobs" not in step.tokens or "logprobs" not in step.tokens:
        return None
    generation = _of(step, "generation_logprobs")
    prev = _of(step, "prev_logprobs" if "prev_logprobs" in step.tokens else "logprobs")
    return np.where(np.isneginf(generation), 0.0, prev - np.where(np.isneginf(generation), 0.0, generation))


def mismatch_means(step: Step) -> dict[str, float]:
    """Average over scored tokens the policy losses' own metrics of trainer against sampler."""
    prev = _of(step, "prev_logprobs" if "prev_logprobs" in step.tokens else "logprobs")
    values = mismatch_values(torch.from_numpy(prev), torch.from_numpy(_of(step, "generation_logprobs")))
    names = ("sampling_logp_difference", "gen_kl_error", "policy_kl_error", "chi2_token", "token_mult_prob_error")
    far = ("rollout_is_ratio_fraction_low", "rollout_is_ratio_fraction_high")
    return {name: float(values[name].double().mean()) if len(prev) else 0.0 for name in (*names, *far)}


def effective_size(log_weights: np.ndarray) -> float:
    """Compute the effective sample size (Σω)² / Σω² from log ω."""
    if not len(log_weights):
        return 0.0
    w = np.exp(log_weights - log_weights.max())
    return float(w.sum() ** 2 / (w * w).sum())


def by_sequence(step: Step, of_scored: np.ndarray) -> np.ndarray:
    """Sum [T scored] over each sequence with a scored token."""
    rows = step.row[step.scored]
    sums = np.bincount(rows, of_scored, minlength=len(step.lengths))
    return sums[np.bincount(rows, minlength=len(step.lengths)) > 0]


def positions(step: Step) -> np.ndarray:
    """Number [T scored] the scored tokens of each sequence from 1."""
    rows = step.row[step.scored]
    firsts = np.searchsorted(rows, rows)
    return np.arange(len(rows)) - firsts + 1


def of_position(step: Step) -> dict[str, np.ndarray]:
    """Return [T scored] the quantities that are shown by position, by name."""
    curves: dict[str, np.ndarray] = {}
    if "entropy" in step.tokens:
        curves["entropy"] = _of(step, "entropy")
    kl = step.value("kl")
    if kl is not None:
        curves["KL in the loss"] = kl[step.scored].astype(np.float64)
    elif "reference_policy_logprobs" in step.tokens and "logprobs" in step.tokens:
        logprobs, reference = (torch.from_numpy(_of(step, name)) for name in ("logprobs", "reference_policy_logprobs"))
        curves["KL to the reference (k3)"] = kl_estimate(logprobs, reference, "k3").numpy()
    if "prev_logprobs" in step.tokens and "logprobs" in step.tokens:
        curves["log π_prev − log π"] = _of(step, "prev_logprobs") - _of(step, "logprobs")
    return curves


def position_bins(longest: int) -> np.ndarray:
    """Return the edges of at most 32 bins of equal width over positions 1 to `longest`."""
    width = max(-(-longest // 32), 1)
    return np.arange(1, longest + width + 1, width)


def means_by_position(position: np.ndarray, values: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute [bins] means, NaN for an empty bin, and token counts."""
    place = np.digitize(position, edges) - 1
    counts = np.bincount(place, minlength=len(edges) - 1)
    sums = np.bincount(place, values, minlength=len(edges) - 1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), counts


def clip_by_sign(step: Step) -> list[tuple[str, dict[str, int]]]:
    """Count tokens by the advantage's sign: all, out of range, held back by the clip, by its second bound."""
    advantages = step.tokens["advantages"]
    flags = {
        name: held for name in (*_OF_RANGE, "clipped", "dual_clipped") if (held := held_back(step, name)) is not None
    }
    rows = []
    for sign, there in (("A > 0", advantages > 0), ("A < 0", advantages < 0), ("A = 0", advantages == 0)):
        there = there & step.scored
        rows.append(
            (sign, {"tokens": int(there.sum()), **{name: int((held & there).sum()) for name, held in flags.items()}})
        )
    return rows


@dataclass(frozen=True, eq=False)
class Reason:
    """A reason for no gradient, or less: [T] tokens with this first reason, [T] all that it holds for."""

    words: str
    first: np.ndarray
    every: np.ndarray


def reasons(step: Step) -> list[Reason]:
    """List the reasons in the loss's order, a full gradient last; each token is in `first` of one."""
    tokens, scored = step.tokens, step.scored
    response_tokens, sample = tokens["token_mask"].astype(bool), step.sequences["sample_mask"].astype(bool)[step.row]
    start = np.full(len(step.lengths), np.iinfo(np.int64).max)
    np.minimum.at(start, step.row[response_tokens], step.column[response_tokens])
    response = step.column > start[step.row]
    flags = [name for name in tokens if name.startswith("held/") and not name.endswith(_OF_RANGE)]
    dropped = [name for name in flags if name.endswith("not_kept")]
    rest = np.ones(len(response_tokens), bool)
    causes = [
        ("the first token, which nothing predicts", (step.column == 0) & bool(step.meta["shift"])),
        ("token_mask 0, before the response: the prompt", ~response_tokens & ~response & ~scored),
        ("token_mask 0, after the response's first token", ~response_tokens & response & ~scored),
        ("sample_mask 0: the whole sample is left out", ~sample & ~scored),
        *((_words(name), tokens[name]) for name in dropped),
        (NOT_OWN, ~scored),
        *((_words(name), tokens[name]) for name in flags if name not in dropped),
        (NO_GRADIENT, tokens["gradient"] == 0 if "gradient" in tokens else ~rest),
        (CARRIES, rest),
    ]
    unexplained, rows = rest.copy(), []
    for words, mask in causes:
        first = mask & unexplained
        rows.append(Reason(words, first, first if words in (NOT_OWN, NO_GRADIENT, CARRIES) else mask))
        unexplained &= ~mask
    return rows


def _words(name: str) -> str:
    component, _, reason = name.removeprefix("held/").rpartition("/")
    text = (
        f"{REJECTED}{reason.removeprefix(_REJECTION)}" if reason.startswith(_REJECTION) else _WORDS.get(reason, reason)
    )
    return (f"{component}: " if component else "") + text


def held_back(step: Step, name: str) -> np.ndarray | None:
    masks = [x for key, x in step.tokens.items() if key.startswith("held/") and key.rpartition("/")[2] == name]
    return np.logical_or.reduce(masks) if masks else None


def _of(step: Step, name: str) -> np.ndarray:
    return step.tokens[name][step.scored].astype(np.float64)
