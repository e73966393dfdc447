"""The law as a harness: any registered loss, on every layout, against one float64 process that holds everything.

The shards are cut here with lists of positions, not with `SequenceLayout`, so that an error there cannot cancel itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import (
    LossFn,
    Metrics,
    ParallelGroups,
    SequencePackingLossWrapper,
    TokenBatch,
    count_valid,
    get_loss,
    reduce_metrics,
    register_loss,
    register_objective,
)
from parallel_rl.config.yaml_files import read_tree
from parallel_rl.losses import Field, NoConfig, Requirements
from parallel_rl.losses.core.scalar_head import ScalarHeadLoss
from parallel_rl.metrics import Mean, Measure, Metric, MinMax, Sum
from parallel_rl.recipes import loss_of, recipes
from tests import reference, reference_distillation, reference_heads, reference_preference

ROWS, WIDTH, VOCAB = 12, 16, 23
PLACEHOLDER, REWARD_IDS = 21, [19, 2]  # of a process reward model, on different shards
POISON = (math.nan, math.inf, -math.inf)


@register_objective("test_entropy", token_fields=("advantages",), needs_entropy=True, token_separable=True)
def EntropyBonus(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective: policy gradient with an entropy bonus, and metrics of its own."""
    measures = {"sure": Mean(batch.entropy < 1.5), "entropy": MinMax(batch.entropy), "likely": Sum(logprobs > -2)}
    return -batch["advantages"] * logprobs - 0.3 * batch.entropy, measures


