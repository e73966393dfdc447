"""One way after the other to spoil a right call of a loss, and what is then said."""

from __future__ import annotations

import math
import re

import torch

from parallel_rl import ValidCounts
from tests.losses.fault_calls import (
    FLOATS,
    PLACEHOLDER,
    STEP,
    B,
    Fault,
    S,
    V,
    argument,
    at,
    bounds,
    drop,
    given_up,
    logits,
    narrow,
    next_rank,
    options,
    rows,
    six_tokens,
    strided,
    use,
)

NLL = {"positive_example_nll_weight": 0.1}
TWO_COUNTS = ValidCounts(torch.ones(2), torch.tensor(1))
PRM = {"placeholder_token_id": PLACEHOLDER, "reward_token_ids": [2, 9]}
ECHO = {
    "components": {
        "policy": {"loss": {"name": "policy"}},
        "observed": {"loss": {"name": "nll"}, "mask": "observation_mask", "coefficient": 0.1},
    }
}
REQUIRED = {"prm": PRM, "components": ECHO}  # configs of losses without a default
CLIP = {"cliprange": 0.2}
PROMPTS = {"aggregation": "prompt-mean"}
TURNS = {"ratio_level": "turn-mean"}
PREDICTOR = {"reference_logprobs_alignment": "predictor"}

