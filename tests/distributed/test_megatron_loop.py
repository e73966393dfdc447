"""Schedules without gradients, rollouts on a context-parallel model, gradient norm, clipping and the optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import LENGTHS, VOCAB, WIDTH, Case, make_data, make_model
from tests.distributed.megatron_step import step, wrapper

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")


def _logits(rank: int, case: Case, alone: bool, virtual: int | None) -> list[Tensor]:
    """[B, S, V] logits of each micro-batch, gathered by hand, known on every rank; 0 at padding. Then the same
    outside `replicas`.
    """
    from megatron.core import parallel_state

    import parallel_rl.megatron as M

    M.initialize(case.tp, case.cp, case.pp, virtual_pp=virtual)
    config = M.build_config(
        num_layers=4, hidden_size=16, num_attention_heads=4, num_query_groups=2, dtype=torch.float64,
        sequence_parallel=case.sp, init_std=0.3, virtual_pp=virtual,
    )  # fmt: skip
    models = [
        M.wrap_model(M.build_model(config, VOCAB, WIDTH, vp_stage=stage if virtual else None))
        for stage in range(virtual or 1)
    ]
    data = make_data("ragged")

    def run(spread: bool) -> Tensor:
        inputs = []
        for rows in torch.arange(len(LENGTHS)).split(1 if virtual else 2):
            bounds = M.packed_bounds(data["lengths"][rows], context=None if spread else M.ALONE)
            inputs.append(M.packed_input(data["input_ids"][rows], *bounds, context=None if spread else M.ALONE))
        context = parallel_state.get_context_parallel_group() if spread else None

        def collect(logits: Tensor, index: int) -> Tensor:
            assert not logits.requires_grad
            parts = [torch.empty_like(logits) for _ in range(case.tp)]
            dist.all_gather(parts, logits, group=parallel_state.get_tensor_model_parallel_group())
            columns = torch.cat(parts, dim=-1)[..., :VOCAB].flatten(0, 1).T.contiguous()
            return torch.stack(
                [inputs[index].layout.unshard(column, context, shift=False) for column in columns], dim=-1
            )

        found = M.forward_only(M.forward_logits, models, inputs, collect, seq_length=WIDTH, micro_batch_size=1)
        assert (found is not None) == M.is_last_stage()
        whole = None if found is None else torch.cat(found)
        shape = (len(LENGTHS), WIDTH, VOCAB)
        told = M.broadcast_from_last_stage(whole, shape=shape, dtype=torch.float64)
        assert torch.equal(told, M.broadcast_from_last_stage(whole))
        return told

    with M.replicas(models) if alone else nullcontext():
        first = run(spread=not alone)
    second = run(spread=True)
    M.destroy()
    return [first, second]


@pytest.mark.parametrize(
    "cases",
    [
        [(Case(pp=2), False, 2), (Case(tp=2, cp=2, sp=True), True, None), (Case(cp=2, pp=2), True, None)],
        pytest.param(
            [(Case(tp=2, sp=True), True, None), (Case(cp=2), True, None), (Case(pp=2), False, None)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two dimensions", "one"],
)
def test_forward_only_gives_the_same_logits_on_every_layout_and_as_replicas(
    cases: list[tuple[Case, bool, int | None]],
) -> None:
    reference = run_world(1, _logits, Case(), False, None)[0][0]
    assert reference.abs().max() > 1
    for case, alone, virtual in cases:
        for whole in run_world(case.world, _logits, case, alone, virtual):
            for told in whole:
                assert (told - reference).abs().max() < 1e-12, (case, alone, virtual)


def _train(
    rank: int, case: Case, steps: int, max_norm: float, by_hand: bool
) -> tuple[list[float], list[float], Tensor]:
    """Losses, gradient norms and the final norm weight (replicated) after some steps of clipped AdamW."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import parallel_rl.megatron as M

    M.initialize(case.tp, case.cp, case.pp)
    _, models = step(case)
    if by_hand:
        optimizer = torch.optim.AdamW(models[0].parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    else:
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.0, adam_beta2=0.95, clip_grad=0.0, params_dtype=torch.float64
        )
        optimizer = get_megatron_optimizer(settings, models)
    losses, norms = [], []
    for _ in range(steps):
        # With DDP the optimizer leaves a gradient in `grad`, which DDP would add to the next one.
        models[0].zero_grad_buffer() if case.ddp else optimizer.zero_grad()
        report, _ = step(case, models)
        norm = M.grad_norm(models)
        M.clip_grads_(models, max_norm, norm)
        assert M.grad_norm(models).item() == pytest.approx(min(max_norm, norm.item()), rel=1e-5)
        if by_hand:
            M.copy_main_grads(models)
        optimizer.step()
        losses.append(report.floats()["loss"])
        norms.append(norm.item())
    first = next(p for n, p in M.global_parameters(models) if n.endswith("input_layernorm.weight"))
    M.destroy()
    return losses, norms, first.detach().clone()


@pytest.mark.slow
def test_training_is_the_same_with_megatrons_optimizer_and_by_hand() -> None:
    losses, norms, weight = run_world(1, _train, Case(ddp=False, tied=True), 2, 0.5, True)[0]
    assert losses[-1] < losses[0] and max(norms) > 0.5
    for case, by_hand in (
        (Case(tp=2, sp=True, tied=True), False),
        (Case(pp=2, tied=True), False),
        (Case(cp=2, tied=True, rows="packed", per_token=False), False),
        (Case(tp=2, tied=True), True),
    ):
        for found in run_world(2, _train, case, 2, 0.5, by_hand):
            assert found[0] == pytest.approx(losses, rel=1e-9)
            assert found[1] == pytest.approx(norms, rel=1e-9)
            if case.pp == 1:
                assert torch.allclose(found[2], weight, rtol=1e-9)


