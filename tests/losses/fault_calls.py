"""A right call of a loss on any layout, and the kinds of changes that spoil it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from parallel_rl import (
    LMHeadInput,
    ParallelGroups,
    SequenceLayout,
    SequencePackingLossWrapper,
    Statistics,
    ValidCounts,
    count_valid,
    get_loss,
    token_logprobs,
    token_scores,
    token_stats,
)
from parallel_rl.losses.value import ScalarHeadLoss
from parallel_rl.metrics import Metrics

B, S, V = 4, 8, 11
FLOATS = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
#: the forms in which a call gets the model's output
Way = Literal["logits", "hidden states", "log-probs", "token_scores"]
#: no faults of log-probs, which have the host's masks, and of `token_scores`, which takes a temperature for each sample
LESS = ("temperatures of tokens", "token_mask missing", "sample_mask missing")
PLACEHOLDER = 4  # of a process reward model
_COUNTS = ("positive_tokens", "steps", "usual_sequences", "usual_tokens", "expert_sequences", "expert_tokens")
_SIDES = [f"{side}_{what}" for side in ("desirable", "undesirable", "mismatched") for what in ("rows", "log_ratio")]
_PARTS = [f"{part}_{what}" for part in ("policy", "observed") for what in ("sequences", "tokens")]
UNITS = {"unit_ids": torch.tensor([0, 3, 8]), "unit_tokens": torch.tensor([9, 9, 9])}
STEP = Statistics(
    {name: torch.tensor(9.0) for name in (*_COUNTS, *_SIDES, *_PARTS)}, records=UNITS
)  # what any loss may ask of a step
LENGTHS = [8, 6, 7, 4]
ROOM = [8, 8, 8, 8]


@dataclass
class Call:
    """The arguments of one call on this rank; a fault changes some of them."""

    loss: str
    config: dict
    options: dict[str, Any]
    logits: Tensor
    data: dict[str, Any]
    counts: ValidCounts
    groups: ParallelGroups
    vocab_rank: int | None
    cu_seqlens: Tensor | None = None
    cu_seqlens_padded: Tensor | None = None
    statistics: Statistics | None = None

    def run(self, way: Way = "logits") -> float:
        """This rank's share; the scores' sum of `token_scores`."""
        if way == "token_scores":
            groups = self.vocab_rank, self.groups.tensor, self.groups.context
            return token_scores(self.logits, self.data, *groups, **self.options).logprobs.sum().item()
        if way == "log-probs":
            return self._on_log_probs()
        output = (
            LMHeadInput(self.logits, torch.eye(V, dtype=self.logits.dtype)) if way == "hidden states" else self.logits
        )
        return self.result(output)[0].item()

    def result(self, output: Tensor | LMHeadInput | None = None) -> tuple[Tensor, Metrics]:
        """The loss and its metrics, of the call's logits or of another form of them."""
        loss_fn = get_loss(self.loss)(self.config, **self.options)
        fn = (
            loss_fn
            if self.cu_seqlens is None
            else SequencePackingLossWrapper(loss_fn, self.cu_seqlens, self.cu_seqlens_padded)
        )
        return fn(
            self.logits if output is None else output, self.data, *self.counts, self.vocab_rank, self.groups.tensor,
            self.groups.context, statistics=self.statistics,
        )  # fmt: skip

    def _on_log_probs(self) -> float:
        """Rows of responses, the first column masked, so that every place is that of the ordinary call."""
        data, mask = dict(self.data), self.data.get("token_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            mask = mask.clone()
            mask[:, 0] = torch.where(mask[:, 0] == 1, 0, mask[:, 0])
        data |= {} if mask is None else {"response_mask": mask}
        data.pop("token_mask", None)
        loss_fn = get_loss(self.loss)(self.config)
        entropy = torch.ones_like(self.log_probs) if loss_fn.requirements.entropy else None
        loss, _ = loss_fn.from_logprobs(
            self.log_probs, data=data, global_valid_seqs=self.counts[0], global_valid_toks=self.counts[1], entropy=entropy,
            statistics=self.statistics,
        )  # fmt: skip
        return loss.item()

    @cached_property
    def log_probs(self) -> Tensor:
        """[B, S] of a right call: read before it is spoiled."""
        return token_logprobs(self.logits, {"input_ids": self.data["input_ids"]}, **self.options)


def make_data() -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    inside = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    data: dict[str, Any] = {
        "input_ids": torch.randint(0, V, (B, S), generator=g),
        "token_mask": inside.to(torch.int64),
        "sample_mask": torch.ones(B),
        "rewards": torch.randn(B, generator=g, dtype=torch.float64),
        "preference_labels": torch.tensor([1, -1, 0, 1], dtype=torch.float64),
        "preference_margins": torch.rand(B, generator=g, dtype=torch.float64),
        "reward_labels": torch.full((B, S), 9),
    }
    data["input_ids"][:, 5] = PLACEHOLDER
    for name in (*FLOATS, "returns", "values"):
        data[name] = -torch.rand(B, S, generator=g, dtype=torch.float64)
    data["teacher_topk_logits"] = torch.randn(B, S, 3, generator=g, dtype=torch.float64)
    data["teacher_topk_indices"] = torch.tensor([9, 0, 4]).expand(B, S, 3)
    data["teacher_logsumexp"] = torch.full((B, S), 3.0, dtype=torch.float64)
    data["expert_mask"] = torch.tensor([True, False, False, True])
    data["group_ids"] = data["run_ids"] = torch.tensor([3, 8, 3, 0])
    data["observation_mask"] = inside & (torch.arange(S) % 3 == 1)
    data["segment_ids"] = torch.arange(S).expand(B, S) // 3
    return data


def make_call(loss: str, config: dict, packed: bool, groups: ParallelGroups) -> Call:
    """Right on every rank: padded vocabulary, zigzag context ranks, ragged rows."""
    scalar, data, cp = issubclass(get_loss(loss), ScalarHeadLoss), make_data(), groups.cp_size
    whole = torch.randn(B, S, 1 if scalar else V, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    true, padded = (torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (LENGTHS, ROOM))
    if packed:
        layout = SequenceLayout.packed(true, padded, seq_len=S, total=sum(ROOM), cp_size=cp, cp_rank=groups.cp_rank)
    else:
        layout = SequenceLayout.padded(B, S, cp_size=cp, cp_rank=groups.cp_rank)
    local = whole[layout.sequence_ids, layout.positions]
    if not scalar:
        width = -(-V // groups.tp_size)
        local = torch.nn.functional.pad(local, (0, width * groups.tp_size - V))
        local = local[:, groups.tp_rank * width : (groups.tp_rank + 1) * width]
    options = {} if scalar else {"vocab_size": V}
    call = Call(
        loss, dict(config), options, local.reshape(*layout.local_shape, -1).contiguous(), data, count_valid(data),
        groups, groups.tp_rank,
    )  # fmt: skip
    call.data["teacher_logits"] = call.logits * 0.7  # shaped and sharded like the student's
    if packed:
        call.cu_seqlens, call.cu_seqlens_padded = true, padded
    if get_loss(loss)(config).needs_statistics:
        call.statistics = STEP
    return call


@dataclass(frozen=True)
class Spoil:
    """What changes a call, and the names of the arguments or fields that it changes."""

    names: frozenset[str]
    change: Callable[[Call], object]

    def __call__(self, call: Call) -> object:
        return self.change(call)


@dataclass(frozen=True)
class Fault:
    name: str
    message: str  # a pattern
    spoil: Callable[[Call], object] = field(compare=False)
    loss: str = "clipped_pg"
    config: dict = field(default_factory=dict)
    packed: bool = False
    by_value: bool = False  # only a look at the values can tell
    needs_context: bool = False  # with one context rank it is right

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def ways(self) -> list[Way]:
        """The ways of calling, beside the ordinary one, that get what is spoiled and must refuse it in the same words."""
        needs = get_loss(self.loss)(self.config).requirements
        if self.packed or self.needs_context or not isinstance(self.spoil, Spoil) or needs.reads != "log-probs":
            return []
        names, ways = self.spoil.names, list[Way]()
        if "logits" not in names:
            ways.append("hidden states")
        in_rows = all(field.alignment == "token" for field in needs.fields)
        if self.name in LESS:
            return ways
        if not names & {"logits", "options", "input_ids"} and in_rows:
            ways.append("log-probs")
        if names <= {"logits", "options", "input_ids", "token_mask", "sample_mask"}:
            ways.append("token_scores")
        return ways


def at(name: str, place: tuple[int, ...], value: float) -> Spoil:
    """Another value at one place of a field."""

    def spoil(call: Call) -> None:
        call.data[name] = call.data[name].clone()
        call.data[name][place] = value

    return Spoil(frozenset({name}), spoil)


def use(**values: Any) -> Spoil:
    return Spoil(frozenset(values), lambda call: call.data.update(values))


def bounds(true: list | None = None, padded: list | None = None) -> Callable[[Call], object]:
    def spoil(call: Call) -> None:
        call.cu_seqlens = call.cu_seqlens if true is None else torch.tensor(true)
        call.cu_seqlens_padded = call.cu_seqlens_padded if padded is None else torch.tensor(padded)

    return spoil


def rows(count: int) -> Callable[[Call], object]:
    def spoil(call: Call) -> None:
        call.logits = call.logits[:count]
        call.data = {name: value[:count] for name, value in call.data.items()}

    return spoil


def logits(change: Callable[[Tensor], Tensor]) -> Spoil:
    return Spoil(frozenset({"logits"}), lambda call: setattr(call, "logits", change(call.logits)))


def options(**values: Any) -> Spoil:
    return Spoil(frozenset({"options"}), lambda call: call.options.update(values))


def drop(name: str) -> Spoil:
    return Spoil(frozenset({name}), lambda call: call.data.pop(name))


def narrow(name: str) -> Spoil:
    return Spoil(frozenset({name}), lambda call: call.data.update({name: call.data[name][:, 1:]}))


def argument(name: str, value: object) -> Spoil:
    return Spoil(frozenset({name}), lambda call: setattr(call, name, value))


def strided(call: Call) -> None:
    call.logits = call.logits.transpose(0, 1).contiguous().transpose(0, 1)
    call.options["consume_logits"] = True


def given_up(call: Call) -> None:
    z = call.logits.clone().requires_grad_()
    token_stats(z, torch.zeros(z.shape[:-1], dtype=torch.int64), consume_logits=True).lse.sum().backward()
    call.logits = z.detach()


def six_tokens(call: Call) -> None:
    call.logits = call.logits[:, :3]
    call.data.update({name: value[:, :6] for name, value in call.data.items() if value.dim() == 2})


def next_rank(call: Call) -> None:
    call.vocab_rank = (call.vocab_rank or 0) + 1
