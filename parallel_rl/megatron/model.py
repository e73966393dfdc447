"""GPT models of megatron-core, on GPUs with Transformer Engine and on CPUs without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from parallel_rl.config.architecture import RopeScaling
from parallel_rl.groups import current_device
from parallel_rl.megatron.cpu import plain_torch
from parallel_rl.megatron.layers import SelfAttentionCore, replace_head
from parallel_rl.megatron.model_config import CUT, has_transformer_engine
from parallel_rl.megatron.weights import initialize_weights, mark_parameters, mark_sinks


class ShardedNorm(torch.nn.Module):
    """RMSNorm or LayerNorm (`config.normalization`) whose parameters are marked for sequence parallelism.

    RMSNorm: y = x / sqrt(mean(x²) + ε) · w (arXiv:1910.07467). LayerNorm: y = (x − mean) / sqrt(var + ε) · w + b. Computed in
    max(float32, dtype of x). Under sequence parallelism Megatron sums the marked weights' gradients over tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(
                f"normalization = {config.normalization!r} is not supported here; choose 'RMSNorm' or 'LayerNorm'"
            )
        self.shape = (hidden_size,)
        self.eps = eps
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @plain_torch()
    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(dtype) + 1 if self.zero_centered else self.weight.to(dtype)
        if self.bias is None:
            y = torch.nn.functional.rms_norm(x.to(dtype), self.shape, weight, self.eps)
        else:
            y = torch.nn.functional.layer_norm(x.to(dtype), self.shape, weight, self.bias.to(dtype), self.eps)
        return y.to(x.dtype)


PositionEmbedding = Literal["rope", "learned_absolute"]
#: fields of TransformerConfig without effect on the layers of `layer_spec`, with the value that turns them off
_OTHER_LAYERS = {
    "experimental_attention_variant": None,
    "heterogeneous_block_specs": False,
    "moe_layer_freq": 1,
    "multi_latent_attention": False,
    "qk_l2_norm": False,
    "use_kitchen": False,
    "use_te_activation_func": False,
}


def layer_spec(config: TransformerConfig, *, prefix_trees: bool = False) -> ModuleSpec | TransformerBlockSubmodules:
    """Return Transformer Engine's layers if possible, else Megatron's with our norm and attention.

    >>> layer_spec(config).module.__name__
    'TransformerLayer'

    Args:
        prefix_trees: use `SelfAttentionCore` in Transformer Engine's layers as well; their own attention takes no prefix trees.

    Raises:
        ValueError: a field for other layers, which would silently have no effect.
    """
    for name, value in _OTHER_LAYERS.items():
        if (actual := getattr(config, name, value)) != value:
            raise ValueError(
                f"{name} = {actual!r} has no effect on these layers; build the GPTModel from Megatron's spec for it"
            )
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 reads it, but does not define it without the engine
    if has_transformer_engine(config.params_dtype):
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        if prefix_trees:
            spec.submodules.self_attention.submodules.core_attention = SelfAttentionCore
        return spec
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = ShardedNorm
    attention = layer.self_attention.submodules
    attention.core_attention = SelfAttentionCore
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = ShardedNorm
    return spec


