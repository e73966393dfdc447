"""Conversion of a config: a reader that records every key, and the result with its remarks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel_rl.config.json_text import brief
from parallel_rl.hosts.port_report import NEEDED, Fate, Ledger, Row, Table, holds, lacks, summary

Tree = dict[str, object]

OF_DIFFERENT_REWARDS = (
    "{} keeps prompts whose rewards differ; ours those with a mean reward between low = 0 and high = 1: set both to the least "
    "and the largest reward"
)


# by objective, the keys of sizes and models; the first is the batch that data ranks share
_SIZES = {
    "rl": ("prompts", "group_size"), "preference": ("pairs",), "sft": ("batch_size",),
    "distillation": ("batch_size", "teacher"),
}  # fmt: skip
_OF_EXPERTS = {
    "": "a run needs it with parallel.expert",
    ".update": "with parallel.expert the evaluation samples from servers that have the trainer's weights",
}


@dataclass(frozen=True)
class Ported:
    """A converted config, and remarks for its reader.

    >>> Ported("verl", {"rl": {"prompts": 8}}, unknown=("actor.clip",)).lines()
    ['unknown   actor.clip: not read by this port']

    Attributes:
        framework, config: whose config it was, and our keys.
        dropped: options without effect in the other's config, and why.
        differs: defaults of the other framework that are not ours, with the effect on the gradient.
        left: options whose counterpart this trainer lacks. unknown: keys that this port does not know.
        rows: the fate of each key, these remarks included.
    """

    framework: str
    config: Tree
    dropped: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    def lines(self) -> list[str]:
        """Format a line for each remark, one for each other key or section, and the count of all keys."""
        remarks = {"dropped": self.dropped, "differs": self.differs, "left": self.left}
        lines = [f"{kind:<9} {text}" for kind, texts in remarks.items() for text in texts]
        lines += [f"{'unknown':<9} {key}: not read by this port" for key in self.unknown]
        named = {text.split(" = ")[0] for text in (*self.dropped, *self.left, *self.unknown)}
        lines += [row.line() for row in self.rows if row.key not in named]
        return [*lines, summary(self.rows)] if self.rows else lines


@dataclass
class Reader:
    """Reader of one section (dotted path `where`) of another framework's config; records each key read.

    `said` (remarks by kind) and `ledger` (fates of keys) are shared by all sections.
    """

    where: str
    section: Mapping[str, object]
    said: dict[str, list[str]]
    ledger: Ledger = field(default_factory=Ledger)

    def get(self, key: str, default: object = None, ours: str = "") -> object:
        """Return the value of a key, which goes to our key `ours`."""
        if ours:
            self.note(key, "carried", ours)
        return self.section.get(key, default)

    def flag(self, key: str, ours: str = "") -> bool:
        return bool(self.get(key, False, ours))

    def below(self, key: str) -> Reader:
        """Return the reader of a subsection, empty if missing or null; ValueError if it is no mapping."""
        value = self.section.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.path(key)} = {brief(value)} must be a mapping of its keys")
        return Reader(self.path(key), value or {}, self.said, self.ledger)

    def path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def note(self, key: str, kind: str, ours: str = "", why: str = "") -> None:
        self.ledger.read[self.path(key)] = Fate(kind, ours, why)

    def off(self, why: str) -> None:
        self.ledger.off[self.where] = why

    def drop(self, key: str, why: str) -> None:
        self.note(key, "no_effect", why=why)
        self.said["dropped"].append(f"{self.path(key)} = {self.section.get(key)!r} has no effect {why}")

    def leave(self, key: str, why: str = "this trainer has no counterpart", ours: str = "") -> None:
        """Remark that an option is not carried over; with `ours`, that the user may set our key."""
        self.note(key, "yours" if ours else "unsupported", ours, why)
        self.said["left"].append(f"{self.path(key)} = {self.section.get(key)!r}: {why}")

    def differ(self, text: str) -> None:
        self.said["differs"].append(text)


def reader_of(config: Mapping[str, object]) -> Reader:
    return Reader("", config, {"dropped": [], "differs": [], "left": []})


def ported(
    framework: str, config: Mapping[str, object], ours: Tree, root: Reader, table: Table, ranks: int = 0
) -> Ported:
    """Record the fate of every key of `config` for `ranks` (0: unknown), and collect the remarks."""
    said = {kind: tuple(lines) for kind, lines in root.said.items()}
    missing = [key for key in _needs(ours) if lacks(ours, key)]
    rows = root.ledger.rows(config, ours, table, missing)
    yours = {row.ours for row in rows if row.kind == "yours"}
    why = {key: _OF_EXPERTS[key.partition(".server")[2]] for key in missing if ".server" in key}
    rows += tuple(
        Row("", None, "yours", key, why.get(key, NEEDED)) for key in missing if key in why or key not in yours
    )
    rows += _uneven(ours, ranks)
    return Ported(framework, ours, **said, unknown=root.ledger.unknown(config, table), rows=rows)


def _uneven(ours: Tree, ranks: int) -> tuple[Row, ...]:
    """Name a layout that does not divide the ranks, or a batch that does not divide over data ranks."""
    objective = next((name for name in _SIZES if name in ours), "")
    section, layout = ours.get(objective), ours.get("parallel", {})
    if not ranks or not isinstance(section, dict) or not isinstance(layout, dict):
        return ()
    sizes = {"expert_tensor": layout.get("tensor", 1), **layout}
    dense, experts = (
        {name: sizes.get(name, 1) for name in names}
        for names in (("tensor", "context", "pipeline"), ("expert_tensor", "expert", "pipeline"))
    )
    if not all(isinstance(size, int) for size in (*dense.values(), *experts.values())):
        return ()
    for names in (dense, experts) if "expert" in layout else (dense,):
        unit = math.prod(names.values())
        if ranks % unit:
            why = f"the cluster's {ranks} ranks are no multiple of {' × '.join(names)} = {unit}"
            return (Row("", None, "yours", "parallel", why),)
    key, data = _SIZES[objective][0], ranks // math.prod(dense.values())
    size, updates = section.get(key) or 0, section.get("updates", 1)
    if not isinstance(size, int) or not isinstance(updates, int):  # such as a reference to the environment
        return ()
    batch = size // updates
    if not batch % data:
        return ()
    why = f"{batch} an update do not divide among the cluster's {data} data ranks: start fewer ranks, or take more"
    return (Row("", None, "yours", f"{objective}.{key}", why),)


def _needs(ours: Tree) -> list[str]:
    """List the keys that a run with these sections needs."""
    objective = next((name for name in _SIZES if name in ours), None)
    if objective is None:
        return []
    samples = objective == "rl" or holds(ours, "distillation.rows")
    source = {"preference": "pairs", "sft": "examples"}.get(objective, "train" if samples else "examples")
    needs = ["run.dir", "tokenizer.hf", "model.hf", f"data.{source}"]
    needs += [f"{objective}.{key}" for key in ("steps", "optimizer.lr", *_SIZES[objective])]
    needs += ["data.held_out"] if "evaluation" in ours else []
    if samples and holds(ours, "parallel.expert"):
        needs += [f"{objective}.server"] + ([f"{objective}.server.update"] if "evaluation" in ours else [])
    return needs


def number(value: object) -> float | int | None:
    """Read a number; YAML takes 1e-8, without a point, for text.

    >>> number("1e-8"), number(2), number(None)
    (1e-08, 2, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return None


MEGATRON_SIZES = {name: f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")} | {
    "context": "context_parallel_size"
}


def layout_of(section: Reader, names: Mapping[str, str] = MEGATRON_SIZES) -> Tree:
    """Make our section `parallel` from a section whose names of the sizes are `names`.

    >>> layout_of(Reader("megatron", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}))
    {'tensor': 2, 'sequence_parallel': True}
    """
    values = {name: section.get(key, ours=f"parallel.{name}") for name, key in names.items()}
    sizes = {name: size for name, size in values.items() if isinstance(size, int)}
    of_experts = section.get("expert_tensor_parallel_size", ours="parallel.expert_tensor")
    layout: Tree = {name: sizes[name] for name in ("tensor", "context", "pipeline") if name in sizes}
    if sizes.get("expert", 1) > 1:  # files of models without experts have both sizes as well
        layout["expert"] = sizes["expert"]
        layout |= {"expert_tensor": of_experts} if isinstance(of_experts, int) else {}
    elif of_experts is not None:
        section.note("expert_tensor_parallel_size", "no_effect", why="without expert parallelism")
    if section.flag("sequence_parallel", "parallel.sequence_parallel") and sizes.get("tensor", 1) > 1:
        layout["sequence_parallel"] = True
    elif section.flag("sequence_parallel"):
        section.drop("sequence_parallel", "on one tensor rank")
    return layout


def room(tokens: int, layout: Tree, packing: bool) -> int:
    """Count the positions that a sequence of so many tokens takes, the layout's padding included.

    >>> room(100, {"tensor": 2, "context": 2, "sequence_parallel": True}, True)
    108
    """
    unit, row = _units(layout)
    return -(-tokens // unit) * unit + (row if packing else 0)


def room_sum(tokens: int, layout: Tree, packing: bool) -> str:
    """Write `room` as a sum; empty if the layout adds nothing.

    >>> room_sum(99, {"tensor": 2, "context": 2, "sequence_parallel": True}, True)
    '99 + 1 up to a multiple of 4 + 8 for the padding of a packed row'
    """
    unit, row = _units(layout)
    text = f" + {-tokens % unit} up to a multiple of {unit}" if tokens % unit else ""
    text += f" + {row} for the padding of a packed row" if packing else ""
    return f"{tokens}{text}" if text else ""


def _units(layout: Tree) -> tuple[int, int]:
    """Return what divides the padded length of a sequence, and that of a packed row."""
    tensor, context = (size if isinstance(size := layout.get(name, 1), int) else 1 for name in ("tensor", "context"))
    chunks = 2 * context if context > 1 else 1
    unit = math.lcm(chunks, context * tensor) if layout.get("sequence_parallel") else chunks
    return unit, unit * tensor


def optimizer(section: Reader, ours: str, names: Mapping[str, str]) -> Tree:
    """Read AdamW's numbers by our names; `names` gives the other's. Empty without a rate.

    >>> optimizer(Reader("optim", {"lr": "1e-6", "clip_grad": 0.0}, {}), "rl.optimizer", {"lr": "lr", "clip": "clip_grad"})
    {'lr': 1e-06, 'clip': None}
    """
    numbers: Tree = {}
    for key, theirs in names.items():
        value = number(section.get(theirs, ours=f"{ours}.{key}"))
        if key == "clip" and theirs in section.section:
            numbers[key] = value or None  # 0 is off in both frameworks
        elif value is not None:
            numbers[key] = value
    return numbers if numbers.get("lr") else {}


def cosine(least: float, rate: object) -> Tree:
    """Return a cosine schedule that ends at the rate `least`."""
    fraction = least / rate if isinstance(rate, int | float) and rate else 0.0
    return {"schedule": "cosine", "final_fraction": min(max(fraction, 0.0), 1.0)}
