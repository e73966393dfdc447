"""NeMo-RL's losses of whole distributions and of values: distillation, draft heads, critics."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.compat.dense import Count, token_mean
from parallel_rl.compat.nemo_rl.base import Data, Result, ShardedOutput, batch_of, checked, floats
from parallel_rl.compat.nemo_rl.interfaces import (
    ConfigError,
    DistillationLossConfig,
    LossFunction,
    LossInputType,
    LossType,
    MseValueLossConfig,
)
from parallel_rl.functional.distillation import CrossEntropy, mixed_kl, reverse_tail
from parallel_rl.layout import valid_tokens
from parallel_rl.losses.core.batch import ModelOutput
from parallel_rl.losses.value import ValueLossFn
from parallel_rl.vocab.backends.torch_backend import math_dtype
from parallel_rl.vocab.divergence import divergence_of_shards
from parallel_rl.vocab.shards import VocabShard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

TopK = tuple[Tensor, Tensor, "Tensor | None"]


class DistillationLossFn(LossFunction):
    """KL between a teacher's top-k and the student's, token-mean; see the library's `DistillationLossFn`.

    The teacher is renormalised inside its top-k, and so is the student unless zero_outside_topk (Q10: its mass on other
    vocabulary entries is invisible). The teacher's data stand at the predictor. Without masks it is the plain mean. Metrics:
    loss, num_valid_samples (rows). Every context rank gets the whole loss, as with `LogProbLoss`.

    Raises:
        ConfigError: an unknown kl_type, a mixed_kl_weight outside [0, 1].
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION

    def __init__(self, cfg: DistillationLossConfig | Mapping[str, object]) -> None:
        self.cfg = cfg = DistillationLossConfig.read(cfg)
        vars(self).update(cfg)
        weights = {"forward": 1.0, "reverse": 0.0, "mixed": cfg.number("mixed_kl_weight")}
        if cfg["kl_type"] not in weights or not 0 <= weights["mixed"] <= 1:
            raise ConfigError(
                f"kl_type = {cfg['kl_type']!r} must be one of {', '.join(weights)}, mixed_kl_weight = {weights['mixed']} "
                "must lie in [0, 1]"
            )
        self.forward_weight = weights[str(cfg["kl_type"])]

    def __call__(
        self,
        next_token_logits: Tensor | None = None,
        data: Data | None = None,
        global_valid_seqs: Count | None = None,
        global_valid_toks: Count | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: ProcessGroup | None = None,
        context_parallel_group: ProcessGroup | None = None,
        *,
        student_topk_logprobs: Tensor | None = None,
        teacher_topk_logprobs: Tensor | None = None,
        H_all: Tensor | None = None,
    ) -> Result:
        """Return the loss and its metrics; H_all [B, S − 1] is the student's Σ p·log p."""
        if data is None or (next_token_logits is None) == (student_topk_logprobs is None):
            raise ValueError("give data, and either next_token_logits or student_topk_logprobs")
        if ("token_mask" in data) != ("sample_mask" in data):
            checked(data)  # refuses the missing one; without both every token counts
        if next_token_logits is not None:
            output = ShardedOutput.of(
                next_token_logits, vocab_parallel_rank, vocab_parallel_group, context_parallel_group
            )
            return self.from_topk(self.read(output, data, masked=True), data, global_valid_toks)
        if student_topk_logprobs is None or teacher_topk_logprobs is None:
            raise ValueError("student_topk_logprobs needs teacher_topk_logprobs, which is None")
        return self.from_topk((student_topk_logprobs, teacher_topk_logprobs, H_all), data, global_valid_toks)

    def read(self, output: ShardedOutput, data: Data, *, masked: bool) -> TopK:
        """Read [B, S − 1, K] log-probs of student and teacher, and Σ p·log p; `masked`: of valid tokens alone."""
        valid = valid_tokens(data) if masked and "token_mask" in data and "sample_mask" in data else None
        student, entropy = output.topk_logprobs(data, valid, whole=bool(self.cfg["zero_outside_topk"]))
        teacher = data["teacher_topk_logits"][:, :-1].to(student.dtype).log_softmax(-1)
        return student, teacher, None if entropy is None or self.forward_weight == 1 else -entropy

    def from_topk(self, topk: TopK, data: Data, toks: Count | None) -> Result:
        student, teacher, negative_entropy = topk
        if "token_mask" in data and "sample_mask" in data:
            data = checked(data)
            mask = (data["token_mask"][:, 1 : student.shape[1] + 1] != 0) & (data["sample_mask"] != 0)[:, None]
        else:
            mask, toks = torch.ones_like(student[..., 0], dtype=torch.bool), None
        student = torch.where(mask[..., None], student, 0)  # keeps masked values finite through exp
        kl = mixed_kl(torch.where(mask[..., None], teacher, 0), student, self.forward_weight)
        if self.cfg["zero_outside_topk"] and self.forward_weight < 1:
            if negative_entropy is None:
                raise ValueError("zero_outside_topk = True with a reverse KL needs H_all, which is None")
            tail = reverse_tail(student, torch.where(mask, -negative_entropy, 0))
            kl = kl + (1 - self.forward_weight) * tail
        loss = token_mean(kl, mask, None if toks is None else torch.as_tensor(toks).clamp(min=1))
        return loss, {**floats({"loss": loss}), "num_valid_samples": len(data["input_ids"])}