@register_objective("test_sequence_token", token_fields=("prev_logprobs",))
def SequenceToken(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """A user's objective: a token term that uses a quantity of the whole sequence, with gradient through both."""
    return batch.expand(batch.segment_mean(logprobs - batch["prev_logprobs"]).exp()) * logprobs.exp()


@register_objective("test_sequence", level="sequence", sequence_fields=("rewards",))
def SequenceLevel(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective on sums of log-probs, with metrics of its own."""
    measures = {"good": Sum(batch.per_sequence("rewards") > 0), "sum": MinMax(logprobs), "likelihood": Mean(logprobs)}
    return (logprobs / 10).exp() * (1 + batch.per_sequence("rewards").square()), measures


@register_objective("test_pair", level="pair", token_fields=("reference_policy_logprobs",))
def PairLevel(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Measure]]:
    """A user's objective on pairs, hinge on the difference of log-probs to the reference's, with metrics of its own."""
    margins = (logprobs - batch.segment_sum(batch["reference_policy_logprobs"])).view(-1, 2)
    better = margins[:, 0] - margins[:, 1]
    return torch.relu(1 - better), {"accuracy": Mean(better > 0), "margin": MinMax(better), "wins": Sum(better > 0)}


@register_loss("test_class")
class UserLoss(LossFn[NoConfig]):
    """A user's class."""

    config_class = NoConfig
    requirements = Requirements(
        (Field("advantages"), Field("rewards", per="sequence")), entropy=True, token_separable=True
    )

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        weights = batch.per_sequence("rewards") / batch.counts.toks
        loss = batch.weighted_sum(batch["advantages"] * batch.logprobs.exp() - batch.entropy, weights)
        return loss, Metrics({"loss": Metric("share", loss)})


@dataclass(frozen=True)
class Case:
    """A loss, its config, and options of its constructor."""

    loss: str
    config: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        given = {**self.config, **self.options}
        return "-".join([self.loss, *(f"{key}={_text(value)}" for key, value in given.items())])

    def build(self, **layout: object) -> LossFn:
        return get_loss(self.loss)(self.config, **self.options, **layout)

    @property
    def truncated(self) -> bool:
        return not {"top_k", "top_p", "kept_sets"}.isdisjoint(self.options)

    def batch(self, seed: int, half_masked: bool, dtype: torch.dtype, shift: float) -> Batch:
        return make_batch(seed, half_masked, self.loss, dtype, shift, truncated=self.truncated)


def _text(value: object) -> str:
    """A config's value, short and without what a test's name must not hold."""
    if isinstance(value, dict):
        return ".".join(f"{key}={_text(item)}" if key != "name" else str(item) for key, item in value.items())
    return ",".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)


_SEQ = {"token_level_loss": False}
_IS = {"use_importance_sampling_correction": True}
_GSPO = {**_SEQ, "sequence_level_importance_ratios": True, "ratio_clip_min": 0.05, "ratio_clip_max": 0.04}


def _tis(kind: str, low: float | None, high: float) -> dict:
    bounds = {"truncated_importance_sampling_ratio": high} | (
        {} if low is None else {"truncated_importance_sampling_ratio_min": low}
    )
    return {**_IS, "truncated_importance_sampling_type": kind, **bounds}


_MIX = {
    "mu": {"peak": 0.3, "valley": 0.2, "decay_steps": 9},
    "policy": {
        "surrogate": {"name": "ppo", "dual_clip": 3.0},
        "aggregation": "seq-mean-token-mean",
        "entropy_filter": 0.7,
    },
    "supervised": {"weighting": "phi"},
}

# One or two of each loss, rich in options: they run on every world and layout, MORE on those of four ranks, the recipes on
# some of these.
CORE = [
    Case("nll"),
    Case("preference"),
    Case("dpo", {"sft_loss_weight": 0.4, "preference_loss_weight": 0.7, "reference_policy_kl_penalty": 0.3}),
    Case("simpo", {"label_smoothing": 0.1}),
    Case("cpo", {"sft_loss_weight": 0.5, "sft_average_log_probs": True}),
    Case("orpo"),
    Case("kto", {"desirable_weight": 1.3, "undesirable_weight": 0.8}),
    Case("prm", {"placeholder_token_id": PLACEHOLDER, "reward_token_ids": REWARD_IDS}),
    Case("value", {"cliprange": 0.3, "scale": 0.4}),
    Case("clipped_pg", {**_GSPO, **_tis("tis", 0.7, 1.3)}),
    Case("clipped_pg", {"positive_example_nll_weight": 0.3}),
    Case(
        "policy",
        {
            "surrogate": {"name": "clip_cov", "fraction": 0.1, "low": -0.2},
            "entropy_filter": 0.6,
            "entropy_bonus": 0.1,
            "off_policy_mask": {"delta": 0.02},
        },
    ),
    Case(
        "policy",
        {
            "surrogate": "gmpo",
            "aggregation": "seq-mean-token-mean",
            "rejection": {
                "rules": [
                    {"statistic": "k1", "low": 0.7, "high": 1.4},
                    {"statistic": "k3", "high": 0.2, "level": "sequence-max"},
                ],
                "denominator": "kept",
            },
            "kl": {"coefficient": 2.0, "gradient": "old", "weight_clamp": 1.1},
        },
    ),
    Case("full_distillation", {"divergence": {"name": "jsd", "beta": 0.3}, "teacher_temperature": 1.3}),
    Case("distillation", {"zero_outside_topk": True, "mixed_kl_weight": 0.9, "aggregation": "seq-mean-token-mean"}),
    Case("mix", _MIX),
    Case("test_entropy"),
    Case("test_sequence_token", {"aggregation": "constant-length", "max_length": 40}),
    Case("test_sequence"),
    Case("test_pair"),
    Case("test_class"),
]
MORE = [
    Case("nll", {"weighting": "phi", "cutoff_prob": 0.3, "aggregation": "seq-mean-token-mean"}),
    Case("nll", {"weighting": "probability"}),
    Case("full_distillation", {"divergence": "reverse_kl", "aggregation": "seq-mean-token-sum"}),
    Case("distillation", {"kl_type": "reverse", "topk_alignment": "predictor"}),
    Case("distillation", {"bucket_tail": True}),
    Case("nll"),
    Case("preference"),
    Case("dpo"),
    Case("dpo", {"sft_loss_weight": 0.4, "preference_loss_weight": 0.7, "reference_policy_kl_penalty": 0.3}),
    Case("dpo", {"preference_average_log_probs": True, "sft_loss_weight": 0.4, "sft_average_log_probs": True}),
    Case("dpo", {"reference_logprobs_alignment": "predictor"}),
    Case("dpo", {"kind": "robust", "label_smoothing": 0.1, "length_desensitization": 0.3}),
    Case("preference", {"margin": 0.2, "pair_margins": True}),
    Case("kto", {"baseline": "opposite-class"}),
    Case("prm", {"placeholder_token_id": PLACEHOLDER}),
    Case("value", {"head_position": "token", "aggregation": "seq-mean-token-mean"}),
    Case("clipped_pg"),
    Case(
        "clipped_pg",
        {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "ratio_clip_c": 1.5, "reference_policy_kl_penalty": 0.0},
    ),
    Case(
        "clipped_pg",
        {**_SEQ, "reference_policy_kl_type": "k2", "kl_input_clamp_value": None, "kl_output_clamp_value": None},
    ),
    Case("clipped_pg", {"disable_ppo_ratio": True, "reference_policy_kl_type": "k1"}),
    Case("clipped_pg", {"force_on_policy_ratio": True, **_IS}),
    Case(
        "clipped_pg", {"reference_policy_kl_penalty": 1.0, "kl_input_clamp_value": 0.15, "kl_output_clamp_value": 0.01}
    ),
    Case("clipped_pg", {"reference_policy_kl_penalty": 0.5, "use_on_policy_kl_approximation": True}),
    Case("clipped_pg", {"use_kl_in_reward": True, **_IS, **_SEQ}),
    Case("clipped_pg", _tis("tis", None, 1.1)),
    Case("clipped_pg", _tis("tis", 0.9, 1.1)),
    Case("clipped_pg", _tis("icepop", 0.8, 1.2)),
    Case("clipped_pg", _tis("seq-mask-tis", 0.97, 1.05)),
    Case("clipped_pg", _GSPO),
    Case("clipped_pg", {**_GSPO, **_tis("tis", 0.7, 1.3)}),
    Case("clipped_pg", {**_GSPO, **_tis("icepop", 0.5, 2.0), "reference_policy_kl_penalty": 0.2}),
    Case("clipped_pg", {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.1}),
    Case("clipped_pg", {**_GSPO, "force_on_policy_ratio": True, **_IS, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2}),
    Case("test_entropy"),
    Case("test_entropy", {"aggregation": "seq-mean-token-mean"}),
    Case("test_sequence_token", {"aggregation": "seq-mean-token-sum"}),
    Case("test_sequence_token", {"aggregation": "constant-length", "max_length": 40}),
    Case("test_sequence"),
    Case("policy", {"surrogate": {"name": "kl_cov", "fraction": 0.2}, "positive_nll_weight": 0.2}),
    Case("policy", {"surrogate": "vespo", "importance": {"mode": "tis", "high": 1.1, "normalize": True}}),
    Case("policy", {"surrogate": {"name": "topr"}, "ratio_level": "sequence-sum", "aggregation": "seq-mean-token-sum"}),
    Case("policy", {"ratio_level": "sequence-mean", "ratio_gradient": "token", "log_ratio_clamp": 0.1}),
    Case("policy", {"surrogate": {"name": "rec", "clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"}}),
    Case(
        "policy",
        {"surrogate": "reinforce", "kl": {"coefficient": 0.3, "gradient": "straight-through", "against": "prev"}},
    ),
]
MORE = [case for case in MORE if case not in CORE]
# a policy that is truncated as its sampler was
TRUNCATED = [
    Case("clipped_pg", {"reference_policy_kl_penalty": 0.3}, {"top_k": 13}),
    Case("clipped_pg", _GSPO, {"top_k": 15, "top_p": 0.95, "temperature": 1.2}),
    Case("clipped_pg", {**_SEQ, **_tis("icepop", 0.5, 2.0)}, {"kept_sets": True}),
    Case("policy", {"entropy_filter": 0.6, "entropy_bonus": 0.1}, {"top_p": 0.9, "temperature": 0.8}),
]


def recipe_cases() -> list[Case]:
    """The loss of every recipe, with the options of its file."""
    found: list[Case] = []
    for path in recipes().values():
        choice = loss_of(read_tree(path))
        assert isinstance(choice, dict)
        options = dict(choice.get("options") or {})
        if "placeholder_token_id" in options:  # its ids are those of another vocabulary
            options |= {"placeholder_token_id": PLACEHOLDER, "reward_token_ids": REWARD_IDS}
        found += [case for case in [Case(choice["name"], options)] if case not in (*CORE, *MORE, *found)]
    return found


RECIPES = recipe_cases()
CASES = [*CORE, *MORE, *RECIPES]


class Batch(NamedTuple):
    logits: Tensor  # [ROWS, WIDTH, VOCAB], [ROWS, WIDTH, 1] for a scalar head
    data: dict[str, Tensor]
    lengths: list[int]


def has_scalar_head(loss: str) -> bool:
    """Whether the loss reads one output a position instead of logits."""
    return issubclass(get_loss(loss), ScalarHeadLoss)


def make_batch(
    seed: int, half_masked: bool, loss: str, dtype: torch.dtype, shift: float = 0.0, *, truncated: bool = False
) -> Batch:
    """Ragged rows, among them: an empty token mask, rows and one whole micro-batch without sample_mask; every value valid.

    `truncated`: with kept sets, and tokens that an earlier policy did not keep.
    """
    scalar = has_scalar_head(loss)
    g = torch.Generator().manual_seed(seed)
    kind = torch.promote_types(dtype, torch.float32)
    lengths = [2, 16, 5, 9, 7, 7, 13, 4, 16, 3, 11, 8]
    logits = torch.randn(ROWS, WIDTH, 1 if scalar else VOCAB, generator=g, dtype=torch.float64) * 1.5
    logits += shift * torch.randint(0, 2, (ROWS, WIDTH, 1), generator=g).mul(2).sub(1)
    logits = logits.to(dtype).double()
    ids = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=g)
    ids[:, 2::4] = PLACEHOLDER
    ids[1, :8] = torch.arange(0, VOCAB, 3)  # targets on every shard
    token_mask = torch.rand(ROWS, WIDTH, generator=g) < 0.8
    token_mask &= torch.arange(WIDTH) < torch.tensor(lengths)[:, None]
    token_mask[:, 1] = True  # never two empty rows by chance
    token_mask[3] = False
    sample_mask = torch.ones(ROWS)
    sample_mask[4:6] = 0  # at 2 data ranks x 3 micro-batches, all of one of them
    sample_mask[10:12] = 0
    if half_masked:
        sample_mask[6:] = 0  # all of data rank 1
    base = logits.roll(1, 1)[..., 0] if scalar else reference.logprobs_and_entropy(logits, ids)[0]

    def near(scale: float) -> Tensor:
        return (base + scale * torch.randn(ROWS, WIDTH, generator=g).double()).to(kind).double()

    data = {
        "input_ids": ids,
        "token_mask": token_mask.to(torch.int64),
        "sample_mask": sample_mask,
        "advantages": (torch.randn(ROWS, WIDTH, generator=g).double() + 0.4).to(kind).double(),
        "prev_logprobs": near(0.2),
        "generation_logprobs": near(0.25),
        "reference_policy_logprobs": near(0.3),
        "rewards": torch.randn(ROWS, generator=g).double().to(kind).double(),
        "sample_ids": torch.randperm(1000, generator=g)[:ROWS],
        "returns": near(0.5),
        "values": near(0.4),
        "preference_labels": torch.tensor([1, 1, 0, 1, 1, -1, 0, 1, 1, -1, -1, 0]).double(),
        "preference_margins": torch.rand(ROWS, generator=g).to(kind).double(),
        "reward_labels": torch.tensor([*REWARD_IDS, -100])[torch.randint(0, 3, (ROWS, WIDTH), generator=g)],
    }
    teacher = (torch.randn(ROWS, WIDTH, VOCAB, generator=g) * 1.5).to(kind).double()
    best = teacher.roll(1, 1).topk(4, -1)
    data |= {
        "teacher_logits": teacher,
        "teacher_topk_logits": best.values,
        "teacher_topk_indices": best.indices,
        "teacher_logsumexp": teacher.roll(1, 1).logsumexp(-1).to(kind).double(),
        "expert_mask": torch.tensor([0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0]).bool(),
    }
    if truncated:
        kept = torch.rand(ROWS, WIDTH, VOCAB, generator=g).argsort(-1)[..., :7]
        data["kept_ids"] = torch.where(torch.rand(kept.shape, generator=g) < 0.8, kept, -1)
        for name in ("prev_logprobs", "generation_logprobs"):
            data[name][torch.rand(ROWS, WIDTH, generator=g) < 0.05] = -math.inf
    return Batch(logits, data, lengths)


