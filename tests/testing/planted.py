"""Small wrong losses, each with one classic fault, and the fault that must be named for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import LossFn, Metrics, TokenBatch
from parallel_rl.groups import group_size, group_sum
from parallel_rl.hosts.function_loss import FunctionLoss
from parallel_rl.layout import SequenceLayout
from parallel_rl.losses import Field, NoConfig, Requirements
from parallel_rl.losses.core.batch import ModelOutput
from parallel_rl.losses.core.call import LossCall
from parallel_rl.losses.core.local_batch import LocalBatch
from parallel_rl.losses.core.loss import Reader
from parallel_rl.losses.core.readers import LogProbReader
from parallel_rl.metrics import Metric
from parallel_rl.testing import faults
from parallel_rl.testing.cases import EVERY_AXIS, Case, Subject
from parallel_rl.testing.faults import Fault
from parallel_rl.testing.subjects import subject_of
from parallel_rl.vocab.stats import stats_of_shard

Result = tuple[Tensor, Metrics]


class Planted(LossFn[NoConfig]):
    """−Σ A·log π over the mask, right but for what a subclass does to it."""

    config_class = NoConfig
    requirements = Requirements((Field("advantages"), Field("prev_logprobs")))

    def compute(self, batch: TokenBatch) -> Result:
        loss = self.total(batch)
        return loss, Metrics({"loss": Metric("share", loss)})

    def terms(self, batch: TokenBatch) -> Tensor:
        return -batch["advantages"] * batch.logprobs

    def total(self, batch: TokenBatch) -> Tensor:
        return batch.local.masked(self.terms(batch), None).sum() / batch.counts.toks


class LocalTokens(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        return batch.local.masked(self.terms(batch), None).sum() / batch.local.valid.sum().clamp(min=1)


class LocalShardTokens(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        return batch.local.masked(self.terms(batch), None).sum() / batch.mask.sum().clamp(min=1)


class LocalSequences(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        per_token = batch.expand(1 / batch.tokens_per_sequence.clamp(min=1)) * self.terms(batch)
        return batch.local.masked(per_token, None).sum() / batch.sequence_mask.sum().clamp(min=1)


class LocalPositions(Planted):
    """`x.mean()`: masked places count too, and a packed row has fewer of them."""

    def total(self, batch: TokenBatch) -> Tensor:
        return batch.local.masked(self.terms(batch), None).mean()


class MeanOfMeans(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        mean = batch.local.masked(self.terms(batch), None).sum() / batch.local.valid.sum().clamp(min=1)
        return mean * batch.sequence_mask.sum() / batch.counts.seqs


class ContextAveraged(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        return super().total(batch) / batch.local.layout.cp_size


def _cubes(batch: TokenBatch, sums: Tensor) -> Tensor:
    return torch.where(batch.sequence_mask, (sums / 10).exp(), 0).sum() / batch.counts.seqs


class ContextSummed(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        return _cubes(batch, batch.segment_sum(batch.logprobs))


class ContextMissing(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        sums = batch.local.layout.segment_sum(batch.local.masked(batch.logprobs, None), None)
        return _cubes(batch, sums) / batch.local.layout.cp_size


class _IdentityBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class ContextBackward(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        sums = batch.local.layout.segment_sum(batch.local.masked(batch.logprobs, None), None)
        if group_size(batch.local.context_group) > 1:
            sums = _IdentityBackward.apply(sums, batch.local.context_group)
        return _cubes(batch, sums) / batch.local.layout.cp_size


class TensorSummed(Planted):
    def run(self, call: LossCall) -> Result:
        loss, metrics = super().run(call)
        return group_sum(loss, call.tensor_group), metrics


class WholeRowReader(LogProbReader):
    def read(self, local: LocalBatch, logits: Tensor, tensor_group: dist.ProcessGroup | None) -> TokenBatch:
        layout = local.layout
        shape = (logits.shape[0], logits.shape[1])
        ids = layout.shard(local.data["input_ids"], shift=False, fill=0).view(shape).roll(-1, 1)
        valid = layout.shard(local.valid | (local.data["token_mask"] != 0), shift=False, fill=False).view(shape)
        rows = layout.shard(local.sequence_mask[:, None].expand_as(local.valid), shift=False, fill=False).view(shape)
        mask = (valid & rows).roll(-1, 1)
        mask[:, -1] = False
        shard = self.loss.options.shard(logits.shape[-1], tensor_group)
        stats = stats_of_shard(logits.flatten(0, -2), ids.flatten(), mask.flatten(), shard)
        return TokenBatch(local, ModelOutput(stats))


class WholeRowShift(Planted):
    """Labels by a roll over what may be a packed row."""

    @property
    def reader(self) -> Reader:
        return WholeRowReader(self)

    def total(self, batch: TokenBatch) -> Tensor:
        return -batch.logprobs.sum() / batch.counts.toks


class Whitened(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        chosen = batch["advantages"][batch.mask]
        scale = chosen.std() if len(chosen) > 1 else 1.0
        weights = (batch["advantages"] - (chosen.mean() if len(chosen) else 0.0)) / scale
        return -batch.local.masked(weights * batch.logprobs, None).sum() / batch.counts.toks


class ZeroByZero(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        count = batch.local.valid.sum()
        mean = batch.local.masked(self.terms(batch), None).sum() / count
        return mean * (count.double() / batch.counts.toks)


class LocalMetric(Planted):
    def compute(self, batch: TokenBatch) -> Result:
        loss = self.total(batch)
        mean = batch.local.masked(batch.logprobs.exp(), None).sum() / batch.mask.sum().clamp(min=1)
        return loss, Metrics({"loss": Metric("share", loss), "probability": Metric("share", mean)})


class _DoubledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return 2 * gradient


class WrongBackward(Planted):
    def terms(self, batch: TokenBatch) -> Tensor:
        return _DoubledBackward.apply(super().terms(batch))


class RowOrder(Planted):
    def terms(self, batch: TokenBatch) -> Tensor:
        return super().terms(batch) * batch.expand(torch.arange(len(batch.sequence_mask)).double())


class RootOfCount(Planted):
    def total(self, batch: TokenBatch) -> Tensor:
        return batch.local.masked(self.terms(batch), None).sum() / batch.counts.toks.sqrt()


class FalseClaim(Planted):
    requirements = Requirements((Field("prev_logprobs"),), token_separable=True)

    def terms(self, batch: TokenBatch) -> Tensor:
        ratio = batch.expand(batch.segment_mean(batch.logprobs - batch["prev_logprobs"])).exp()
        return -ratio * batch.logprobs


class HalfPrecision(Planted):
    def terms(self, batch: TokenBatch) -> Tensor:
        group = batch.local.context_group
        if group_size(group) == 1 and batch.logprobs.dtype == torch.float64:
            return super().terms(batch)
        low = batch.logprobs.to(torch.float16 if batch.logprobs.dtype == torch.float64 else torch.bfloat16)
        return -batch["advantages"] * low.to(batch.logprobs.dtype)


def _dense(logits: Tensor, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S − 1] log-probs, mask and advantages, on whole rows and the whole vocabulary."""
    ids = data["input_ids"][:, 1:].clamp(0, logits.shape[-1] - 1)
    picked = logits[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]) != 0
    return picked, mask, data["advantages"][:, 1:]


