"""Cases of one training step on the real megatron-core: a layout and ways to run it, and the data, model and loss of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from parallel_rl.losses.core.base import LossFn

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

    def noise() -> Tensor:
        return torch.randn(rows, WIDTH, generator=g, dtype=torch.float64)

    return {
        "input_ids": torch.randint(0, VOCAB, (rows, WIDTH), generator=g),
        "lengths": lengths,
        "token_mask": mask.to(torch.float64),
        "sample_mask": sample_mask.to(torch.float64),
        "advantages": torch.randn(rows, WIDTH, generator=g, dtype=torch.float64),
        "prev_logprobs": logprobs,
        "generation_logprobs": (logprobs + 0.1 * noise()).clamp(max=0),
        "reference_policy_logprobs": (logprobs + 0.3 * noise()).clamp(max=0),
    }


def split(batch: Batch, parts: int) -> list[Batch]:
    """The rows in as many micro-batches, in order."""
    rows = len(LENGTHS) // parts
    return [{name: field[i * rows : (i + 1) * rows] for name, field in batch.items()} for i in range(parts)]


def make_model(case: Case, dtype: torch.dtype = torch.float64, chunk: int | None = None) -> GPTModel:
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
        config, VOCAB, WIDTH, position_embedding=case.position, tie_embeddings=case.tied, seed=3, vp_stage=chunk
    )


def make_loss(case: Case) -> LossFn:
    from parallel_rl import ClippedPGLossFn, NLLLoss, PolicyLossFn

    if case.loss == "nll":
        return NLLLoss(vocab_size=VOCAB, cp_layout=case.cut)
    if case.loss == "cov":
        return PolicyLossFn({"surrogate": {"name": "kl_cov", "fraction": 0.2}}, vocab_size=VOCAB, cp_layout=case.cut)
    options = {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True}
    return ClippedPGLossFn(options, vocab_size=VOCAB, cp_layout=case.cut)
