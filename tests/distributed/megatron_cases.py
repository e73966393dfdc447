"""One training step on the real megatron-core in any layout, and how far its gradients are from a given reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tests.megatron.release import release_experts

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel

    from parallel_rl.losses.core.base import LossFn
    from parallel_rl.megatron import MicroBatch, StepReport

AUX_COEFFICIENT, Z_COEFFICIENT = 0.5, 0.1
VOCAB, WIDTH, MICRO_BATCHES = 31, 16, 6  # an odd vocabulary: the head is padded under tensor parallelism
LENGTHS = (13, 16, 5, 9, 16, 3)

Batch = dict[str, Tensor]
What = Literal["ragged", "masked micro-batch", "one context rank"]


@dataclass(frozen=True)
class Case:
    """A layout and the ways in which one step can be run on it."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    chunks: int = 1  # of a pipeline stage, under the interleaved schedule
    sp: bool = False
    rows: Literal["padded", "packed", "padding"] = "padded"
    micro_batches: int = 3  # over all data ranks
    position: Literal["rope", "learned_absolute"] = "rope"
    tied: bool = False
    groups: int = 2  # key and value heads of the rotary model
    per_token: bool = True
    ddp: bool = True
    overlap: bool = False  # of gradient reduction with the backward
    sharded: bool = False  # gradients as the distributed optimizer wants them
    data: What = "ragged"
    loss: Literal["nll", "pg", "cov"] = "nll"  # cov reads statistics of the whole step
    experts: Literal["", "alltoall", "allgather"] = ""  # four of them with auxiliary losses, and how tokens reach them
    balance: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = "aux_loss"  # of experts
    idle: bool = False  # all data ranks but the first have no micro-batch
    ep: int = 1
    etp: int = 1
    fused: bool = False  # the loss projects the hidden states itself
    wgrad_fusion: bool = False  # with it the weight's gradient goes straight to main_grad
    cut: Literal["zigzag", "contiguous"] = "zigzag"  # of rows over context ranks
    dynamic: bool = False  # micro-batches on context groups of their own, of two, four and one of the four data ranks
    recompute: bool = False
    mtp: Literal["", "token-mean", "seq-mean-token-mean"] = ""  # two heads of multi-token prediction, how they average

    @property
    def model(self) -> tuple[object, ...]:
        of_batch = (
            self.micro_batches if self.balance == "aux_loss" else 0
        )  # that one's auxiliary losses are of a micro-batch
        experts = (self.balance, of_batch) if self.experts else ()
        return self.position, self.tied, self.groups, self.layers, experts

    @property
    def layers(self) -> int:
        return 2 * self.chunks

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp


@dataclass
class Outcome:
    """What one step gave, on one process: the loss, the gradient norm and the gradients by global name."""

    loss: float
    norm: float
    grads: dict[str, Tensor]


