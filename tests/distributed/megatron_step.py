"""One training step on the real megatron-core in any layout, and how far its gradients are from a given reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from parallel_rl.testing.worker import release_experts
from tests.distributed.megatron_cases import LENGTHS, VOCAB, Case, make_data, make_loss, make_model, split
from tests.distributed.megatron_oracle import Outcome

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig

    from parallel_rl.megatron import MicroBatch, StepReport


def step(case: Case, models: list[torch.nn.Module] | None = None) -> tuple[StepReport, list[torch.nn.Module]]:
    """One forward and backward of the whole batch through Megatron's schedule: its report, and the model."""
    from megatron.core import parallel_state

    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss

    if models is None:
        places = range(case.chunks) if case.chunks > 1 else [None]
        models = [M.wrap_model(make_model(case, chunk=place), ddp=wrapper(case)) for place in places]
    head = M.fuse_head(models[-1], budget=1 << 13) if case.fused else None
    last = M.unwrap(models[-1])
    if case.wgrad_fusion and last.post_process:  # the other layers' kernels for it need Apex
        last.output_layer.gradient_accumulation_fusion = True
    if case.dynamic:
        batches = _on_groups(case)
        return M.forward_backward(models, make_loss(case), batches, head=head), models
    size = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    batches = split(make_data(case.data), case.micro_batches)
    batches = batches[rank::size] if not case.idle else [] if rank else batches
    if case.rows != "padded":
        multiple = 8 if case.rows == "padding" else 1
        batches = [M.packed_batch(b, b["lengths"], multiple=multiple, cp_layout=case.cut) for b in batches]
    mtp_loss = NLLLoss({"aggregation": case.mtp}, vocab_size=VOCAB) if case.mtp else None
    return M.forward_backward(models, make_loss(case), batches, head=head, mtp_loss=mtp_loss), models


def wrapper(case: Case) -> bool | DistributedDataParallelConfig:
    from megatron.core.distributed import DistributedDataParallelConfig

    if not (case.overlap or case.sharded):
        return case.ddp
    # small buckets: several on each rank, whose shards begin and end within parameters
    return DistributedDataParallelConfig(
        overlap_grad_reduce=case.overlap, use_distributed_optimizer=case.sharded, bucket_size=1500
    )


def own_shards(models: list[torch.nn.Module]) -> Iterator[tuple[torch.nn.Parameter, slice]]:
    """Each parameter of which this data rank holds the reduced gradient, and the range of its flat elements."""
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // buffer.data_parallel_group.size()
                first = bucket.offset + buffer.data_parallel_group.rank() * size
                for parameter, (start, stop, index) in buffer.param_index_map.items():
                    inside = slice(max(first - start, 0), min(first + size, stop) - start)
                    if index == bucket.bucket_id and inside.start < inside.stop:
                        yield parameter, inside


def _on_groups(case: Case) -> list[MicroBatch]:
    """This rank's micro-batches of one row each: two rows on two ranks each, one on all four, three on a rank alone."""
    import torch.distributed as dist

    import parallel_rl.megatron as M

    found, rows = [], iter(split(make_data(case.data), len(LENGTHS)))
    for ranks in ([0, 1], [2, 3], [0, 1, 2, 3], [0], [1], [2]):
        group, data = dist.new_group(ranks) if len(ranks) > 1 else None, next(rows)
        if dist.get_rank() in ranks:
            if case.rows == "padded":
                found.append(M.padded_batch(data, context_group=group))
            else:
                found.append(M.packed_batch(data, data["lengths"], context_group=group))
    return found


def compare(rank: int, pairs: list[tuple[Case, Outcome]]) -> list[dict[str, float]]:
    """Each case's largest relative error against its reference on this rank: of the loss, the gradient norm and any
    gradient.
    """
    import parallel_rl.megatron as M

    errors, groups = [], None
    for case, reference in pairs:
        if groups != (case.tp, case.cp, case.pp, case.ep, case.etp, case.chunks):
            groups = (case.tp, case.cp, case.pp, case.ep, case.etp, case.chunks)
            M.initialize(
                *groups[:3],
                ep=case.ep,
                etp=case.etp if case.experts else None,
                virtual_pp=case.chunks if case.chunks > 1 else None,
            )
        report, models = step(case)
        found = report.floats()
        loss = found["loss"] + (0.3 / 2 * (found["mtp_1/loss"] + found["mtp_2/loss"]) if case.mtp else 0)
        worst = {"loss": abs(loss - reference.loss) / abs(reference.loss)}
        worst["norm"] = abs(M.grad_norm(models).item() - reference.norm) / reference.norm
        names = {parameter: name for name, parameter in M.global_parameters(models)}
        shards = own_shards(models) if case.sharded else ((parameter, slice(None)) for parameter in names)
        compared = 0
        for parameter, inside in shards:
            name, grad = names[parameter], M.gradient(parameter)
            assert grad is not None
            whole = reference.grads[name]
            difference = (grad - M.local_shard(whole, parameter)).flatten()[inside]
            error = difference.norm() / whole.norm().clamp(min=1e-3 * reference.norm)
            worst[name] = max(worst.get(name, 0.0), error.item())
            compared += difference.numel()
        assert compared, "a rank without parameters compares nothing"
        errors.append(worst)
        release_experts()
    M.destroy()
    return errors