class DraftCrossEntropyLossFn(LossFunction):
    """Cross-entropy of a draft head under the policy, −Σ_v p·log q, token-mean; the policy is constant."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DRAFT

    def __init__(self, vocab_parallel_group: ProcessGroup | None = None) -> None:
        self.vocab_parallel_group = vocab_parallel_group

    def __call__(
        self,
        teacher_logits: Tensor,
        student_logits: Tensor,
        token_mask: Tensor,
        data: Data,
        global_valid_seqs: Count | None,
        global_valid_toks: Count,
    ) -> Tensor:
        """Return the loss, without metrics as in the origin, from logits [B, S, V/tp]."""
        mask = (token_mask != 0) & (data["sample_mask"] != 0)[:, None]
        flat, teacher = student_logits.flatten(0, -2), teacher_logits.detach().flatten(0, -2)
        shard = VocabShard.of(flat.shape[-1], self.vocab_parallel_group)
        entropy = divergence_of_shards(flat, teacher, mask.flatten(), CrossEntropy(), shard)
        return token_mean(entropy.view(mask.shape), mask, torch.as_tensor(global_valid_toks).clamp(min=1))


class MseValueLossFn(LossFunction):
    """½·scale·mean of (V − R)²; with cliprange the larger of it and that of V clipped around `values`.

    Nothing is shifted. See the library's `ValueLossFn` (head_position: token) and its metrics. values_min and values_max are 0
    without a valid token; the packing wrapper with a prepare_fn adds them up (Q8). num_valid_samples counts rows.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __init__(self, cfg: MseValueLossConfig | Mapping[str, object]) -> None:
        self.cfg = cfg = MseValueLossConfig.read(cfg)
        vars(self).update(cfg)
        self.factor = cfg.number("scale")
        clip = None if not cfg["cliprange"] or cfg.number("cliprange") < 0 else cfg.number("cliprange")
        self.value_loss = ValueLossFn({"cliprange": clip, "head_position": "token"})

    def __call__(self, logits: Tensor, data: Data, global_valid_seqs: Count | None, global_valid_toks: Count) -> Result:
        """Return the loss and its metrics from values [B, S] or [B, S, 1]."""
        data = checked(data)
        values = logits.squeeze(-1) if logits.dim() > 2 else logits
        names = self.value_loss.requirements.names
        if missing := [name for name in names if name not in data]:
            raise ValueError(f"data lacks the field {missing[0]!r}; this loss needs {', '.join(names)}")
        # `batch_of` drops the mask's column 0, and values begin there.
        wide = {**data, "token_mask": torch.nn.functional.pad(data["token_mask"], (1, 0))}
        fields = {name: data[name] for name in names}
        batch = batch_of(values.to(math_dtype(values.dtype)), wide, fields, (None, global_valid_toks))
        loss, metrics = self.value_loss.compute(replace(batch, output=ModelOutput(head=batch.logprobs)))
        loss = self.factor * loss
        numbers = floats({**metrics, "loss": loss}) | {"num_valid_samples": len(values)}
        ends = {name: numbers[name] if batch.mask.any() else 0.0 for name in ("values_min", "values_max")}
        return loss, numbers | ends