def multiplied(logits, data, seqs, toks, rank=None, tensor=None, context=None):  # type: ignore[no-untyped-def]
    picked, mask, advantages = _dense(logits, data)
    return -(picked * advantages * mask).sum() / toks


def masked_late(logits, data, seqs, toks, rank=None, tensor=None, context=None):  # type: ignore[no-untyped-def]
    picked, mask, advantages = _dense(logits, data)
    ratio = (picked - data["prev_logprobs"][:, 1:]).exp()
    return torch.where(mask, -ratio * advantages, 0).sum() / toks


def unshifted(logits, data, seqs, toks, rank=None, tensor=None, context=None):  # type: ignore[no-untyped-def]
    ids = data["input_ids"].clamp(0, logits.shape[-1] - 1)
    picked = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask = (data["token_mask"] * data["sample_mask"][:, None]) != 0
    return -torch.where(mask, picked, 0).sum() / toks


def shard_shift(logits, data, seqs, toks, rank=None, tensor=None, context=None):  # type: ignore[no-untyped-def]
    """Cuts labels and mask as the logits are cut, and shifts what it holds."""
    layout = SequenceLayout.padded(*data["input_ids"].shape, cp_size=group_size(context),
                                   cp_rank=0 if context is None else dist.get_rank(context))  # fmt: skip
    ids, mask = (
        layout.shard(data[name], shift=False, fill=0).view(layout.local_shape) for name in ("input_ids", "token_mask")
    )
    ids = ids.clamp(0, logits.shape[-1] - 1)
    mask = (mask != 0) & (data["sample_mask"] != 0)[:, None]
    z = torch.where(mask[:, 1:, None], logits[:, :-1], 0)
    picked = z.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -torch.where(mask[:, 1:], picked, 0).sum() / toks


