"""Every loss on a tree's row against the same loss on flat rows, in one process: values, gradients, metrics."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import LMHeadInput, ParallelGroups, PrefixTree, PrefixTreeLossWrapper, build_tree, count_valid
from parallel_rl.layout import CPLayout
from parallel_rl.losses.core.base import LossFn
from parallel_rl.testing.batches import carries_loss, local_names, with_shared_prefixes
from parallel_rl.testing.cases import Batch, Case, alone, has_scalar_head, reduced_numbers, step_statistics
from parallel_rl.testing.layouts import Rank, make_groups
from tests.distributed.law_references import batch_of
from tests.prefix_tree.cuts import held_rows

WIDTH = 6  # of hidden states


class Cut(NamedTuple):
    """How ranks share a tree's row."""

    tp: int
    cp: int
    cp_layout: CPLayout = "zigzag"
    head: bool = False  # from hidden states
    sequence_parallel: bool = False


class Truth(NamedTuple):
    """A case's batch and what flat rows give: the loss, the gradients of the row's logits, hidden states and head."""

    case: Case
    batch: Batch
    hidden: Tensor
    weight: Tensor
    loss: float
    gradients: tuple[Tensor, ...]
    metrics: dict[str, float]


def tree_of(batch: Batch, cut: Cut) -> PrefixTree:
    """The tree of a batch, whose row these ranks can share."""
    unit = 2 * cut.cp * (cut.tp if cut.sequence_parallel else 1)
    return build_tree(batch.data["input_ids"], torch.tensor(batch.lengths), multiple_of=unit)


def truth(case: Case, seed: int, *, head: bool = False) -> Truth:
    """The numbers of flat rows."""
    batch = with_shared_prefixes(batch_of(case, seed), case.build(), seed)
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(batch.logits.shape[-1], WIDTH, generator=g, dtype=torch.float64) / 2
    tree = tree_of(batch, Cut(1, 1))
    hidden = torch.randn(tree.row_length, WIDTH, generator=g, dtype=torch.float64)[tree.where] * tree.real[..., None]
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    if head:
        batch = batch._replace(logits=(hidden @ weight.T).detach())
    logits = batch.logits.clone().requires_grad_()
    loss, metrics = alone(case, hidden @ weight.T if head else logits, batch.data)
    gradients = torch.autograd.grad(loss, leaves if head else (logits,), allow_unused=True, materialize_grads=True)
    return Truth(case, batch, hidden.detach(), weight.detach(), loss.item(), gradients, reduced_numbers([metrics]))


def summed(flat: Tensor, tree: PrefixTree) -> Tensor:
    """[B, S, ...] of flat tokens to the rows that they share, [T, ...]."""
    rows = flat.new_zeros(tree.row_length, *flat.shape[2:])
    return rows.index_put((tree.where[tree.real],), flat[tree.real], accumulate=True)


def columns(width: int, tp: int, rank: int) -> tuple[Tensor, Tensor]:
    """The columns of a tensor rank, of shards padded to one width, and which of them are real."""
    part = -(-width // tp)
    place = torch.arange(rank * part, (rank + 1) * part)
    return place.clamp(max=width - 1), place < width


def run_tree(of: Truth, cut: Cut, rank: Rank) -> list[str]:
    """What differs on this rank; the share and the metrics are compared on the first rank."""
    case, batch = of.case, of.batch
    tree, groups = tree_of(batch, cut), rank.groups
    scalar = has_scalar_head(case.loss)
    vocab = batch.logits.shape[-1]
    picked, real = columns(vocab, 1 if scalar else cut.tp, 0 if scalar else rank.place[0])
    built = case.build(vocab_size=vocab if cut.tp > 1 else None, cp_layout=cut.cp_layout)
    assert isinstance(built, LossFn)
    held = torch.tensor(held_rows(tree, cut.cp, rank.place[1], cut.cp_layout))
    needed = summed(carries_loss(batch.data, built).double(), tree) > 0
    data = dict(batch.data)
    for name in local_names(built):
        data[name] = tree.row(data[name])[held][:, picked].where(real, torch.nan)[None]
    loss_fn = PrefixTreeLossWrapper(built, tree)
    leaves: tuple[Tensor, ...]
    if cut.head:
        rows = held.chunk(cut.tp)[rank.place[0]] if cut.sequence_parallel else held
        hidden = tree.row(of.hidden).where(needed[:, None], torch.nan)[rows].requires_grad_()
        weight = of.weight[picked].where(real[:, None], torch.nan).requires_grad_()
        leaves, output = (hidden, weight), LMHeadInput(hidden[None], weight, sequence_parallel=cut.sequence_parallel)
    else:
        flat = tree.row(batch.logits).where(needed[:, None], torch.nan)[held][:, picked].where(real, torch.nan)
        leaves = (flat.requires_grad_(),)
        output = (flat * 1)[None]  # type: ignore[assignment]
    call = (output, data, *count_valid(batch.data), rank.place[0], groups.tensor, groups.context)
    share, metrics = loss_fn(*call, statistics=step_statistics([(loss_fn, call)], groups))
    share.backward()
    wrong = []
    total = share.detach().clone()
    if groups.context is not None:
        dist.all_reduce(total, group=groups.context)
    if not abs(total.item() - of.loss) <= 1e-10 * max(abs(of.loss), 1e-3):
        wrong.append(f"loss {total.item()} instead of {of.loss}")
    for name, value in reduced_numbers([metrics], groups).items():
        if not (value == of.metrics[name] or abs(value - of.metrics[name]) <= 1e-9 * max(abs(of.metrics[name]), 1e-2)):
            wrong.append(f"{name} {value} instead of {of.metrics[name]}")
    wrong += _wrong_gradients(of, cut, rank, tree, leaves, held, picked, real)
    return wrong


def _wrong_gradients(
    of: Truth,
    cut: Cut,
    rank: Rank,
    tree: PrefixTree,
    leaves: tuple[Tensor, ...],
    held: Tensor,
    picked: Tensor,
    real: Tensor,
) -> list[str]:
    if not cut.head:
        whole = summed(of.gradients[0], tree)
        want = (whole[held][:, picked] * real,)
        norms = (whole.norm(),)
    else:
        hidden, weight = summed(of.gradients[0], tree), of.gradients[1]
        rows = held.chunk(cut.tp)[rank.place[0]] if cut.sequence_parallel else held
        want, norms = (hidden[rows], weight[picked] * real[:, None]), (hidden.norm(), weight.norm())
        if rank.groups.context is not None and leaves[1].grad is not None:
            dist.all_reduce(leaves[1].grad, group=rank.groups.context)
    wrong = []
    for name, leaf, right, norm in zip(("first leaf", "weight"), leaves, want, norms, strict=False):
        got = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if not (apart := (got - right).norm()) <= 1e-10 * norm + 1e-13:
            wrong.append(f"gradient of the {name} off by {apart / norm}")
    return wrong


def check_cuts(rank: int, cuts: list[Cut], truths: list[Truth]) -> list[str]:
    """Every case on every cut; what differs, with its names."""
    wrong = []
    for cut in cuts:
        mine = Rank(*make_groups(rank, cut.tp * cut.cp, cut.tp, cut.cp)) if cut.tp * cut.cp > 1 else ALONE
        for of in truths:
            try:
                faults = run_tree(of, cut, mine)
            except Exception as error:  # named with its case
                raise RuntimeError(f"{of.case.name} on {cut}: {error}") from error
            wrong += [f"{of.case.name} on {cut}: {fault}" for fault in faults]
    return wrong


ALONE = Rank(ParallelGroups(), (0, 0, 0))
