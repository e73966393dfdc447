"""Integration of megatron-core: one optimizer step's forward and backward in a call, and its parts.

In the order of a training script:

- a layout and a model: `initialize`, `build_config`, `build_model`, `wrap_model`
- micro-batches: `padded_batch`, `packed_batch`, `tree_batch`
- one step: `forward_backward`, then `grad_norm`, `clip_grads_`, `copy_main_grads` for an optimizer of torch; with `fuse_head`
  the loss projects hidden states itself
- forward passes without gradient: `forward_only`, `forward_logits`, `broadcast_from_last_stage`; `replicas` for sampling
- for a loop that calls Megatron's schedules: `megatron_loss_func`, `numerator_denominator`, `count_routed`,
  `ModelInput`, `sum_gradients`
- parts of models, weights by name: `layer_spec`, `ScalarHead`, `global_parameters`, ...

This page lists the functions; each class has its own help, e.g. `help(parallel_rl.megatron.MicroBatch)`.
The examples in this package start from

    >>> initialize()
    >>> config = build_config(num_layers=1, hidden_size=16, num_attention_heads=2)
    >>> model = wrap_model(build_model(config, vocab_size=8, max_sequence_length=4))
    >>> ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
    >>> data = {"input_ids": ids, "token_mask": ids > 0, "sample_mask": torch.ones(2)}
"""

import importlib
import warnings

from parallel_rl.megatron.cpu import without_builds

with warnings.catch_warnings(), without_builds():
    # messages of a machine without Transformer Engine, Apex or a GPU
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed|Failed to create unified memory")
    for _name in ("models.gpt.gpt_layer_specs", "optimizer"):
        importlib.import_module(f"megatron.core.{_name}")

from parallel_rl.megatron.auxiliary import RoutedTokens as RoutedTokens
from parallel_rl.megatron.auxiliary import count_routed
from parallel_rl.megatron.cpu import enable_cpu
from parallel_rl.megatron.forward import broadcast_from_last_stage, forward_only, is_last_stage
from parallel_rl.megatron.forward import forward_logits as forward_logits
from parallel_rl.megatron.grads import clip_grads_, copy_main_grads, grad_norm, gradient, sum_gradients
from parallel_rl.megatron.layers import ScalarHead as ScalarHead
from parallel_rl.megatron.layers import SelfAttentionCore as SelfAttentionCore
from parallel_rl.megatron.layers import copy_trunk
from parallel_rl.megatron.lm_head import FusedHead as FusedHead
from parallel_rl.megatron.lm_head import fuse_head
from parallel_rl.megatron.loss import LossReport as LossReport
from parallel_rl.megatron.loss import megatron_loss_func, numerator_denominator
from parallel_rl.megatron.micro_batch import MicroBatch as MicroBatch
from parallel_rl.megatron.micro_batch import packed_batch, padded_batch, tree_batch
from parallel_rl.megatron.model import ShardedNorm as ShardedNorm
from parallel_rl.megatron.model import (
    build_model,
    layer_spec,
    padded_vocab_size,
    unwrap,
    wrap_model,
)
from parallel_rl.megatron.model_config import build_config, has_transformer_engine
from parallel_rl.megatron.model_input import ModelInput as ModelInput
from parallel_rl.megatron.model_input import packed_bounds, packed_input, padded_input, tree_input
from parallel_rl.megatron.process_groups import ALONE as ALONE
from parallel_rl.megatron.process_groups import Context as Context
from parallel_rl.megatron.process_groups import destroy, initialize, replicas
from parallel_rl.megatron.step import StepReport as StepReport
from parallel_rl.megatron.step import forward_backward
from parallel_rl.megatron.weights import global_parameters, initialize_weights, local_shard, whole_tensor

__all__ = [  # functions, in the order of the docstring: `help` prints classes first, with all inherited members
    "initialize",
    "destroy",
    "enable_cpu",
    "build_config",
    "has_transformer_engine",
    "build_model",
    "padded_vocab_size",
    "wrap_model",
    "unwrap",
    "padded_batch",
    "packed_batch",
    "tree_batch",
    "forward_backward",
    "gradient",
    "grad_norm",
    "clip_grads_",
    "copy_main_grads",
    "fuse_head",
    "forward_only",
    "forward_logits",
    "is_last_stage",
    "broadcast_from_last_stage",
    "replicas",
    "megatron_loss_func",
    "numerator_denominator",
    "count_routed",
    "padded_input",
    "packed_input",
    "tree_input",
    "packed_bounds",
    "sum_gradients",
    "copy_trunk",
    "layer_spec",
    "global_parameters",
    "local_shard",
    "whole_tensor",
    "initialize_weights",
]