def shard_softmax(logits, data, seqs, toks, rank=None, tensor=None, context=None):  # type: ignore[no-untyped-def]
    start = (rank or 0) * logits.shape[-1]
    ids = data["input_ids"][:, 1:] - start
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]) != 0
    here = mask & (ids >= 0) & (ids < logits.shape[-1])
    z = torch.where(here[..., None], logits[:, :-1], 0)
    picked = z.log_softmax(-1).gather(-1, torch.where(here, ids, 0)[..., None])[..., 0]
    return -torch.where(here, picked, 0).sum() / toks


def padding_in_softmax(logits, data, seqs, toks, rank=None, tensor=None, context=None):  # type: ignore[no-untyped-def]
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]) != 0
    ids = torch.where(mask, data["input_ids"][:, 1:], 0)
    z = torch.where(mask[..., None], logits[:, :-1], 0)
    return -torch.where(mask, z.log_softmax(-1).gather(-1, ids[..., None])[..., 0], 0).sum() / toks


@dataclass(frozen=True)
class _Rows(Case):
    """On whole rows only, padded and packed."""

    @property
    def axes(self) -> frozenset[str]:
        return ROWS_ONLY | {"packing"}


ROWS_ONLY = frozenset({"data", "micro-batches"})


def _seed(call, *fields: str, axes: frozenset[str] = ROWS_ONLY) -> FunctionLoss:  # type: ignore[no-untyped-def]
    return FunctionLoss(call, fields, axes)


# name → (loss, fault, axis)
PLANTED: dict[str, tuple[Subject, Fault, str]] = {
    "local tokens": (subject_of(LocalTokens), faults.LOCAL_DENOMINATOR, "micro-batches"),
    "local tokens of the shard": (subject_of(LocalShardTokens), faults.LOCAL_DENOMINATOR, "context"),
    "local sequences": (subject_of(LocalSequences), faults.LOCAL_DENOMINATOR, "data"),
    "local positions": (subject_of(LocalPositions), faults.LOCAL_DENOMINATOR, "packing"),
    "mean of means": (subject_of(MeanOfMeans), faults.MEAN_OF_MEANS, "micro-batches"),
    "1/cp": (subject_of(ContextAveraged), faults.CONTEXT_AVERAGED, "context"),
    "sequence term on every rank": (subject_of(ContextSummed), faults.CONTEXT_SUMMED, "context"),
    "no all-reduce over context": (subject_of(ContextMissing), faults.CONTEXT_MISSING, "context"),
    "identity backward": (subject_of(ContextBackward), faults.CONTEXT_BACKWARD, "context"),
    "summed over tensor ranks": (subject_of(TensorSummed), faults.TENSOR_SUMMED, "tensor"),
    "softmax of the shard": (_seed(shard_softmax, axes=ROWS_ONLY | {"tensor"}), faults.TENSOR_MISSING, "tensor"),
    "padding columns": (
        _seed(padding_in_softmax, axes=ROWS_ONLY | {"padded vocabulary"}), faults.PADDING_COLUMNS, "one process",
    ),
    "shift on the shard": (_seed(shard_shift, axes=ROWS_ONLY | {"context"}), faults.SHARD_EDGE, "context"),
    "shift over the packed row": (_Rows(WholeRowShift), faults.SEQUENCE_EDGE, "packing"),
    "no shift": (_seed(unshifted), faults.UNSHIFTED, "one process"),
    "mask multiplies": (_seed(multiplied, "advantages"), faults.MASK_MULTIPLIES, "one process"),
    "mask after exp": (_seed(masked_late, "advantages", "prev_logprobs"), faults.MASK_AFTER, "one process"),
    "whitened by micro-batch": (subject_of(Whitened), faults.LOCAL_STATISTIC, "micro-batches"),
    "zero by zero": (subject_of(ZeroByZero), faults.EMPTY, "one process"),
    "local metric": (subject_of(LocalMetric), faults.METRIC, "micro-batches"),
    "wrong backward": (subject_of(WrongBackward), faults.DERIVATIVE, "one process"),
    "row order": (subject_of(RowOrder), faults.ORDER, "one process"),
    "root of the count": (subject_of(RootOfCount), faults.COUNT, "one process"),
    "false claim": (subject_of(FalseClaim), faults.CLAIM, "one process"),
}  # fmt: skip
assert EVERY_AXIS >= ROWS_ONLY
