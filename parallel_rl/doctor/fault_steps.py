"""Tiny models and Megatron scripts that show known faults of megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import parallel_rl.megatron as M
from parallel_rl.testing.whole_step.shrink import VOCABULARY

_LENGTH = 16
_Output = tuple[Tensor, Callable[..., object]]


def tiny_config(**fields: object) -> TransformerConfig:
    """Return a config of two layers with these other fields."""
    return TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, normalization="RMSNorm",
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, **fields,
    )  # fmt: skip


def plain(config: TransformerConfig, vp_stage: int | None = None, pre_process: bool = True) -> GPTModel:
    """Build a model on layers that take every layout on a CPU."""
    return M.build_model(config, VOCABULARY, 64, vp_stage=vp_stage)


def gathered(config: TransformerConfig) -> GPTModel:
    """Build a model whose logits are gathered over tensor ranks before its own loss."""
    model = plain(config)
    model.output_layer.gather_output = True
    return model


def unsharded(config: TransformerConfig) -> GPTModel:
    """Build a model that gives all logits on every tensor rank."""
    model = plain(config)
    model.parallel_output, model.output_layer.gather_output = False, True
    return model


def with_sinks(config: TransformerConfig) -> GPTModel:
    """Build a model of Megatron's own layers, the only local ones with attention sinks."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, spec, VOCABULARY, 64, position_embedding_type="rope")


def heads() -> TransformerConfig:
    return tiny_config(mtp_num_layers=1, mtp_loss_scaling_factor=0.1)


def heads_recomputed() -> TransformerConfig:
    return tiny_config(mtp_num_layers=1, mtp_loss_scaling_factor=0.1, distribute_saved_activations=True)


def sinks() -> TransformerConfig:
    return tiny_config(softmax_type="learnable")


def experts(balance: str = "aux_loss") -> TransformerConfig:
    return tiny_config(
        num_moe_experts=4, moe_ffn_hidden_size=16, moe_router_topk=2, moe_aux_loss_coeff=0.1,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type=balance,
    )  # fmt: skip


def experts_in_sequences() -> TransformerConfig:
    return experts("seq_aux_loss")


def token_sums(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum, the tokens and the log, as Megatron-LM's loss callback does."""
    total, tokens = (output.flatten() * loss_mask.flatten()).sum(), loss_mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack((total.detach(), tokens.to(total)))}


def masked_experts(data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> _Output:
    """Run a forward step with a padding mask for the routers."""
    batch = next(data_iterator)
    mask = batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], padding_mask=mask == 0)
    return output, partial(token_sums, mask)


def packed_balance() -> float:
    """Return the relative difference of the routers' balance gradient between packed and padded rows."""
    M.initialize()
    config = experts("seq_aux_loss")
    for name, value in (("use_cpu_initialization", True), ("params_dtype", torch.float64)):
        setattr(config, name, value)
    model = M.build_model(config, VOCABULARY, 64)
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (2, _LENGTH), generator=g)
    positions = torch.arange(_LENGTH).expand_as(ids).contiguous()
    bounds = torch.tensor([0, _LENGTH, 2 * _LENGTH], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=_LENGTH, max_seqlen_kv=_LENGTH
    )
    gradients = []
    for rows in (ids, ids.view(1, -1)):
        model.zero_grad()
        more = {} if len(rows) > 1 else {"packed_seq_params": packed}
        (0.0 * model(rows, positions.view_as(rows), None, **more).sum()).backward()
        routers = [p.grad for name, p in model.named_parameters() if ".router.weight" in name]
        gradients.append(torch.cat([grad.flatten() for grad in routers if grad is not None]))
    M.destroy()
    right, got = gradients
    return float((got - right).norm() / right.norm())