def _steps_of_idle_ranks(rank: int, sizes: dict[str, int], idle: bool) -> dict[str, tuple[dict[str, float], float]]:
    """Metrics and gradient norm of a step of some losses; the second data rank has no micro-batch."""
    from megatron.core import parallel_state

    import parallel_rl.megatron as M
    from parallel_rl import get_loss

    M.initialize(**sizes)
    data = {name: field for name, field in make_data("ragged").items() if name != "lengths"}
    data["preference_labels"] = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    found = {}
    for name in ("clipped_pg", "kto", "dpo"):
        model = M.wrap_model(make_model(Case(**sizes)))
        model.zero_grad_buffer()
        halves = [{key: field[rows] for key, field in data.items()} for rows in (slice(0, 4), slice(4, 6))]
        mine = [] if idle and parallel_state.get_data_parallel_rank() else halves
        report = M.forward_backward(model, get_loss(name)({}, vocab_size=VOCAB), mine)
        found[name] = report.floats(), M.grad_norm([model]).item()
    M.destroy()
    return found


@pytest.mark.parametrize(("world", "sizes"), [(2, {}), pytest.param(4, {"pp": 2}, marks=pytest.mark.slow)])
def test_a_data_rank_without_a_micro_batch_takes_part(world: int, sizes: dict[str, int]) -> None:
    """It was refused; the numbers are those of the rank that has the data, its optional metrics among them."""
    [want] = run_world(1, _steps_of_idle_ranks, {}, False)
    assert "gen_kl_error" in want["clipped_pg"][0]
    for found in run_world(world, _steps_of_idle_ranks, sizes, True):
        for name, (metrics, norm) in want.items():
            assert found[name][0] == pytest.approx(metrics, rel=1e-9, abs=1e-12)
            assert found[name][1] == pytest.approx(norm, rel=1e-9)


def _norm_in_blocks(rank: int) -> tuple[int, float, float]:
    """The largest float64 copy that the norm makes in blocks of 64 elements, the norm, and that of one float64 vector."""
    from torch.utils._python_dispatch import TorchDispatchMode

    import parallel_rl.megatron as M

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float64 and func.namespace == "aten":
                self.size = max(self.size, out.numel())
            return out

    M.initialize()
    model = M.wrap_model(make_model(Case()).to(torch.float32), ddp=False)
    g = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=g) * 10 ** float(torch.randn((), generator=g))
    whole = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    with patch.object(M.grads, "_BLOCK", 64), Largest() as largest:
        norm = M.grad_norm([model])
    M.destroy()
    return largest.size, norm.item(), whole.norm().item()


def test_the_norm_copies_no_gradient_whole() -> None:
    """Two float64 copies of the largest gradient took 8 GB beside a head of 128k words."""
    [(largest, norm, want)] = run_world(1, _norm_in_blocks)
    assert largest == 64 and norm == pytest.approx(want, rel=1e-13)


def _sharded_steps(rank: int, case: Case) -> tuple[dict[str, Tensor], list[float], int]:
    """Weights by name, gradient norms and bytes of the optimizer's state after two steps of clipped AdamW."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import parallel_rl.megatron as M

    M.initialize(case.tp, case.cp, case.pp)
    model = M.wrap_model(make_model(case, torch.float32), ddp=wrapper(case))
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=0.0, use_distributed_optimizer=case.sharded,
    )  # fmt: skip
    optimizer, norms = get_megatron_optimizer(settings, [model]), []
    for _ in range(2):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        step(case, [model])
        norm = M.grad_norm([model])
        M.clip_grads_([model], 0.5, norm)
        assert M.grad_norm([model]).item() == pytest.approx(min(0.5, norm.item()), rel=1e-5)
        optimizer.step()
        norms.append(norm.item())
    states = [state for part in optimizer.chained_optimizers for state in part.optimizer.state.values()]
    size = sum(x.nbytes for state in states for name, x in state.items() if name != "step")
    weights = {name: parameter.detach().clone() for name, parameter in M.global_parameters([model])}
    M.destroy()
    return weights, norms, size


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(tp=2, sp=True, tied=True, micro_batches=6, overlap=True), marks=pytest.mark.slow),
        pytest.param(Case(cp=2, micro_batches=6), marks=pytest.mark.slow),
        pytest.param(Case(pp=2, tied=True, micro_batches=6), marks=pytest.mark.slow),
    ],
)
def test_the_distributed_optimizer_gives_the_same_weights_with_its_state_shared(case: Case) -> None:
    """Norms and clipping see shards only; two data ranks each keep half of the moments, DP 2 × CP 2 a quarter.

    In seconds the sharded run of checkpointing/test_distributed_optimizer has the plain one's curve, clipped.
    """
    ranks = 4 // (case.tp * case.pp)
    plain = run_world(4, _sharded_steps, case)
    sharded = run_world(4, _sharded_steps, replace(case, sharded=True))
    for (weights, norms, size), (found, of_shards, of_rank) in zip(plain, sharded, strict=True):
        assert of_shards == pytest.approx(norms, rel=1e-6) and max(norms) > 0.5  # it clips
        assert of_rank == pytest.approx(size / ranks, rel=0.25)  # buckets are padded
        for name, weight in weights.items():
            assert (found[name] - weight).abs().max() <= 1e-6, name
    total = sum(size for *_, size in sharded), sum(size for *_, size in plain)
    assert total[0] == total[1] / ranks
