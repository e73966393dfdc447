"""Read a run's data without its model: records, speed, fill of micro-batches, and memory of each step."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_rl.experience.samples import Samples
from parallel_rl.prefix_tree import build_tree
from parallel_rl.training.algorithms.phases import phases
from parallel_rl.training.batching.bin_packing import Capacity, deal, pack
from parallel_rl.training.batching.micro_batches import in_order, target_rows, width_unit
from parallel_rl.training.batching.prefix_trees import cut_groups, group_tokens, pack_trees, tree_tokens
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.checking import settle_alphabet
from parallel_rl.training.data.datasets import Datasets, find_data
from parallel_rl.training.data.examples import Pair, Prompt, Rollout
from parallel_rl.training.data.reading import Record, lengths_of, read_datasets
from parallel_rl.training.data.records.source import Records
from parallel_rl.training.preflight.check import check_layout, length_check
from parallel_rl.training.tokenizer.protocol import Target


@dataclass(frozen=True)
class TreeFill:
    """Counts of rows of prefix trees, over all data ranks.

    Attributes:
        tokens: that the rows hold, each shared one once.
        room: tokens that the rows have room for.
        rows: micro-batches of an update on the data rank that has most.
        groups_cut, tokens_repeated: see `cut_groups`.
    """

    tokens: int = 0
    room: int = 0
    rows: int = 0
    groups_cut: int = 0
    tokens_repeated: int = 0

    def __add__(self, other: TreeFill) -> TreeFill:
        return TreeFill(
            self.tokens + other.tokens,
            self.room + other.room,
            max(self.rows, other.rows),
            self.groups_cut + other.groups_cut,
            self.tokens_repeated + other.tokens_repeated,
        )

    def describe(self, flat: int) -> str:
        """Describe what is shared of so many flat tokens, and what cut groups repeat."""
        shared = f"{self.tokens:,} in rows of trees ({1 - self.tokens / max(flat, 1):.1%} shared)"
        if not self.groups_cut:
            return shared
        return (
            f"{shared}, {self.tokens_repeated:,} of them repeated by {self.groups_cut:,} groups that do not fit a row"
        )


def step_rows(batch: Sequence[Record], rows: int, new: int) -> Samples:
    """Make the sequences of a step's records; sampled answers are `new` tokens that differ from the first.

    Args:
        rows: sequences of a record.
    """
    prompts, targets = list[Sequence[int]](), list[Target]()
    for index, record in enumerate(batch):
        for prompt, target in _sequences(record, batch[(index + 1) % len(batch)], rows, new):
            prompts.append(prompt)
            # a token that no other sequence has
            targets.append(Target((-len(prompts),) * target, None) if isinstance(target, int) else target)
    return target_rows(prompts, targets)


def _sequences(record: Record, following: Record, rows: int, new: int) -> Iterator[tuple[Sequence[int], Target | int]]:
    """Yield each prompt, and its target or the number of tokens that are not known yet."""
    if isinstance(record, Prompt):
        yield from [(record.tokens, new)] * rows
    elif isinstance(record, Rollout):
        first = len(record.tokens) - len(record.logprobs)
        yield record.tokens[:first], Target(record.tokens[first:], None)
    elif isinstance(record, Pair):
        assert isinstance(following, Pair)
        yield from [(record.prompt, side) for side in (record.chosen, record.rejected, following.chosen)[:rows]]
    else:  # an answer's mismatched row is as long on average
        yield record.prompt, record.target
        yield from [(record.prompt, len(record.target.tokens))] * (rows - 1)


def tree_fill(config: TrainConfig, rows: Samples, together: int, ranks: int) -> TreeFill:
    """Count the trees of a step's rows as the trainer packs them.

    Raises:
        ValueError: a unit of `together` sequences whose tree does not fit a row.
    """
    capacity = Capacity.of_config(config.batch, config.parallel)
    total = TreeFill()
    for mine in _shares(rows, None if capacity is None else together, ranks):
        part = rows.select(mine)
        bins = in_order(len(part), config.batch.sequences) if capacity is None else pack_trees(part, capacity, together)
        trees = [part.select(indices) for indices in bins]
        room = sum(_row_length(config, tree) for tree in trees) if capacity is None else len(bins) * capacity.usable
        cuts, repeated = (sum(counts) for counts in zip(*cut_groups(part, bins), strict=True))
        total += TreeFill(sum(map(tree_tokens, trees)), room, len(bins), cuts, repeated)
    return total


def _shares(rows: Samples, together: int | None, ranks: int) -> list[list[int]]:
    """Deal whole groups to the data ranks; without `together` equal shares in order."""
    if together is None:
        return in_order(len(rows), -(-len(rows) // ranks))
    weights = group_tokens(rows, together=together)
    firsts = weights.nonzero()[:, 0].tolist()
    of_ranks: list[list[int]] = [[] for _ in range(ranks)]
    for first, stop, rank in zip(firsts, [*firsts[1:], len(rows)], deal(weights[firsts].tolist(), ranks), strict=True):
        of_ranks[rank] += range(first, stop)
    return [share for share in of_ranks if share]


def _row_length(config: TrainConfig, rows: Samples) -> int:
    sizes = config.parallel
    unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
    chunks = 2 * sizes.context if sizes.context > 1 else 1
    length = build_tree(rows.input_ids, rows.lengths, multiple_of=chunks).row_length
    return -(-length // unit) * unit


@dataclass(frozen=True)
class Reading:
    """A phase's source: `count` records of `name` a step, shuffled or in file order, split over `updates`."""

    phase: str
    steps: int
    name: str
    count: int
    updates: int = 1
    shuffled: bool = True