_REFERENCES: dict[str, Callable] = {
    "nll": reference.nll,
    "preference": reference_heads.preference,
    "value": reference_heads.value,
    "prm": reference_heads.prm,
    "dpo": reference_preference.dpo,
    "simpo": reference_preference.simpo,
    "cpo": reference_preference.cpo,
    "orpo": reference_preference.orpo,
    "kto": reference_preference.kto,
    "clipped_pg": reference.clipped_pg,
    "distillation": reference_distillation.distillation,
    "full_distillation": reference_distillation.full_distillation,
}


class Expected(NamedTuple):
    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def alone(case: Case, logits: Tensor, data: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
    """The loss on one process that holds everything."""
    loss_fn, counts = case.build(), count_valid(data)
    statistics = loss_fn.collect(logits, data, *counts).reduce() if loss_fn.needs_statistics else None
    return loss_fn(logits, data, *counts, statistics=statistics)


def expected(case: Case, batch: Batch) -> Expected:
    """The dense reference where there is one, else the loss itself in one float64 process."""
    logits = batch.logits.clone().requires_grad_()
    if case.loss in _REFERENCES and not case.options:
        loss, metrics = _REFERENCES[case.loss](logits, batch.data, case.config)
    else:
        loss, parts = alone(case, logits, batch.data)
        metrics = {name: value.item() for name, value in reduce_metrics([parts]).items()}
    loss.backward()
    assert logits.grad is not None
    return Expected(loss.item(), logits.grad, metrics)


class Layout(NamedTuple):
    tp: int
    cp: int
    dp: int
    packing: str  # padded, packed, packed+padding
    micro_batches: int
    cp_layout: str

    @property
    def name(self) -> str:
        return f"tp{self.tp}.cp{self.cp}.dp{self.dp}.{self.packing}.mb{self.micro_batches}.{self.cp_layout}"


# Of the layouts of a world: those that come first where a run takes only some. The first two have every dimension, every
# step of the packing and several micro-batches; the first six each value of each setting beside most of the others'.
_FIRST = {
    4: (
        "tp2.cp2.dp1.packed+padding.mb3.zigzag",
        "tp2.cp1.dp2.padded.mb3.zigzag",
        "tp1.cp2.dp2.packed.mb3.contiguous",
        "tp4.cp1.dp1.packed+padding.mb1.zigzag",
        "tp2.cp2.dp1.packed.mb1.contiguous",
        "tp1.cp2.dp2.padded.mb1.zigzag",
    ),
    8: ("tp2.cp2.dp2.packed+padding.mb3.zigzag", "tp4.cp2.dp1.packed.mb3.contiguous", "tp4.cp1.dp2.padded.mb3.zigzag"),
}


def layouts(world: int, number: int | None = None) -> list[Layout]:
    """TP {1, 2, 4} x CP {1, 2} x DP {1, 2} of this many ranks x packing x {1, 3} micro-batches: all, or the first `number`."""
    grids = [(tp, cp, dp) for tp in (1, 2, 4) for cp in (1, 2) for dp in (1, 2) if tp * cp * dp == world]
    found = [
        Layout(*grid, packing, micro_batches, cp_layout)
        for grid in grids
        for packing in ("padded", "packed", "packed+padding")
        for micro_batches in (1, 3)
        for cp_layout in (("zigzag", "contiguous") if grid[1] > 1 else ("zigzag",))
    ]
    first = _FIRST.get(world, ())
    found.sort(key=lambda layout: first.index(layout.name) if layout.name in first else len(first))
    return found[:number]


def make_groups(rank: int, world: int, tp: int, cp: int) -> tuple[ParallelGroups, tuple[int, int, int]]:
    """Tensor ranks are neighbours, then context, then data; returns the groups and this rank's (tp, cp, dp) place."""
    place = (rank % tp, rank // tp % cp, rank // (tp * cp))
    ranks = torch.arange(world).view(-1, cp, tp)

    def group_of(lists: Tensor) -> dist.ProcessGroup | None:
        mine = None
        for members in lists.tolist():
            group = dist.new_group(members) if len(members) > 1 else None
            mine = group if rank in members else mine
        return mine

    return ParallelGroups(
        tensor=group_of(ranks.reshape(-1, tp)),
        context=group_of(ranks.transpose(1, 2).reshape(-1, cp)),
        data=group_of(ranks.permute(1, 2, 0).reshape(cp * tp, -1)),
        data_context=group_of(ranks.permute(2, 0, 1).reshape(tp, -1)),
    ), place


def _cut(length: int, cp: int, rank: int, cp_layout: str) -> list[int]:
    if cp == 1:
        return list(range(length))
    if cp_layout == "contiguous":
        return list(range(rank * length // cp, (rank + 1) * length // cp))
    chunk = length // (2 * cp)
    first, last = rank, 2 * cp - 1 - rank
    return [*range(first * chunk, (first + 1) * chunk), *range(last * chunk, (last + 1) * chunk)]


class Piece(NamedTuple):
    """One micro-batch on one rank: where each local position comes from ((row, column), None for padding), and cu_seqlens."""

    rows: list[int]
    places: list[tuple[int, int] | None]
    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None

    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, columns, and whether there is one, of each local position."""
        pairs = torch.tensor([(-1, 0) if at is None else at for at in self.places])
        return pairs[:, 0].clamp(min=0), pairs[:, 1], pairs[:, 0] >= 0


def cut_rows(rows: list[int], lengths: list[int], layout: Layout, cp_rank: int) -> Piece:
    if layout.packing == "padded":
        cut = _cut(WIDTH, layout.cp, cp_rank, layout.cp_layout)
        return Piece(rows, [(row, column) for row in rows for column in cut], None, None)
    room = [-(-lengths[row] // 4) * 4 for row in rows]
    true = room if layout.packing == "packed" else [lengths[row] for row in rows]
    if layout.packing == "packed+padding":
        room[-1] += 8  # the row's alignment padding lies in the last sequence
    whole = [[(row, t) if t < WIDTH else None for t in range(size)] for row, size in zip(rows, room, strict=True)]
    if layout.cp_layout == "zigzag":
        places = [sequence[t] for sequence in whole for t in _cut(len(sequence), layout.cp, cp_rank, "zigzag")]
    else:
        flat = [place for sequence in whole for place in sequence]
        places = [flat[t] for t in _cut(len(flat), layout.cp, cp_rank, "contiguous")]
    sums = [torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (true, room)]
    return Piece(rows, places, sums[0], None if layout.packing == "packed" else sums[1])


def local_names(loss_fn: LossFn) -> list[str]:
    """The fields that only this rank has, in the order of the logits."""
    return [field.name for field in loss_fn.requirements.fields if field.per == "local"]


def poisoned(data: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """NaN, inf and wild ids wherever no loss is carried."""
    loss_fn = case.build()
    bad = {name: value.clone() for name, value in data.items()}
    masked = (data["token_mask"] == 0) | (data["sample_mask"] == 0)[:, None]
    masked[:, 0] |= loss_fn.requirements.shift
    wild = torch.where(torch.arange(int(masked.sum())) % 2 == 0, -7, 10**6)
    poison = torch.tensor(POISON).repeat(ROWS * WIDTH)[: len(wild)]
    for name, value in bad.items():
        there = masked.roll(-1, 1) if loss_fn.requirements.field(name).alignment == "predictor" else masked
        if name in ("input_ids", "reward_labels", "teacher_topk_indices", "kept_ids"):
            value[there] = wild.view(-1, *[1] * (value.dim() - 2)).expand_as(value[there])
        elif value.dim() >= 2 and value.is_floating_point() and name not in local_names(loss_fn):
            value[there] = poison.view(-1, *[1] * (value.dim() - 2)).expand_as(value[there]).to(value.dtype)
    for name in ("rewards", "preference_labels", "preference_margins"):
        bad[name][data["sample_mask"] == 0] = math.nan
    return bad


class Outcome(NamedTuple):
    share: float
    metrics: dict[str, float]
    squared_error: float  # of this rank's piece of the gradient
    stray: str  # a gradient where none may be
    place: tuple[int, int, int]


def run_layout(
    layout: Layout,
    case: Case,
    batch: Batch,
    want: Expected,
    groups: ParallelGroups,
    place: tuple[int, int, int],
    dtype: torch.dtype,
) -> Outcome:
    """One optimizer step's loss on this rank, with every masked place poisoned."""
    tp_rank, cp_rank, dp_rank = place
    scalar = batch.logits.shape[-1] == 1
    loss_fn, columns = _sharded_loss(case, layout, tp_rank, scalar, consume=layout.micro_batches > 1)
    dirty = poisoned(batch.data, case)
    kind = torch.promote_types(dtype, torch.float32)  # data is never in low precision
    data = {name: value.to(kind) if value.dtype == torch.float64 else value for name, value in dirty.items()}
    mine = list(range(ROWS))[dp_rank * ROWS // layout.dp : (dp_rank + 1) * ROWS // layout.dp]
    size = len(mine) // layout.micro_batches
    pieces = [cut_rows(mine[i : i + size], batch.lengths, layout, cp_rank) for i in range(0, len(mine), size)]
    datas = [
        {name: value[piece.rows] for name, value in data.items() if name not in local_names(loss_fn)}
        for piece in pieces
    ]
    counts = count_valid(datas, groups.data)
    carries = _carries_loss(batch.data, case)
    arguments, leaves, losses = [], [], []
    for piece, local in zip(pieces, datas, strict=True):
        leaf = _local_logits(batch.logits, piece, columns, carries).to(dtype).requires_grad_()
        shape = (len(piece.rows), -1) if piece.cu_seqlens is None else (1, -1)
        leaves.append(leaf)
        for name in local_names(loss_fn):  # it comes in the order and on the shard of the logits
            local[name] = _local_logits(data[name], piece, columns, carries).view(*shape, len(columns))
        head = (leaf * 1.0).view(*shape, leaf.shape[-1])
        arguments.append((head, local, *counts, groups.tp_rank, groups.tensor, groups.context))
        losses.append(
            loss_fn
            if piece.cu_seqlens is None
            else SequencePackingLossWrapper(loss_fn, piece.cu_seqlens, piece.cu_seqlens_padded)
        )
    extra = {}
    if loss_fn.needs_statistics:
        parts = [fn.collect(*call) for fn, call in zip(losses, arguments, strict=True)]
        extra["statistics"] = sum(parts[1:], parts[0]).reduce(groups)
    share, metrics, squared, stray = 0.0, [], 0.0, ""
    for fn, call, leaf, piece in zip(losses, arguments, leaves, pieces, strict=True):
        loss, parts = fn(*call, **extra)
        loss.backward()
        share += loss.item()
        metrics.append(parts)
        assert leaf.grad is not None
        truth = _local_logits(want.gradient, piece, columns, carries, poison=False)
        squared += (leaf.grad.double() - truth).square().sum().item()
        if bool((leaf.grad[truth == 0] != 0).any()):
            stray = f"{layout.name}: a masked place or a padding column has a gradient"
    reduced = {name: value.item() for name, value in reduce_metrics(metrics, groups).items()}
    return Outcome(share, reduced, squared, stray, place)


def _sharded_loss(
    case: Case, layout: Layout, tp_rank: int, scalar: bool, consume: bool
) -> tuple[LossFn, list[int | None]]:
    """The loss and the global column of each local one (None: padding)."""
    if scalar:
        return case.build(cp_layout=layout.cp_layout), [0]
    if layout.packing == "packed":  # torch.chunk's uneven shards
        chunk = -(-VOCAB // layout.tp)
        columns: list[int | None] = list(range(tp_rank * chunk, min((tp_rank + 1) * chunk, VOCAB)))
    else:  # even shards; with tp 4 the last one is nothing but padding
        width = {1: 24, 2: 12, 4: 8}[layout.tp] if layout.packing == "padded" else -(-(VOCAB + 5) // layout.tp)
        columns = [c if c < VOCAB else None for c in range(tp_rank * width, (tp_rank + 1) * width)]
    return case.build(vocab_size=VOCAB, cp_layout=layout.cp_layout, consume_logits=consume), columns


def _carries_loss(data: dict[str, Tensor], case: Case) -> Tensor:
    """[ROWS, WIDTH] whether the model's output at this position matters to the loss."""
    mask = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    if case.loss == "prm":
        return mask & (data["input_ids"] == PLACEHOLDER) & (data["reward_labels"] != -100)
    if case.config.get("head_position") == "token":
        return mask
    if case.loss == "preference":
        last = torch.where(mask, torch.arange(WIDTH), -1).amax(1)
        return mask & (torch.arange(WIDTH) == last[:, None])
    return torch.cat([mask[:, 1:], torch.zeros(ROWS, 1, dtype=torch.bool)], 1)


def _local_logits(
    whole: Tensor, piece: Piece, columns: list[int | None], carries: Tensor, poison: bool = True
) -> Tensor:
    """[T_local, width] of a [ROWS, WIDTH, V] tensor; NaN and inf at masked places, wild numbers in padding columns."""
    real = [c for c in columns if c is not None]
    rows, places, there = piece.index()
    there = there & carries[rows, places]
    out = whole.new_full((len(piece.places), len(columns)), 1e4 if poison else 0.0)
    if poison:
        out[:] = torch.where(there[:, None], out, torch.tensor(POISON).repeat(len(out))[: len(out), None].to(whole))
    out[:, : len(real)] = torch.where(there[:, None], whole[rows, places][:, real], out[:, : len(real)])
    return out


def check_world(
    rank: int, of_world: list[Layout], given: list[tuple[Case, Batch, Expected]], dtype: torch.dtype
) -> list[tuple[str, str, Outcome]]:
    """(case, layout, outcome), for every case on every one of these layouts."""
    world = dist.get_world_size()
    outcomes = []
    groups_of: dict[tuple[int, int], tuple] = {}
    for layout in of_world:
        key = (layout.tp, layout.cp)
        if key not in groups_of:
            groups_of[key] = make_groups(rank, world, layout.tp, layout.cp)
        for case, batch, want in given:
            outcomes.append((case.name, layout.name, run_layout(layout, case, batch, want, *groups_of[key], dtype)))
    return outcomes


def errors(case: Case, want: Expected, outcomes: list[Outcome]) -> tuple[float, float]:
    """Relative errors of the loss and of the gradient's norm, from every rank's outcome of one layout."""
    first = [outcome for outcome in outcomes if outcome.place[0] == 0]
    # a scalar head is whole on every tensor rank, so each holds the whole gradient
    copies = len(outcomes) // len(first) if has_scalar_head(case.loss) else 1
    gradient = math.sqrt(sum(outcome.squared_error for outcome in outcomes) / copies) / want.gradient.norm().item()
    return abs(sum(outcome.share for outcome in first) - want.loss) / abs(want.loss), gradient


def dense_error(case: Case, batch: Batch, want: Expected, dtype: torch.dtype) -> tuple[float, float]:
    """The same for plain PyTorch on whole low-precision logits: float32 mathematics, a gradient rounded to `dtype`."""
    logits = batch.logits.to(dtype).requires_grad_()
    data = {name: value.float() if value.dtype == torch.float64 else value for name, value in batch.data.items()}
    if case.loss in _REFERENCES and not case.options:
        loss, _ = _REFERENCES[case.loss](logits.float(), data, case.config)
    else:
        loss, _ = alone(case, logits.float(), data)
    loss.backward()
    assert logits.grad is not None
    gradient = (logits.grad.double() - want.gradient).norm() / want.gradient.norm()
    return abs(loss.item() - want.loss) / abs(want.loss), gradient.item()


def faults(case: Case, want: Expected, of_layout: dict[str, list[Outcome]], tolerance: float) -> list[str]:
    """What breaks the law, over all layouts of a world; empty when nothing does."""
    wrong = []
    for layout, outcomes in of_layout.items():
        wrong += [outcome.stray for outcome in outcomes if outcome.stray]
        first = [outcome for outcome in outcomes if outcome.place[0] == 0]
        for outcome in outcomes:
            twin = next(other for other in first if other.place[1:] == outcome.place[1:])
            if (outcome.share, outcome.metrics) != (twin.share, twin.metrics):
                wrong.append(f"{layout}: tensor ranks differ: {outcome.share} and {twin.share}")
        loss, gradient = errors(case, want, outcomes)
        if not loss <= tolerance:
            wrong.append(f"{layout}: loss off by {loss:.1e}")
        if not gradient <= tolerance:
            wrong.append(f"{layout}: gradient off by {gradient:.1e}")
        if set(outcomes[0].metrics) != set(want.metrics):
            wrong.append(f"{layout}: metrics {sorted(outcomes[0].metrics)} instead of {sorted(want.metrics)}")
        for name, value in want.metrics.items():
            got = outcomes[0].metrics.get(name, math.nan)
            if not (got == value or abs(got - value) <= tolerance * max(abs(value), 1e-2)):
                wrong.append(f"{layout}: {name} {got} instead of {value}")
    return wrong
