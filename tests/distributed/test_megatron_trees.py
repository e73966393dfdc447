"""One training step on a prefix tree's rows against packed flat rows, on the real megatron-core: every weight's gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel_rl.groups import ParallelGroups
from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import VOCAB, Batch, Case, make_data, make_loss, make_model, split

preload("tests.distributed.test_megatron_trees", "parallel_rl.megatron")

TOTAL = 48  # of a row with three sequences


def shared_data() -> Batch:
    """The cases' data where rows begin alike: two trees, a sequence inside another one, a branch of one token."""
    data = make_data("ragged")
    ids = data["input_ids"].clone()
    for row, other, length in ((1, 0, 9), (2, 1, 5), (4, 3, 8), (5, 4, 2)):
        ids[row, :length] = ids[other, :length]
    return {**data, "input_ids": ids}


def gradients(models: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    import parallel_rl.megatron as M

    return {name: M.gradient(parameter).clone() for name, parameter in M.global_parameters(models)}


def build(case: Case, chunk: int | None) -> torch.nn.Module:
    """The case's model, without losses of its routers."""
    import parallel_rl.megatron as M

    model = make_model(case, chunk=chunk)
    M.unwrap(model).config.moe_aux_loss_coeff = 0.0
    M.unwrap(model).config.moe_z_loss_coeff = None
    return model


def compare(rank: int, cases: list[Case]) -> list[str]:
    """Worst relative difference of each case's loss, metrics and gradients; what is above a bound."""
    import parallel_rl.megatron as M

    wrong = []
    for case in cases:
        M.initialize(
            case.tp,
            case.cp,
            case.pp,
            ep=case.ep,
            etp=case.etp if case.experts else None,
            virtual_pp=case.chunks if case.chunks > 1 else None,
        )
        ranks = ParallelGroups.from_megatron()
        places = range(case.chunks) if case.chunks > 1 else [None]
        models = [M.wrap_model(build(case, place)) for place in places]
        head = M.fuse_head(models[-1], budget=1 << 13) if case.fused else None
        parts = split(shared_data(), case.micro_batches)[ranks.dp_rank :: ranks.dp_size]
        made: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []
        for make in (M.packed_batch, M.tree_batch):
            for model in models:
                model.zero_grad_buffer()
            options: dict[str, Any] = {"cp_layout": case.cut, "total": TOTAL}
            batches = [make(part, part["lengths"], **options) for part in parts]
            report = M.forward_backward(models, make_loss(case), batches, head=head)
            made.append((report.floats(), gradients(models)))
        (flat, want), (tree, got) = made
        bound = 1e-6 if case.experts else 1e-10  # Megatron's router computes in float32
        total = sum(float(x.norm()) ** 2 for x in want.values()) ** 0.5
        for name, value in flat.items():
            if not abs(tree[name] - value) <= bound * max(abs(value), 1e-2):
                wrong.append(f"{case}: {name} {tree[name]} instead of {value}")
        for name, gradient in want.items():
            if not (apart := float((got[name] - gradient).norm())) <= bound * max(float(gradient.norm()), 1e-3 * total):
                wrong.append(f"{case}: {name} off by {apart / total}")
    return wrong


PLAIN = Case(micro_batches=2, loss="pg")
ALONE = [
    PLAIN,
    replace(PLAIN, position="learned_absolute"),
    replace(PLAIN, recompute=True),
    replace(PLAIN, fused=True),
    replace(PLAIN, loss="cov"),
    replace(PLAIN, experts="alltoall"),
]
SHARED = [
    replace(PLAIN, tp=2, sp=True),
    replace(PLAIN, tp=2, sp=True, fused=True),
    replace(PLAIN, cp=2),
    replace(PLAIN, cp=2, cut="contiguous", position="learned_absolute"),
    replace(PLAIN, pp=2),
    replace(PLAIN, pp=2, chunks=2),
    replace(PLAIN, experts="alltoall", ep=2),
    replace(PLAIN, experts="allgather", ep=2),
    replace(PLAIN, experts="alltoall", ep=2, cp=2),
    replace(PLAIN, experts="alltoall", ep=2, tp=2, sp=True),
    replace(PLAIN, experts="alltoall", tp=2, sp=True, etp=2),
]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, ALONE),
        pytest.param(2, SHARED, marks=pytest.mark.slow),
    ],
    ids=["alone", "two ranks"],
)
def test_gradients_of_flat_rows(world: int, cases: list[Case]) -> None:
    assert run_world(world, compare, cases, timeout=100) == [[]] * world


def _scores(rank: int) -> float:
    """Old log-probs [B, S] of a tree's row beside those of packed rows."""
    import parallel_rl.megatron as M
    from parallel_rl import token_logprobs

    M.initialize()
    model = make_model(PLAIN)
    data = shared_data()
    found = []
    with torch.no_grad():
        for make in (M.packed_batch, M.tree_batch):
            batch = make(data, data["lengths"])
            logits = M.forward_logits(model, batch.input)
            scores = token_logprobs(logits, data, layout=batch.input.layout, vocab_size=VOCAB)
            found.append(torch.where(data["token_mask"].bool(), scores, 0))
    return float((found[0] - found[1]).abs().max())


def test_scores_of_a_tree() -> None:
    assert run_world(1, _scores)[0] < 1e-12


def _refused(rank: int) -> list[str]:
    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss

    M.initialize()
    data = shared_data()
    messages = []
    for case, options in (
        (replace(PLAIN, experts="alltoall"), {}),
        (replace(PLAIN, mtp="token-mean"), {"mtp_loss": NLLLoss(vocab_size=VOCAB)}),
    ):
        model = M.wrap_model(make_model(case))
        messages.append(
            _message(lambda m=model, o=options: M.forward_backward(m, make_loss(PLAIN), [_batch(data)], **o))
        )
    model = make_model(PLAIN)
    model.decoder.layers[0].self_attention.core_attention = torch.nn.Identity()
    messages.append(_message(lambda: M.forward_logits(model, _batch(data).input)))
    messages.append(_message(lambda: M.tree_batch(data, data["lengths"], total=10)))
    return messages


def _batch(data: Batch) -> Any:
    import parallel_rl.megatron as M

    return M.tree_batch(data, data["lengths"])


def _message(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_what_would_compute_other_numbers_is_refused() -> None:
    experts, heads, attention, total = run_world(1, _refused)[0]
    assert "moe_aux_loss_coeff = 0.5 is not supported with prefix trees" in experts
    assert "mtp_num_layers = 2 is not supported with prefix trees" in heads
    assert "core_attention is a Identity, which does not know prefix trees" in attention
    assert "row_length = 10 is less than" in total
