"""The law on the real megatron-core: the gradients of every layout are those of one process, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel_rl.testing.pool import preload
from tests.distributed.megatron_cases import Case
from tests.distributed.megatron_check import check_law

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

LAYOUTS = {
    1: [Case(), Case(rows="packed"), Case(rows="padding", micro_batches=6)],
    2: [
        Case(tp=2),
        Case(tp=2, sp=True),
        Case(tp=2, groups=1),  # fewer key heads than tensor ranks
        Case(tp=2, sp=True, rows="packed", position="learned_absolute", tied=True),
        Case(cp=2),
        Case(cp=2, rows="packed", position="learned_absolute"),
        Case(cp=2, rows="padding"),
        Case(pp=2),
        Case(pp=2, tied=True, rows="packed"),
        Case(pp=2, tied=True, position="learned_absolute", micro_batches=6),
        Case(pp=2, chunks=2, rows="packed", micro_batches=6),
        Case(micro_batches=6),
        Case(rows="packed", micro_batches=2),
    ],
    4: [
        Case(tp=2, cp=2, sp=True),
        Case(tp=2, cp=2, sp=True, rows="packed"),
        Case(tp=2, cp=2, sp=True, rows="padding", position="learned_absolute", tied=True),
        Case(tp=4, rows="packed", position="learned_absolute"),
        Case(cp=2, micro_batches=6),
        Case(tp=2, pp=2, sp=True, tied=True),
        Case(cp=2, pp=2, rows="packed", tied=True),
    ],
}
WAYS = [
    {"per_token": False, "ddp": True, "data": "masked micro-batch"},
    {"per_token": True, "ddp": False, "data": "one context rank", "loss": "pg"},
    {"per_token": False, "ddp": False, "loss": "pg"},
    {"per_token": True, "ddp": True, "loss": "cov"},
]

# each setting of a way once on four ranks; two ranks have other layouts beside
FAST = {1: WAYS[1:3], 2: [], 4: [WAYS[1], WAYS[3]]}
SLOW = {1: [], 2: WAYS[:1], 4: [WAYS[0], WAYS[2]]}

# heads of multi-token prediction: their labels cross context ranks, packed sequences and prompts
MTP = {
    1: [Case(mtp="token-mean"), Case(rows="packed", mtp="token-mean", fused=True)],
    4: [
        Case(tp=2, cp=2, sp=True, mtp="token-mean"),
        Case(tp=2, cp=2, sp=True, rows="padding", mtp="seq-mean-token-mean", ddp=False),
        Case(tp=2, cp=2, sp=True, rows="packed", mtp="seq-mean-token-mean", fused=True, per_token=False),
        Case(cp=2, pp=2, rows="packed", mtp="token-mean", ddp=False),
        Case(tp=2, pp=2, sp=True, tied=True, mtp="token-mean", data="masked micro-batch"),
        Case(cp=2, pp=2, chunks=2, rows="packed", micro_batches=6, mtp="token-mean"),
    ],
}

GPT2 = Case(position="learned_absolute")
CONTEXT = [
    *(replace(GPT2, tp=tp, cp=cp, sp=tp > 1, rows=rows, cut="contiguous", loss=loss, fused=tp > 1)
      for tp, cp, rows, loss in ((1, 4, "padded", "nll"), (2, 2, "packed", "pg"), (1, 2, "padding", "cov"))),
    Case(dynamic=True),
    Case(dynamic=True, rows="packed", loss="pg", ddp=False),
    Case(dynamic=True, rows="packed", loss="cov", per_token=False, position="learned_absolute"),
]  # fmt: skip

# real routers and experts with auxiliary losses; full rows where a packed row would be padded to the layout
FULL: dict[str, object] = {"data": "one context rank", "rows": "packed"}
EXPERTS = {
    1: [
        Case(experts="alltoall"),
        Case(experts="allgather", per_token=False, data="masked micro-batch"),
        Case(experts="alltoall", data="one context rank", micro_batches=6),
    ],
    4: [
        Case(experts="allgather", ep=2, micro_batches=2, cp=2),
        Case(experts="alltoall", ep=2, micro_batches=2, cp=2, per_token=False, data="masked micro-batch"),
        Case(experts="alltoall", ep=2, tp=2, sp=True, micro_batches=6),
        Case(experts="alltoall", tp=2, sp=True, micro_batches=6, data="one context rank"),  # replicas on tensor ranks
        Case(
            experts="allgather", ep=2, tp=2, etp=2, sp=True, micro_batches=6, per_token=False, data="one context rank"
        ),
        Case(experts="alltoall", ep=2, tp=2, pp=2, sp=True, tied=True, data="masked micro-batch"),
        Case(experts="alltoall", ep=2, cp=2, pp=2, **FULL),  # type: ignore[arg-type]
        Case(experts="alltoall", ep=4, micro_batches=6, tp=2, sp=True, sharded=True, overlap=True),
        Case(experts="alltoall", ep=2, tp=2, cp=2, sp=True, fused=True, **FULL),  # type: ignore[arg-type]
        Case(experts="alltoall", cp=2, idle=True),
    ],
    8: [Case(experts="alltoall", ep=2, tp=2, cp=2, pp=2, sp=True, per_token=per_token) for per_token in (True, False)],
}

# experts balanced over sequences (more: test_megatron_pairs) or over the step: the same for padded rows, packed ones and any
# micro-batches
SEQ: dict[str, object] = {"experts": "alltoall", "balance": "seq_aux_loss"}
STEP: dict[str, object] = {"experts": "allgather", "balance": "global_aux_loss"}
BALANCED = {
    1: [Case(**SEQ), Case(rows="packed", recompute=True, **STEP)],  # type: ignore[arg-type]
    4: [
        Case(cp=2, pp=2, chunks=2, rows="packed", micro_batches=6, recompute=True, **SEQ),  # type: ignore[arg-type]
        Case(cp=2, idle=True, rows="packed", **SEQ),  # type: ignore[arg-type]
        Case(tp=2, cp=2, sp=True, rows="packed", mtp="token-mean", **STEP),  # type: ignore[arg-type]
        Case(tp=2, cp=2, sp=True, rows="packed", data="masked micro-batch", **STEP),  # type: ignore[arg-type]
        Case(cp=2, ep=2, micro_batches=2, per_token=False, data="masked micro-batch", **STEP),  # type: ignore[arg-type]
        Case(cp=2, pp=2, rows="packed", recompute=True, micro_batches=3, data="one context rank", **STEP),  # type: ignore[arg-type]
        Case(tp=2, sp=True, micro_batches=6, overlap=True, sharded=True, **STEP),  # type: ignore[arg-type]
        Case(cp=2, idle=True, loss="nll", **STEP),  # type: ignore[arg-type]
    ],
}

# reductions that overlap the backward, and gradients of which each data rank gets its shard only
REDUCED = {
    4: [
        Case(tp=2, sp=True, micro_batches=6, overlap=True, sharded=True),
        Case(cp=2, rows="packed", micro_batches=6, sharded=True, per_token=False, data="one context rank"),
        Case(tp=2, cp=2, sp=True, rows="padding", overlap=True, sharded=True, loss="cov", data="masked micro-batch"),
        Case(pp=2, tied=True, micro_batches=6, overlap=True, sharded=True, position="learned_absolute"),
        Case(cp=2, pp=2, chunks=2, rows="packed", micro_batches=6, overlap=True, sharded=True, per_token=False),
    ],
}


@pytest.mark.parametrize(
    ("world", "way"),
    [
        pytest.param(
            world,
            way,
            id=f"{world}-{','.join(f'{k}={v}' for k, v in way.items())}",
            marks=() if way in FAST[world] else pytest.mark.slow,
        )
        for world in LAYOUTS
        for way in (*FAST[world], *SLOW[world])
    ],
)
def test_every_layout_gives_the_gradients_of_one_process(world: int, way: dict[str, object]) -> None:
    # How the loss is scaled has nothing to do with tensor parallelism: there the first way is enough, and
    # `test_megatron_pairs` has each pair of settings.
    layouts = [case for case in LAYOUTS[world] if case.tp == 1 or way == WAYS[0]]
    cases = [replace(case, **way) for case in layouts]  # type: ignore[arg-type]
    check_law(world, cases)


@pytest.mark.parametrize(
    ("world", "cases"),
    [(1, MTP[1][1:]), (4, MTP[4][2:3]), pytest.param(4, [MTP[4][1], MTP[4][3], MTP[4][5]], marks=pytest.mark.slow)],
    ids=["1", "4", "4-more"],
)
def test_heads_of_multi_token_prediction(world: int, cases: list[Case]) -> None:
    """Both heads' losses and all gradients, the shared embedding's and head's among them; no Megatron rolls our labels."""
    check_law(world, cases)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, EXPERTS[1]),
        (4, EXPERTS[4][5:8:2]),  # each of TP, PP, shards and overlap
        pytest.param(4, [*EXPERTS[4][:5], EXPERTS[4][6], *EXPERTS[4][8:]], marks=pytest.mark.slow),
        pytest.param(8, EXPERTS[8][1:], marks=pytest.mark.slow),
    ],
    ids=["1", "4", "4-more", "8"],
)
def test_routers_and_experts_with_auxiliary_losses(world: int, cases: list[Case]) -> None:
    """Each auxiliary loss weighs as a mean over micro-batches, whatever carries loss, is split or is packed; it was divided by
    the tokens that carry loss, and on TP × CP ranks that many times too weak. Megatron's softmax of routers is float32.
    """
    check_law(world, cases, bound=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cases"), [(1, BALANCED[1]), (4, BALANCED[4])], ids=["1", "4"])
def test_experts_balanced_over_sequences_and_over_the_step(world: int, cases: list[Case]) -> None:
    """Whatever the micro-batches, padding and masked rows, and where layers run again in backward; Megatron's own are of a
    micro-batch's rows, padding among them, and of the micro-batches so far.
    """
    check_law(world, cases, bound=1e-6)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (4, [REDUCED[4][2], REDUCED[4][4]]),
        pytest.param(4, [*REDUCED[4][:2], REDUCED[4][3]], marks=pytest.mark.slow),
    ],
    ids=["4", "4-more"],
)
def test_overlapped_reduction_and_the_distributed_optimizers_shards(world: int, cases: list[Case]) -> None:
    """Shards that begin and end within parameters, tied embeddings on two stages among them; norms of all shards."""
    check_law(world, cases)


@pytest.mark.parametrize(
    "cases",
    [CONTEXT[1:5:3], pytest.param([CONTEXT[0], *CONTEXT[2:4], CONTEXT[5]], marks=pytest.mark.slow)],
    ids=["one each", "more"],
)
def test_contiguous_rows_and_context_groups_of_micro_batches(cases: list[Case]) -> None:
    """Rows cut in order, and rows on groups of one, two and four data ranks, some with fewer: masks, positions, counts."""
    check_law(4, cases)
