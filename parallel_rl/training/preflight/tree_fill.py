"""The rows of prefix trees that a step's records make, without a model: their tokens, and how full they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel_rl.experience.samples import Samples
from parallel_rl.prefix_tree import build_tree
from parallel_rl.training.batching.bin_packing import Capacity, deal
from parallel_rl.training.batching.micro_batches import in_order, target_rows, width_unit
from parallel_rl.training.batching.prefix_trees import cut_groups, group_tokens, pack_trees, tree_tokens
from parallel_rl.training.config.train import TrainConfig
from parallel_rl.training.data.examples import Pair, Prompt, Rollout
from parallel_rl.training.data.reading import Record
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
