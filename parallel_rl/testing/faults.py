"""Classic faults of a distributed loss, and their cures."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    fix: str


LOCAL_DENOMINATOR = Fault(
    "local denominator",
    "divide a sum by the global count that the call gives (global_valid_toks or global_valid_seqs), not by the number of "
    "tokens or sequences that this rank or micro-batch happens to hold",
)
MEAN_OF_MEANS = Fault(
    "mean of means",
    "return the sum over this micro-batch divided by the global count; an average of micro-batches' averages weighs a token "
    "by how few it came with",
)
PARTS_AVERAGED = Fault(
    "averaged over micro-batches or data ranks",
    "shares of the global sum are added up: no division by the number of micro-batches or ranks, which frameworks like to do",
)
PARTS_REPEATED = Fault(
    "counted once per micro-batch or data rank",
    "a term of the whole step enters once: divide it among the micro-batches and ranks",
)
MASK_MULTIPLIES = Fault(
    "a mask that multiplies",
    "select with torch.where(mask, x, 0) before anything non-linear: NaN · 0 is NaN",
)
MASK_AFTER = Fault(
    "a mask that comes too late",
    "put torch.where before exp, log and the like, not behind: a finite value still has the gradient NaN · 0",
)
MASKED_READ = Fault("masked values are read", "values at masked positions must not change the loss or its gradient")
UNSHIFTED = Fault(
    "off-by-one shift",
    "logits at position t predict token t + 1: compare logits[:, :-1] with input_ids[:, 1:], and with token_mask[:, 1:]",
)
ELSEWHERE = Fault("gradient outside the mask", "only positions that predict a valid token may have a gradient")
SHARD_EDGE = Fault(
    "a shift on the shard",
    "shift the whole sequence first, then cut it: the last position of a shard predicts the first token of another shard",
)
SEQUENCE_EDGE = Fault(
    "a shift over the packed row",
    "labels must not cross the bounds of cu_seqlens: the last position of a sequence predicts nothing",
)
CONTEXT_AVERAGED = Fault(
    "gradient averaged over context ranks",
    "each context rank returns its own share of the global sum; nothing divides by cp again",
)
CONTEXT_SUMMED = Fault(
    "a sequence term counted on every context rank",
    "all context ranks hold the same sequence sum: return f(sum) / cp on each, or f(sum) on one",
)
CONTEXT_MISSING = Fault(
    "missing all-reduce over context ranks",
    "a quantity of the whole sequence needs its parts of all context ranks: batch.segment_sum, or a differentiable all-reduce",
)
CONTEXT_BACKWARD = Fault(
    "an all-reduce whose backward is not a sum",
    "the backward of a sum over ranks is the sum of the ranks' gradients (parallel_rl.groups.group_sum), neither the identity "
    "nor their mean",
)
TENSOR_SUMMED = Fault(
    "summed over tensor ranks",
    "the loss is the same on all tensor ranks and is never summed or averaged over them",
)
TENSOR_MISSING = Fault(
    "missing all-reduce over tensor ranks",
    "log-softmax needs the maximum and the sum of exponentials over all vocabulary shards (parallel_rl.token_logprobs)",
)
PADDING_COLUMNS = Fault(
    "padding columns of the vocabulary in the softmax",
    "columns from vocab_size on are padding: leave them out of the sum of exponentials",
)
LOCAL_STATISTIC = Fault(
    "a statistic of the micro-batch",
    "a mean, quantile or variance that enters the loss is of the whole step: declare `collect`, and read `batch.statistics`",
)
EMPTY = Fault(
    "0/0 where nothing is valid", "global counts are at least 1: divide by them; return an exact, connected zero"
)
METRIC = Fault(
    "a metric that does not add up",
    "give each metric its kind (share, count, min, max, ratio): means are reduced as sums and counts, and divided last",
)
DERIVATIVE = Fault(
    "a gradient that is not the derivative", "compare the backward of your autograd.Function with the forward"
)
ORDER = Fault("the order of rows matters", "rows of a batch are a set: nothing may depend on their order")
COUNT = Fault("twice the data, another loss", "every sum is divided by a global count once, not by its square or root")
CLAIM = Fault("a claim that is not true", "remove the declaration, or make it true")
RAISES = Fault("the loss raises", "see the message")
PRECISION = Fault(
    "low precision hurts more than it must",
    "compute in float32 at least: logits.float(), and sums over tokens in float64",
)
UNKNOWN = Fault("no classic fault fits", "compare with one process where the table says which axis breaks it")