@dataclass(frozen=True)
class Progress:
    """Counters after `step` steps of a phase.

    Tokens include all that may be sampled after a prompt. `filled` is the mean fraction of micro-batches that tokens fill,
    `memory` the resident bytes, `trees` the counts of their rows if prefixes are shared.
    """

    phase: str
    step: int
    records: int
    tokens: int
    seconds: float
    filled: float
    memory: int
    trees: TreeFill | None = None


def readings(config: TrainConfig) -> list[Reading]:
    """List the readings of a run, phase by phase and source by source."""
    return [
        Reading(phase.name, phase.steps, name, count, phase.updates // phase.steps, shuffled=name != "rollouts")
        for phase in phases(config)
        for name, count in phase.takes.items()
    ]


def dry_run(
    config: TrainConfig, steps: int | None = None, say: Callable[[str], None] = lambda text: None
) -> Iterator[Progress]:
    """Check the data as a run does, then read each step's records; yield progress at 1, 10, ..., last.

    The data parallel size is `parallel.data`, or 1. `steps` of each phase replace the config's. `say` gets a line for
    each source, when all are checked. ValueError if `train` would refuse the config or the data, or a record is wrong.
    """
    sizes = config.parallel
    ranks = sizes.data or 1
    files = find_data(config.data)
    check_layout(config, sizes.tensor * sizes.context * sizes.pipeline * ranks)
    began = time.monotonic()
    config = settle_alphabet(config, files)
    data = read_datasets(config, config.tokenizer.build(), files, length_check(config))
    for line in data.describe():
        say(line)
    say(f"indexed and checked in {time.monotonic() - began:.1f} s; the longest sequence takes {data.longest} tokens")
    for reading in readings(config):
        yield from read_steps(config, data, reading, reading.steps if steps is None else steps, ranks)


def resident() -> int:
    """Return this process's resident bytes now, or their maximum if the system reports only that."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return pages * resource.getpagesize()


def read_steps(config: TrainConfig, data: Datasets, reading: Reading, steps: int, ranks: int) -> Iterator[Progress]:
    """Read what the first steps of a phase read from one source; report at 1, 10, 100, ... and the last."""
    records: Records[Record] = getattr(data, reading.name)
    began, tokens, filled = time.monotonic(), 0, 0.0
    rows = _rows(config, reading)
    together = rows if reading.name in ("pairs", "answers") else 1
    trees = TreeFill() if config.batch.share_prefixes else None
    for step in range(steps):
        indices = range(step * reading.count, (step + 1) * reading.count)
        if reading.shuffled:
            batch = records.stream(indices, config.run.seed)
        else:
            batch = [records[place % len(records)] for place in indices]
        held = room = 0
        for part_indices in in_order(len(batch), -(-len(batch) // reading.updates)):
            part = [batch[index] for index in part_indices]
            lengths = [length for index in range(len(part)) for length in _lengths(config, part, index, rows)]
            tokens += sum(lengths)
            if trees is None:
                held, room = held + sum(lengths), room + _room(config, lengths, together, ranks)
            else:
                fill = tree_fill(config, step_rows(part, rows, config.sampling.max_new_tokens), together, ranks)
                held, room, trees = held + fill.tokens, room + fill.room, trees + fill
        filled += held / room
        done = step + 1
        if done == steps or str(done).strip("0") == "1":
            seconds = time.monotonic() - began
            yield Progress(reading.phase, done, done * reading.count, tokens, seconds, filled / done, resident(), trees)


def _rows(config: TrainConfig, reading: Reading) -> int:
    if config.preference is not None and reading.name == config.preference.source:
        return config.preference.rows
    return config.rl.group_size if config.rl is not None and reading.name == "train" else 1


def _lengths(config: TrainConfig, batch: Sequence[Record], index: int, rows: int) -> list[int]:
    record = batch[index]
    lengths = lengths_of(record, config.sampling.max_new_tokens)
    if not isinstance(record, Pair):
        return lengths * rows  # an answer's mismatched row is as long on average
    if rows == 3:  # the mismatched one
        following = batch[(index + 1) % len(batch)]
        assert isinstance(following, Pair)
        lengths.append(len(record.prompt) + len(following.chosen.tokens))
    return lengths


def _room(config: TrainConfig, lengths: Sequence[int], together: int, ranks: int) -> int:
    """Return the most tokens that the micro-batches of a step hold."""
    capacity = Capacity.of_config(config.batch, config.parallel)
    if capacity is not None:
        units = [sum(lengths[first : first + together]) for first in range(0, len(lengths), together)]
        of_ranks: list[list[int]] = [[] for _ in range(ranks)]
        for unit, rank in enumerate(deal(units, ranks)):
            of_ranks[rank] += lengths[unit * together : (unit + 1) * together]
        return sum(len(pack(mine, capacity, together)) for mine in of_ranks) * capacity.usable
    sizes = config.parallel
    unit = width_unit(tensor=sizes.tensor, context=sizes.context, sequence_parallel=sizes.sequence_parallel)
    padded = [-(-length // unit) * unit for length in lengths]
    if config.batch.packing:
        return sum(padded)
    size = config.batch.sequences
    parts = [padded[first : first + size] for first in range(0, len(padded), size)]
    return sum(len(part) * max(part) for part in parts)
