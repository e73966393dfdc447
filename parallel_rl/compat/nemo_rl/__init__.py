"""NeMo-RL's losses, by the names and the call of its documented module and of its present release (0.7).

    documented   loss, metrics = ClippedPGLossFn(cfg)(next_token_logits, data, global_valid_seqs, global_valid_toks,
                                                      vocab_parallel_rank, vocab_parallel_group, context_parallel_group)
    present      inputs, data = prepare_loss_input(logits, data, loss_fn, rank, tensor_group, context_group)
                 loss, metrics = loss_fn(data=data, global_valid_seqs=..., global_valid_toks=..., **inputs)

Names in both take either call. NeMo-RL's contract is kept: a call's loss is divided by counts of the whole step and is the
same on every context rank, so the host divides it by cp. Metrics are a dict of floats, copied from the device at once. A
config is a dict or a model with attributes, and may have keys without effect. The library's own classes of these names
return local losses that add up over context ranks, without a host sync.
Not here: the cross-tokenizer distillation, draft vocabularies and `DraftLossWrapper`.
"""

from parallel_rl.compat.nemo_rl.clipped_pg import ClippedPGLossFn
from parallel_rl.compat.nemo_rl.distributions import DistillationLossFn, DraftCrossEntropyLossFn, MseValueLossFn
from parallel_rl.compat.nemo_rl.interfaces import (
    ClippedPGLossConfig,
    ClippedPGLossDataDict,
    ConfigError,
    DistillationLossConfig,
    DistillationLossDataDict,
    DPOLossConfig,
    DPOLossDataDict,
    LossFunction,
    LossInputType,
    LossType,
    MetricNormalizer,
    MseValueLossConfig,
    PreferenceLossDataDict,
)
from parallel_rl.compat.nemo_rl.packing import (
    SequencePackingFusionLossWrapper,
    SequencePackingLossWrapper,
    prepare_loss_input,
    prepare_packed_loss_input,
    wrap_loss_fn_with_input_preparation,
)
from parallel_rl.compat.nemo_rl.preference import DPOLossFn, NLLLoss, NLLLossFn, PreferenceLoss, PreferenceLossFn

__all__ = [
    # both
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "DistillationLossConfig",
    "DistillationLossDataDict",
    "DistillationLossFn",
    "DPOLossConfig",
    "DPOLossDataDict",
    "DPOLossFn",
    "LossFunction",
    "LossType",
    "PreferenceLossDataDict",
    "SequencePackingLossWrapper",
    # documented
    "NLLLoss",
    "PreferenceLoss",
    # present
    "ConfigError",
    "DraftCrossEntropyLossFn",
    "LossInputType",
    "MetricNormalizer",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
    "PreferenceLossFn",
    "SequencePackingFusionLossWrapper",
    "prepare_loss_input",
    "prepare_packed_loss_input",
    "wrap_loss_fn_with_input_preparation",
]