def make_data(what: What) -> Batch:
    """Six ragged rows, or full ones whose valid tokens are predicted from the middle half only (one zigzag rank of
    two).
    """
    g = torch.Generator().manual_seed(5)
    rows = len(LENGTHS)
    lengths = torch.full((rows,), WIDTH) if what == "one context rank" else torch.tensor(LENGTHS)
    column = torch.arange(WIDTH)
    mask = (column < lengths[:, None]) & (torch.rand(rows, WIDTH, generator=g) > 0.2)
    if what == "one context rank":
        mask = ((column > WIDTH // 4) & (column <= 3 * WIDTH // 4)).expand(rows, WIDTH)
    sample_mask = torch.ones(rows)
    if what == "masked micro-batch":
        sample_mask[2:4] = 0  # all rows of the second of three micro-batches
    logprobs = -torch.rand(rows, WIDTH, generator=g, dtype=torch.float64) * 3
    return {
        "input_ids": torch.randint(0, VOCAB, (rows, WIDTH), generator=g),
        "lengths": lengths,
        "token_mask": mask.to(torch.float64),
        "sample_mask": sample_mask.to(torch.float64),
        "advantages": torch.randn(rows, WIDTH, generator=g, dtype=torch.float64),
        "prev_logprobs": logprobs,
        "generation_logprobs": logprobs + 0.1 * torch.randn(rows, WIDTH, generator=g, dtype=torch.float64),
        "reference_policy_logprobs": logprobs + 0.3 * torch.randn(rows, WIDTH, generator=g, dtype=torch.float64),
    }


def make_model(case: Case, dtype: torch.dtype = torch.float64, seed: int = 3, chunk: int | None = None) -> GPTModel:
    """A small model with grouped queries and biases where learned positions are asked for (a GPT-2), else a Llama."""
    import parallel_rl.megatron as M
    from parallel_rl.config.architecture import Experts

    old = case.position == "learned_absolute"
    overrides: dict[str, object] = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3} if case.mtp else {}
    if case.experts:
        overrides |= {"moe_token_dispatcher_type": case.experts, "moe_router_load_balancing_type": case.balance}
        overrides |= {"moe_z_loss_coeff": Z_COEFFICIENT} if case.balance == "aux_loss" else {}
        overrides |= {} if case.experts == "alltoall" else {"variable_seq_lengths": False}
    config = M.build_config(
        num_layers=case.layers,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=4 if old else case.groups,
        dtype=dtype,
        sequence_parallel=case.sp,
        calculate_per_token_loss=case.per_token,
        normalization="LayerNorm" if old else "RMSNorm",
        gated=not old,
        bias=old,
        qk_norm=not old,
        init_std=0.3,
        recompute=case.recompute,
        virtual_pp=None if chunk is None else case.chunks,
        cp_layout=case.cut,
        experts=Experts(4, ffn_hidden=8) if case.experts else None,
        aux_loss=AUX_COEFFICIENT if case.experts else 0.0,
        overrides=overrides,
    )
    return M.build_model(
        config, VOCAB, WIDTH, position_embedding=case.position, tie_embeddings=case.tied, seed=seed, vp_stage=chunk
    )


def oracle(rank: int, cases: list[Case]) -> list[Outcome]:
    """One process, no schedule, no wrapper, row by row, one step's loss for each case."""
    import parallel_rl.megatron as M

    M.initialize()
    outcomes = []
    for case in cases:
        model = make_model(replace(case, sp=False, recompute=False, experts="alltoall" if case.experts else ""))
        model.config.moe_aux_loss_coeff, model.config.moe_z_loss_coeff = 0.0, None  # added by hand
        whole = make_data(case.data)
        n_tokens = (whole["token_mask"][:, 1:] * whole["sample_mask"][:, None]).sum()
        if case.loss == "nll":
            loss = torch.zeros((), dtype=torch.float64)
            for i, length in enumerate(whole["lengths"].tolist()):
                row = whole["input_ids"][i : i + 1, :length]
                logprobs = M.forward_logits(model, M.padded_input(row))[0, :-1, :VOCAB].log_softmax(-1)
                chosen = logprobs.gather(-1, row[0, 1:, None])[:, 0]
                loss = loss - (chosen * whole["token_mask"][i, 1:length] * whole["sample_mask"][i]).sum() / n_tokens
                if case.mtp:
                    loss = loss + 0.3 / 2 * _heads_of_row(model, case, whole, i, n_tokens)
            reported = loss.item()
            if case.experts:
                added = _auxiliary_losses if case.balance == "aux_loss" else _balance
                loss = loss + added(model, case, whole)
        else:
            from parallel_rl.testing.cases import step_statistics

            fn, logits = make_loss(case), M.forward_logits(model, M.padded_input(whole["input_ids"]))
            counts = whole["sample_mask"].sum(), n_tokens
            call = (logits, whole, *counts)
            loss, _ = fn(*call, statistics=step_statistics([(fn, call)]))
            reported = loss.item()
        loss.backward()
        grads = {name: p.grad for name, p in M.global_parameters([model])}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        outcomes.append(Outcome(reported, norm.item(), {name: g.clone() for name, g in grads.items()}))
    M.destroy()
    return outcomes


def _heads_of_row(model: GPTModel, case: Case, whole: Batch, i: int, n_tokens: Tensor) -> Tensor:
    """A row's part of both heads' losses: position t of head k speaks of token t + 1 + k, where that one carries loss."""
    import parallel_rl.megatron as M

    length = int(whole["lengths"][i])
    row, mask = whole["input_ids"][i, :length], whole["token_mask"][i, :length] * whole["sample_mask"][i]
    output = M.forward_logits(model, M.padded_input(row[None]), mtp=True)[0, :, :VOCAB].log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for k in (1, 2):
        logprobs, carries = output[k * length : (k + 1) * length], mask[k + 1 :]
        chosen = logprobs[: max(length - 1 - k, 0)].gather(-1, row[k + 1 :, None])[:, 0]
        count = n_tokens if case.mtp == "token-mean" else whole["sample_mask"].sum() * carries.sum().clamp(min=1)
        total = total - (chosen * carries).sum() / count
    return total


def _gates(model: GPTModel) -> list[Tensor]:
    """A list to which the model's routers add their logits [S, B, E] from now on."""
    from megatron.core.transformer.moe.router import TopKRouter

    logits: list[Tensor] = []
    for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
        gating = TopKRouter.gating.__get__(router)
        router.gating = lambda x, gating=gating: (logits.append(gating(x)), logits[-1])[1]
    return logits


def _balance(model: GPTModel, case: Case, whole: Batch) -> Tensor:
    """E/K · Σ_e (choices of e) · (sum of e's probability) / n², the mean over sequences, or of all their n tokens. A sequence
    ends with its last token that carries loss.
    """
    import parallel_rl.megatron as M

    logits = _gates(model)
    carries = (whole["token_mask"] * whole["sample_mask"][:, None])[:, 1:] > 0
    found: list[list[Tensor]] = []
    for row, mask in zip(whole["input_ids"], carries, strict=True):
        if mask.any():
            del logits[:]
            length = int(mask.nonzero().max()) + 2
            M.forward_logits(model, M.padded_input(row[None, :length]), mtp=bool(case.mtp))
            # head k reads k tokens ahead, and has nothing to read at the last k
            ends = [length] * case.layers + [length - 1 - k for k in range(len(logits) - case.layers)]
            found.append([each[: max(end, 0), 0] for each, end in zip(logits, ends, strict=True)])
    if case.balance == "global_aux_loss":
        found = [[torch.cat(parts) for parts in zip(*found, strict=True)]]
    total = torch.zeros((), dtype=torch.float64)
    for sequences in zip(*found, strict=True):
        full = [each for each in sequences if len(each)]
        for each in full:
            chosen = torch.zeros_like(each).scatter(1, each.topk(2, dim=1).indices, 1.0)
            balance = 4 / 2 * (chosen.sum(0) * each.softmax(1).sum(0)).sum() / len(each) ** 2
            total = total + AUX_COEFFICIENT * balance / len(full)
    return total


def _auxiliary_losses(model: GPTModel, case: Case, whole: Batch) -> Tensor:
    """The mean over micro-batches of the routers' losses on all of their rows' tokens, whichever carry loss:
    E · Σ_e (share of the tokens' choices that e got) · (mean probability of e), and the mean of logsumexp².
    """
    import parallel_rl.megatron as M

    logits = _gates(model)
    batches = split(whole, case.micro_batches)
    for batch in batches:
        M.forward_logits(model, M.padded_input(batch["input_ids"]))
    assert len(logits) == case.micro_batches * case.layers
    total = torch.zeros((), dtype=torch.float64)
    for each in logits:
        rows = each.flatten(0, -2)
        chosen = torch.zeros_like(rows).scatter(1, rows.topk(2, dim=1).indices, 1.0)
        balance = 4 * (chosen.mean(0) / 2 * rows.softmax(1).mean(0)).sum()
        total = total + AUX_COEFFICIENT * balance + Z_COEFFICIENT * rows.logsumexp(1).square().mean()
    return total / len(batches)


def make_loss(case: Case) -> LossFn:
    from parallel_rl import ClippedPGLossFn, NLLLoss, PolicyLossFn

    if case.loss == "nll":
        return NLLLoss(vocab_size=VOCAB, cp_layout=case.cut)
    if case.loss == "cov":
        return PolicyLossFn({"surrogate": {"name": "kl_cov", "fraction": 0.2}}, vocab_size=VOCAB, cp_layout=case.cut)
    options = {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True}
    return ClippedPGLossFn(options, vocab_size=VOCAB, cp_layout=case.cut)


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


def split(batch: Batch, parts: int) -> list[Batch]:
    """The rows in as many micro-batches, in order."""
    rows = len(LENGTHS) // parts
    return [{name: field[i * rows : (i + 1) * rows] for name, field in batch.items()} for i in range(parts)]


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