# fmt: off
FAULTS = [
    # the logits
    Fault("flat logits", r"next_token_logits must be \[B, S/cp, V/tp\]", logits(lambda z: z.flatten(0, 1))),
    Fault("integer logits", r"the logits must be floating point .* got torch.int64", logits(lambda z: z.long())),
    Fault("logits of 8 bits", "the logits must be dense, of 16 bits or more; got torch.float8_e4m3fn",
          logits(lambda z: z.to(torch.float8_e4m3fn))),
    Fault("a row too few", r"leading shape \[3, \d\]; data of shape \[4, 8\]", logits(lambda z: z[:3])),
    Fault("a token too few", r"leading shape \[4, \d\]; .* needs \[4, \d\]", logits(lambda z: z[:, 1:])),
    Fault("a packed row", r"for a packed row wrap the loss: SequencePackingLossWrapper\(loss_fn, cu_seqlens\)",
          logits(lambda z: z.flatten(0, 1)[None])),
    Fault("logits given up", "the logits were given up by consume_logits=True, and a backward wrote", given_up,
          by_value=True),
    Fault("strided logits to consume", r"consume_logits=True .* contiguous; got strides", strided),
    # the vocabulary
    Fault("a shard too narrow", r"last dimension is 4 on tensor rank \d of \d, but vocab_size = 11 splits",
          logits(lambda z: z[..., :4])),
    Fault("another vocab_size", r"last dimension is \d+ on tensor rank .* vocab_size = 230", options(vocab_size=230)),
    Fault("vocab_size 0", "vocab_size = 0 must be at least 1", options(vocab_size=0)),
    Fault("vocab_start alone", "vocab_start = 3 needs vocab_size", options(vocab_size=None, vocab_start=3)),
    Fault("vocab_start outside", r"vocab_start = 12 must lie in \[0, vocab_size = 11\]", options(vocab_start=12)),
    Fault("another tensor rank", r"vocab_parallel_rank = \d, but this process is rank \d of the group", next_rank),
    Fault("target V", r"target 11 at \[1, 3\] lies outside the vocabulary \[0, 11\)", at("input_ids", (1, 3), V),
          by_value=True),
    Fault("target -1", r"target -1 at \[1, 3\] lies outside the vocab", at("input_ids", (1, 3), -1), by_value=True),
    Fault("target -100", r"target -100 at \[0, 7\] lies outside", at("input_ids", (0, 7), -100), by_value=True),
    # options
    *(Fault(f"temperature {t}", f"temperature = {t} must be positive", options(temperature=t))
      for t in (0.0, -1.0, math.nan)),
    Fault("temperatures of tokens", "temperature must be one number for all tokens, got a Tensor",
          options(temperature=torch.ones(B, S))),
    Fault("no such backend", "backend = 'cuda' is not valid; choose one of", options(backend="cuda")),
    Fault("no such layout", "cp_layout = 'ring' is not valid; choose 'zigzag' or 'contig", options(cp_layout="ring")),
    # the fields
    *(Fault(f"{name} missing", f"data lacks the field '{name}'; this loss needs input_ids, (?!.*generation_log)", drop(name))
      for name in ("input_ids", "token_mask", "sample_mask", *FLOATS) if name != "generation_logprobs"),
    Fault("generation_logprobs missing", "data lacks the field 'generation_logprobs'.*, generation_logprobs",
          drop("generation_logprobs"), config={"use_importance_sampling_correction": True}),
    Fault("rewards missing", "data lacks the field 'rewards'", drop("rewards"), config=NLL),
    *(Fault(f"narrow {name}", rf"{name} has shape \[4, 7\]; input_ids \[B, S\] = \[4, 8\] calls for \[4, 8\]",
            narrow(name)) for name in ("token_mask", *FLOATS)),
    Fault("a column of sample_mask", r"sample_mask has shape \[4, 1\]; .* calls for \[4\]",
          use(sample_mask=torch.ones(4, 1))),
    Fault("a column of token_mask", r"token_mask has shape \[4, 1\]; .* calls for \[4, 8\]",
          use(token_mask=torch.ones(4, 1))),
    Fault("advantages of sequences", r"advantages has shape \[4\]; input_ids \[B, S\] = \[4, 8\] calls for \[4, 8\]",
          use(advantages=torch.ones(4))),
    Fault("rewards of tokens", r"rewards has shape \[4, 8\]; .* calls for \[4\]", use(rewards=torch.ones(4, 8)),
          config=NLL),
    *(Fault(f"{what} input_ids", rf"input_ids must be int64 or int32 \[B, S\], got {kind}", use(input_ids=ids))
      for what, kind, ids in (
          ("flat", r"torch.int64 \[32\]", torch.ones(32).long()),
          ("float", "torch.float32", torch.ones(4, 8)),
          ("bool", "torch.bool", torch.ones(4, 8).bool()),
          ("short", "torch.int16", torch.ones(4, 8).short()),
      )),
    *(Fault(f"integer {name}", f"{name} must be floating point, got torch.int64",
            use(**{name: torch.ones(4, 8).long()})) for name in FLOATS),
    Fault("integer rewards", "rewards must be floating point, got torch.int64", use(rewards=torch.ones(4).long()),
          config=NLL),
    Fault("a list for a tensor", "advantages must be a tensor, got list", use(advantages=[[0.0] * 8] * 4)),
    Fault("a field elsewhere", "advantages is on meta, the model's output on cpu; they must be on one device",
          use(advantages=torch.ones(4, 8, device="meta"))),
    Fault("a field with a gradient", r"prev_logprobs requires a gradient, .* give prev_logprobs.detach\(\)",
          use(prev_logprobs=torch.ones(4, 8, requires_grad=True))),
    # their values
    *(Fault(f"infinite {name}", rf"{name} is -?inf at \[2, 6\], a valid place", at(name, (2, 6), value), by_value=True)
      for name, value in (("advantages", math.inf), ("advantages", -math.inf))),
    Fault("a soft mask", r"token_mask = 0.5 at \[0, 0\] must be 0 or 1; weights",
          use(token_mask=torch.full((4, 8), 0.5)), by_value=True),
    Fault("a mask of 2", r"token_mask = 2 at \[0, 0\] must be 0 or 1", at("token_mask", (0, 0), 2), by_value=True),
    Fault("a mask of NaN", r"sample_mask = nan at \[2\] must be 0 or 1", at("sample_mask", (2,), math.nan), by_value=True),
    *(Fault(f"NaN in {name}", rf"{name} is NaN at \[2, 6\], a valid place", at(name, (2, 6), math.nan), by_value=True)
      for name in FLOATS),
    Fault("NaN in rewards", r"rewards is NaN at \[1\], a valid place", at("rewards", (1,), math.nan), config=NLL,
          by_value=True),
    Fault("NaN at the predictor", r"reference_policy_logprobs is NaN at \[2, 0\], a valid place",
          at("reference_policy_logprobs", (2, 0), math.nan), "dpo", PREDICTOR, by_value=True),
    *(Fault(f"{name} of nothing, {loss}", rf"{name} is -inf at \[2, 6\], a valid place: no policy draws a token",
            at(name, (2, 6), -math.inf), loss, by_value=True)
      for name, loss in (("prev_logprobs", "policy"), ("generation_logprobs", "clipped_pg"),
                         ("reference_policy_logprobs", "dpo"), ("reference_policy_logprobs", "reference_kl"))),
    # counts and statistics
    Fault("two counts", r"global_valid_seqs must be one number, see count_valid; got shape \[2\]",
          argument("counts", TWO_COUNTS)),
    Fault("no counts", "global_valid_toks must be one number, see count_valid; got None",
          argument("counts", (torch.tensor(1), None))),
    Fault("swapped counts", "global_valid_toks = 4 is below the 21 of this batch alone; .*sequences first, then tokens",
          argument("counts", (torch.tensor(21), torch.tensor(4))), by_value=True),
    Fault("counts of a smaller batch", "global_valid_toks = 20 is below the 21 of this batch alone",
          argument("counts", (4, 20)), by_value=True),
    Fault("sequences of a smaller batch", "global_valid_seqs = 3 is below the 4 of this batch alone",
          argument("counts", (3, 21)), by_value=True),
    *(Fault(f"{count} tokens", f"global_valid_toks = {count} must be at least 1, see count_valid",
            argument("counts", (4, count)), by_value=True) for count in (0, -3, math.nan)),
    *(Fault(f"{count} tokens", rf"global_valid_toks = {re.escape(f'{float(count):g}')} must be below 2\^63",
            argument("counts", (4, count)), by_value=True) for count in (math.inf, 10**30)),
    Fault("no statistics", "ClippedPGLossFn in this configuration needs statistics=", argument("statistics", None),
          config=NLL),
    Fault("needless statistics", "ClippedPGLossFn in this configuration takes no statistics=",
          argument("statistics", STEP)),
    # pairs
    Fault("odd rows", r"pairs are \(even, odd\) rows, so their number must be even; got 3 rows", rows(3), "dpo"),
    Fault("odd rewards", "their number must be even; got 3 rows", rows(3), "preference"),
    Fault("two rewards a token", r"a scalar head.s output must be .* \[B, S/cp, 1\], got torch.float64 \[4, \d, 2\]",
          logits(lambda z: z.expand(-1, -1, 2)), "preference"),
    Fault("integer head", "a scalar head.s output must be floating point .* got torch.int64",
          logits(lambda z: z.long()), "preference"),
    Fault("five rewards", r"one reward a row must be \[B\] or \[B, 1\] with B = 4, got \[5\]",
          logits(lambda z: torch.ones(5)), "preference"),
    # distillation and mixtures
    Fault("no teacher", "data lacks the field 'teacher_logits'", drop("teacher_logits"), "full_distillation"),
    Fault("another teacher's vocabulary", r"teacher_logits has shape .*; it must be that of the student's logits",
          lambda call: call.data.update(teacher_logits=call.data["teacher_logits"][..., 2:]), "full_distillation"),
    Fault("a teacher of fewer tokens", r"teacher_logits has shape .*; it must begin like the model's output",
          lambda call: call.data.update(teacher_logits=call.data["teacher_logits"][:, 1:]), "full_distillation"),
    Fault("integer teacher", "teacher_logits must be floating point, got torch.int64",
          lambda call: call.data.update(teacher_logits=call.data["teacher_logits"].long()), "full_distillation"),
    Fault("fewer ids", r"teacher_topk_indices has shape \[4, 8, 3\], teacher_topk_logits \[4, 8, 2\]; they must agree",
          lambda call: call.data.update(teacher_topk_logits=call.data["teacher_topk_logits"][..., 1:]), "distillation"),
    Fault("flat top-k", r"teacher_topk_logits has shape \[4, 8\]; .* calls for \[4, 8, K\]",
          use(teacher_topk_logits=torch.ones(4, 8)), "distillation"),
    Fault("float ids", r"teacher_topk_indices must hold integers or bools, got torch.float32",
          use(teacher_topk_indices=torch.ones(4, 8, 3)), "distillation"),
    Fault("id V", r"teacher_topk_indices = 11 at \[1, 3, 2\] lies outside the vocabulary \[0, 11\)",
          at("teacher_topk_indices", (1, 3, 2), V), "distillation", by_value=True),
    Fault("id V at the predictor", r"teacher_topk_indices = 11 at \[1, 0, 2\] lies outside",
          at("teacher_topk_indices", (1, 0, 2), V), "distillation", {"topk_alignment": "predictor"}, by_value=True),
    Fault("NaN in the top-k", r"teacher_topk_logits is NaN at \[2, 5, 1\], a valid place",
          at("teacher_topk_logits", (2, 5, 1), math.nan), "distillation", by_value=True),
    Fault("no mass of the tail", "data lacks the field 'teacher_logsumexp'", drop("teacher_logsumexp"), "distillation",
          {"bucket_tail": True}),
    Fault("no experts", "data lacks the field 'expert_mask'", drop("expert_mask"), "mix"),
    Fault("float experts", "expert_mask must hold integers or bools, got torch.float32", use(expert_mask=torch.ones(4)),
          "mix"),
    Fault("no counts of the sides", "MixLossFn in this configuration needs statistics=", argument("statistics", None),
          "mix"),
    Fault("no observations", "data lacks the field 'observation_mask'", drop("observation_mask"), "components", ECHO),
    Fault("float observations", "observation_mask must hold integers or bools, got torch.float32",
          use(observation_mask=torch.ones(4, 8)), "components", ECHO),
    Fault("observations of 2", r"observation_mask = 2 at \[1, 3\] must be 0 or 1",
          use(observation_mask=torch.ones(4, 8).long().index_put((torch.tensor(1), torch.tensor(3)), torch.tensor(2))),
          "components", ECHO, by_value=True),
    Fault("odd rows without a reference", "their number must be even; got 3 rows", rows(3), "simpo"),
    Fault("margins missing", "data lacks the field 'preference_margins'", drop("preference_margins"), "preference",
          {"pair_margins": True}),
    # turns
    Fault("no segment ids", "data lacks the field 'segment_ids'", drop("segment_ids"), "policy", TURNS),
    Fault("float segment ids", "segment_ids must hold integers or bools, got torch.float32",
          use(segment_ids=torch.zeros(4, 8)), "policy", TURNS),
    Fault("segment ids of sequences", r"segment_ids has shape \[4\]; .* calls for \[4, 8\]",
          use(segment_ids=torch.zeros(4).long()), "policy", TURNS),
    Fault("segment ids that decrease", r"segment_ids must not decrease within a sequence; at \[1, 4\] 0 follows 1",
          at("segment_ids", (1, 4), 0), "policy", TURNS, by_value=True),
    # units
    Fault("no prompts", "data lacks the field 'group_ids'", drop("group_ids"), "nll", PROMPTS),
    Fault("prompts of tokens", r"group_ids has shape \[4, 8\]; .* calls for \[4\]",
          use(group_ids=torch.zeros(4, 8).long()), "nll", PROMPTS),
    Fault("float prompts", "group_ids must hold integers or bools, got torch.float32", use(group_ids=torch.zeros(4)),
          "nll", PROMPTS),
    Fault("a negative prompt", r"group_ids is -1 at \[2\], a valid row; ids are at least 0", at("group_ids", (2,), -1),
          "nll", PROMPTS, by_value=True),
    Fault("no trajectories", "data lacks the field 'run_ids'", drop("run_ids"), "policy",
          {"aggregation": "trajectory-mean"}),
    Fault("no count of prompts", "NLLLoss in this configuration needs statistics=", argument("statistics", None), "nll",
          PROMPTS),
    # labels
    Fault("labels missing", "data lacks the field 'preference_labels'", drop("preference_labels"), "kto"),
    Fault("a label of 2", r"preference_labels = 2 at \[3\] is not valid; \+1 is desirable",
          at("preference_labels", (3,), 2), "kto", by_value=True),
    Fault("no statistics of labels", "KTOLossFn in this configuration needs statistics=", argument("statistics", None),
          "kto"),
    Fault("a label of no reward", r"reward_labels = 7 at \[1, 5\], a placeholder, is neither one of reward_token_ids",
          at("reward_labels", (1, 5), 7), "prm", PRM, by_value=True),
    Fault("float labels", "reward_labels must hold integers or bools, got torch.float32",
          use(reward_labels=torch.ones(4, 8)), "prm", PRM),
    # values
    Fault("returns missing", "data lacks the field 'returns'", drop("returns"), "value"),
    Fault("old values missing", "data lacks the field 'values'", drop("values"), "value", CLIP),
    Fault("NaN in values", r"values is NaN at \[2, 6\], a valid place", at("values", (2, 6), math.nan), "value", CLIP,
          by_value=True),
    # packed rows
    Fault("falling bounds", r"cu_seqlens must start at 0 and increase, got \[0, 8, 6, 21, 25\]",
          bounds([0, 8, 6, 21, 25]), packed=True, by_value=True),
    Fault("bounds from 1", r"cu_seqlens_padded must start at 0 and increase, got \[1, 8, 16, 24, 32\]",
          bounds(padded=[1, 8, 16, 24, 32]), packed=True, by_value=True),
    Fault("longer than its room", r"a sequence is longer than its padded room: cu_seqlens \[0, 9, 14, 21, 25\], padded",
          bounds([0, 9, 14, 21, 25]), packed=True, by_value=True),
    Fault("an early end", "cu_seqlens_padded ends at 28; the packed row has 32 positions",
          bounds(padded=[0, 8, 16, 24, 28]), packed=True, by_value=True),
    Fault("float bounds", r"cu_seqlens must be integers \[B \+ 1\]", bounds([0.0, 8.0, 14.0, 21.0, 25.0]), packed=True),
    Fault("bounds elsewhere", "cu_seqlens is on cpu, cu_seqlens_padded on meta; they must be on one device",
          argument("cu_seqlens_padded", torch.zeros(5, dtype=torch.int64, device="meta")), packed=True),
    Fault("fewer bounds", "cu_seqlens_padded has 4 bounds, cu_seqlens 5", bounds(padded=[0, 8, 16, 32]), packed=True),
    Fault("fewer sequences", "cu_seqlens describes 3 sequences, the data has 4 rows",
          bounds([0, 8, 14, 21], [0, 8, 16, 32]), packed=True),
    Fault("a token too far", r"token_mask is set at \[1, 6\], but cu_seqlens gives sequence 1 6 tokens",
          at("token_mask", (1, 6), 1), packed=True, by_value=True),
    Fault("two packed rows", r"packed logits must be \[1, T/cp, V/tp\], got \[2, \d+, \d+\]",
          logits(lambda z: z.view(2, -1, z.shape[-1])), packed=True),
    # context parallelism
    Fault("six tokens", r"sequence length 6 is not divisible by 4 \(2·cp = 4 chunks of the zigzag layout\)",
          six_tokens, needs_context=True),
    Fault("uneven room", r"padded lengths \[10, 6, 8, 8\] are not divisible by 4", bounds(padded=[0, 10, 16, 24, 32]),
          packed=True, by_value=True, needs_context=True),
]
# fmt: on