def _mtp_spec(config: TransformerConfig, vp_stage: int | None) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the heads of multi-token prediction, on the last stage of a config with `mtp_num_layers`."""
    if not config.mtp_num_layers:
        return None
    engine = has_transformer_engine(config.params_dtype)
    block = get_gpt_mtp_block_spec(config, layer_spec(config), engine, vp_stage=vp_stage)
    if block is not None and not engine:
        for spec in block.layer_specs:
            spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = ShardedNorm
    return block


def padded_vocab_size(vocab_size: int, multiple: int = 1) -> int:
    """Round `vocab_size` up to a multiple of `multiple` × the tensor parallel size.

    >>> padded_vocab_size(31, multiple=8)
    32
    """
    unit = multiple * parallel_state.get_tensor_model_parallel_world_size()
    return -(-vocab_size // unit) * unit


def build_model(
    config: TransformerConfig,
    vocab_size: int,
    max_sequence_length: int,
    *,
    position_embedding: PositionEmbedding = "rope",
    rotary_base: float = 10000,
    rotary_percent: float = 1.0,
    rope_scaling: RopeScaling | None = None,
    tie_embeddings: bool = False,
    vocab_multiple: int = 1,
    scalar_head: bool = False,
    seed: int = 0,
    draw_weights: bool = True,
    prefix_trees: bool = False,
    vp_stage: int | None = None,
) -> GPTModel:
    """Build this rank's part of a GPT decoder; its weights depend on (seed, name), not on the layout.

    >>> build_model(config, vocab_size=8, max_sequence_length=4).vocab_size
    8

    Args:
        config: from `build_config`.
        vocab_size: V. Embedding and head are padded to a multiple of `vocab_multiple` × tp; pass the true V to losses as
            `vocab_size=`, which then exclude the padding.
        max_sequence_length: the longest sequence (rows of learned positions).
        rope_scaling: Llama 3.1's stretching of rotary positions.
        tie_embeddings: one matrix for embedding and LM head.
        scalar_head: one output per position (`ScalarHead`) in place of logits: a critic or a reward model.
        seed: of the weights. draw_weights: False leaves matrices uninitialised, for a later load.
        prefix_trees: the model will run on rows of prefix trees, see `layer_spec`.
        vp_stage: which model chunk of this stage, for an interleaved schedule.

    Returns:
        The model: on the last pipeline stage its forward returns logits [B, S/cp, V_padded/tp] (or [B, S/cp, 1]).

    Raises:
        ValueError: a size below 1; an unknown position embedding; rope_scaling without rotary positions; tied embeddings or
            multi-token prediction with a scalar head.
    """
    if vocab_size < 1 or max_sequence_length < 1:
        raise ValueError(
            f"vocab_size = {vocab_size} and max_sequence_length = {max_sequence_length} must be at least 1"
        )
    if position_embedding not in ("rope", "learned_absolute"):
        raise ValueError(
            f"position_embedding = {position_embedding!r} is not valid; choose 'rope' or 'learned_absolute'"
        )
    if rope_scaling is not None and position_embedding != "rope":
        raise ValueError(
            f"rope_scaling = {rope_scaling} has no effect with position_embedding = {position_embedding!r}"
        )
    if scalar_head and tie_embeddings:
        raise ValueError("tie_embeddings = True is incompatible with scalar_head = True, which has no matrix to tie")
    if scalar_head and config.mtp_num_layers:
        raise ValueError(
            f"mtp_num_layers = {config.mtp_num_layers} is incompatible with scalar_head = True, which predicts no token"
        )
    contiguous = getattr(config, CUT, "zigzag") == "contiguous" and config.context_parallel_size > 1
    if contiguous and CUT not in type(config).__dataclass_fields__ and position_embedding == "rope":
        raise ValueError(
            "cp_layout = 'contiguous' needs position_embedding = 'learned_absolute': this megatron-core has rotary positions "
            "for zigzag rows only"
        )
    if contiguous and config.mtp_num_layers:
        raise ValueError("cp_layout = 'contiguous' is incompatible with mtp_num_layers: Megatron rolls tokens zigzag")
    spec = layer_spec(config, prefix_trees=prefix_trees)
    if not has_transformer_engine(config.params_dtype):
        # Megatron's own final norm needs TE or Apex for sequence parallelism
        layers = get_num_layers_to_build(config, vp_stage)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=ShardedNorm)
    with contextlib.nullcontext() if draw_weights else _not_drawn(config):
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocab_size(vocab_size, vocab_multiple),
            max_sequence_length=max_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=tie_embeddings,
            position_embedding_type=position_embedding,
            rotary_base=rotary_base,
            rotary_percent=rotary_percent,
            mtp_block_spec=_mtp_spec(config, vp_stage),
            vp_stage=vp_stage,
        )
    if rope_scaling is not None:
        rope = model.rotary_pos_emb
        rope.inv_freq = rope._apply_scaling(rope.inv_freq, **vars(rope_scaling))
    if scalar_head:
        replace_head(model)
    if tie_embeddings and model.mtp_process and not model.pre_process:
        # MTP heads look tokens up, so this stage's embedding is the head; Megatron allocates a second that is never read
        model.output_layer.register_parameter("weight", None)
    model.to(device=current_device())
    # Megatron makes learned positions in torch's default dtype, and only Float16Module converts them
    model.to(dtype=config.params_dtype)
    mark_parameters(model)
    # for `describe_model`; Megatron does not keep these
    model.true_vocab_size, model.rope_scaling, model.scalar_head = vocab_size, rope_scaling, scalar_head
    if draw_weights:
        initialize_weights([model], seed, vocab_size)
    return model


@contextlib.contextmanager
def _not_drawn(config: TransformerConfig) -> Iterator[None]:
    """Let Megatron mark a new model's parameters as cut without drawing their values."""
    names = [field for field in type(config).__dataclass_fields__ if field.endswith("init_method")]
    before = {name: getattr(config, name) for name in names}
    for name, method in before.items():
        if method is not None:
            setattr(config, name, lambda tensor: tensor)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(config, name, method)


def wrap_model(model: MegatronModule, *, ddp: bool | DistributedDataParallelConfig = True) -> MegatronModule:
    """Wrap a model in `Float16Module` if its config has bf16 or fp16, then in Megatron's DDP.

    With DDP the config gets `finalize_model_grads_func` (and `no_sync_func` if reductions overlap). `ddp`: True for gradient
    buffers in max(float32, dtype) without overlap, a config for anything else, False for none.

    >>> type(wrap_model(build_model(config, 8, 4))).__name__
    'DistributedDataParallel'
    """
    module = model
    mark_sinks([model])
    if model.config.bf16 or model.config.fp16:
        module = Float16Module(model.config, module)
    if ddp is False:
        return module
    default = DistributedDataParallelConfig(grad_reduce_in_fp32=model.config.params_dtype.itemsize < 4)
    settings = ddp if isinstance(ddp, DistributedDataParallelConfig) else default
    wrapped = DistributedDataParallel(model.config, settings, module)
    model.config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        chunks = model.config.no_sync_func or []
        model.config.no_sync_func = wrapped.no_sync if model.vp_stage is None else [*chunks, wrapped.no_sync]
    return wrapped


def gather_parameters(models: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Gather the parameters that `overlap_param_gather` leaves to the next forward; on every data rank."""
    for model in [models] if isinstance(models, torch.nn.Module) else models:
        if isinstance(model, DistributedDataParallel) and model.use_forward_hook:
            model.start_param_sync(force_sync=True)


def unwrap(model: torch.nn.Module) -> GPTModel:
    """Return the GPTModel inside its wrappers.

    >>> type(unwrap(model)).__name__
    'GPTModel'
    """
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    return model
