"""Schedules without gradients, rollouts on a context-parallel model, gradient norm, clipping and the optimizer."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import LENGTHS, VOCAB, WIDTH, Case, make_data, make_model, step

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
            bounds = M.packed_bounds(data["lengths"][rows], context_parallel=spread)
            inputs.append(M.packed_input(data["input_ids"][rows], *bounds, context_parallel=spread))
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


def test_forward_only_gives_the_same_logits_on_every_layout_and_as_replicas() -> None:
    reference = run_world(1, _logits, Case(), False, None)[0][0]
    assert reference.abs().max() > 1
    cases = [
        (Case(tp=2, sp=True), True, None),
        (Case(cp=2), True, None),
        (Case(pp=2), False, None),
        (Case(pp=2), False, 2),
        (Case(tp=2, cp=2, sp=True), True, None),
        (Case(cp=2, pp=2), True, None),
    ]
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
        optimizer.zero_grad()
        if case.ddp:
            models[0].zero_grad_buffer()
        report, _ = step(case, models)
        norm = M.grad_norm(models)
        M.clip_grads_(models, max_norm, norm)
        assert M.grad_norm(models).item() == pytest.approx(min(max_norm, norm.item()), rel=1e-5)
        optimizer.step()
        losses.append(report.floats()["loss"])
        norms.append(norm.item())
    first = next(p for n, p in M.global_parameters(models) if n.endswith("input_layernorm.weight"))
    M.destroy()
    return losses, norms, first.detach().clone()


def test_training_is_the_same_with_megatrons_optimizer_and_by_hand() -> None:
    losses, norms, weight = run_world(1, _train, Case(ddp=False, tied=True), 3, 0.5, True)[0]
    assert losses[-1] < losses[0] and max(norms) > 0.5
    for case in (
        Case(tp=2, sp=True, tied=True),
        Case(pp=2, tied=True),
        Case(cp=2, tied=True, rows="packed", per_token=False),
    ):
        for found in run_world(2, _train, case, 3, 0.5, False):
            assert found[0] == pytest.approx(losses, rel=1e-9)
            assert found[1] == pytest.approx(norms, rel=1e-9)
            if case.pp == 1:
                assert torch.allclose(found[2], weight, rtol=1e-9)


def _distributed_optimizer(rank: int) -> str:
    from megatron.core.distributed import DistributedDataParallelConfig

    import parallel_rl.megatron as M

    M.initialize()
    model = M.wrap_model(make_model(Case()), ddp=DistributedDataParallelConfig(use_distributed_optimizer=True))
    with pytest.raises(ValueError, match="use_distributed_optimizer") as told:
        M.grad_norm([model])
    M.destroy()
    return str(told.value)


def test_the_norm_refuses_gradients_that_are_whole_on_their_shard_only() -> None:
    assert len(set(run_world(2, _distributed_optimizer))) == 1
