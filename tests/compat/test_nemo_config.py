"""What NeMo-RL's faces take and refuse: every config that the origin takes, its calls and words, and bad input on all ranks."""

from __future__ import annotations

import copy
import enum
import inspect
import pickle
import sys
import types
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from parallel_rl.compat import nemo_rl
from parallel_rl.testing.pool import run_world
from tests.compat import nemo_reference as reference

PREFIX = "truncated_importance_sampling_"
COUNTS = torch.tensor(4.0), torch.tensor(20.0)
#: keys that another one leaves without effect: each pair must change no number
IDLE: list[tuple[dict, dict]] = [
    ({"force_on_policy_ratio": True}, {"ratio_clip_c": 3.0, "ratio_clip_min": 0.1, "ratio_clip_max": 0.3}),
    ({"disable_ppo_ratio": True}, {"ratio_clip_c": 3.0, "ratio_clip_max": 0.3}),
    ({"force_on_policy_ratio": True}, {"disable_ppo_ratio": True}),
    ({"reference_policy_kl_penalty": 0.0}, {"use_on_policy_kl_approximation": True}),
    ({"use_kl_in_reward": True}, {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.7}),
    ({"reference_policy_kl_penalty": 0.0}, {"use_kl_in_reward": True, "kl_input_clamp_value": None}),
    ({}, {f"{PREFIX}ratio_min": 0.5}),
    ({}, {"positive_example_nll_weight": -1.0}),
    (
        {"use_importance_sampling_correction": True, f"{PREFIX}type": "tis", f"{PREFIX}ratio": 1.1},
        {f"{PREFIX}ratio_min": -0.5},
    ),
]
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: nemo_rl.ClippedPGLossFn({"use_cispo": True, "disable_ppo_ratio": True}), "use_cispo = True"),
    (lambda: nemo_rl.ClippedPGLossFn({"use_cispo": True, "force_on_policy_ratio": True}), "use_cispo = True"),
    (lambda: nemo_rl.ClippedPGLossFn({"use_cispo": True, "ratio_clip_c": 3.0}), "ratio_clip_c = 3.0"),
    (lambda: nemo_rl.ClippedPGLossFn({"sequence_level_importance_ratios": True}), "token_level_loss = True"),
    (lambda: nemo_rl.ClippedPGLossFn({"ratio_clip_c": 0.9}), "ratio_clip_c = 0.9 must exceed 1"),
    (lambda: nemo_rl.ClippedPGLossFn({"reference_policy_kl_type": "k4"}), "reference_policy_kl_type = 'k4'"),
    (lambda: nemo_rl.ClippedPGLossFn({"ratio_clip_min": "small"}), "ratio_clip_min = 'small'"),
    (lambda: nemo_rl.ClippedPGLossFn({f"{PREFIX}ratio": 2.0}), "use_importance_sampling_correction"),
    (
        lambda: nemo_rl.ClippedPGLossFn(
            {
                "use_importance_sampling_correction": True,
                f"{PREFIX}type": "tis",
                f"{PREFIX}ratio": 1.0,
                f"{PREFIX}ratio_min": 2.0,
            }
        ),
        f"{PREFIX}ratio_min must be <= {PREFIX}ratio, got 2.0 > 1.0",
    ),
    (lambda: nemo_rl.DistillationLossFn({"kl_type": "backward"}), "kl_type = 'backward' must be one of"),
    (lambda: nemo_rl.DistillationLossFn({"mixed_kl_weight": 1.5}), "mixed_kl_weight = 1.5 must lie in"),
    (lambda: nemo_rl.ClippedPGLossFn(3), "cfg must be a mapping or a ClippedPGLossConfig, got 3"),
    (lambda: nemo_rl.MseValueLossFn({"scale": None}), "scale = None must be a number"),
]


def loss_of(options: dict) -> tuple[float, dict]:
    data = reference.batch(0)
    loss, metrics = nemo_rl.ClippedPGLossFn(options)(data["logits"], data, *COUNTS)
    return loss.item(), metrics


@pytest.mark.parametrize(("options", "idle"), IDLE, ids=str)
def test_keys_without_an_effect_are_taken(options: dict, idle: dict) -> None:
    assert loss_of(options | idle) == loss_of(options)


def test_a_bound_without_a_type_clamps_as_older_releases_did() -> None:
    correction = {"use_importance_sampling_correction": True, f"{PREFIX}ratio": 1.1}
    loss, metrics = loss_of({**correction, f"{PREFIX}ratio_min": 0.9})
    typed, more = loss_of({**correction, f"{PREFIX}type": "tis"})
    assert loss == typed and more.pop("is_oob_ratio") > 0 and metrics == more


def test_unknown_keys_have_no_effect_and_are_said() -> None:
    with pytest.warns(UserWarning, match="key 'ratio_clip_mim' has no effect; did you mean 'ratio_clip_min'"):
        assert loss_of({"ratio_clip_mim": 0.5}) == loss_of({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(dict(nemo_rl.ClippedPGLossConfig()))


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_contradictions_are_refused_by_either_kind_of_error(make: Callable[[], object], message: str) -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match=message):
            make()


def test_configs_are_dicts_and_have_attributes() -> None:
    cfg = nemo_rl.ClippedPGLossConfig(ratio_clip_max=0.28)
    assert (cfg.ratio_clip_max, cfg["ratio_clip_min"], cfg.get("ratio_clip_c")) == (0.28, 0.2, None)
    cfg.token_level_loss = False
    again = copy.deepcopy(cfg)
    again["ratio_clip_min"] = 0.1
    assert (cfg["token_level_loss"], cfg.ratio_clip_min, again.ratio_clip_min) == (False, 0.2, 0.1)
    assert isinstance(again, nemo_rl.ClippedPGLossConfig) and isinstance(cfg, dict)
    model = types.SimpleNamespace(**cfg)
    assert loss_of(model) == loss_of(cfg) == loss_of(dict(cfg))
    with pytest.raises(AttributeError, match="no option 'ratio_clip'; did you mean 'ratio_clip_c'"):
        _ = cfg.ratio_clip
    assert nemo_rl.ClippedPGLossFn(cfg).ratio_clip_max == 0.28
    assert nemo_rl.DPOLossConfig() == {
        "reference_policy_kl_penalty": 0.05, "preference_loss_weight": 1.0, "sft_loss_weight": 0.0,
        "preference_average_log_probs": False, "sft_average_log_probs": False,
    }  # fmt: skip
    assert nemo_rl.DistillationLossConfig() == {"kl_type": "mixed", "mixed_kl_weight": 0.5, "zero_outside_topk": False}
    assert nemo_rl.MseValueLossConfig() == {"scale": 1.0, "cliprange": None}
    assert nemo_rl.ClippedPGLossConfig() == {
        "disable_ppo_ratio": False, "token_level_loss": True, "sequence_level_importance_ratios": False,
        "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None, "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0,
        "use_kl_in_reward": False, "use_importance_sampling_correction": False, f"{PREFIX}type": None,
        f"{PREFIX}ratio": None, f"{PREFIX}ratio_min": None, "use_on_policy_kl_approximation": False,
        "force_on_policy_ratio": False, "use_cispo": False, "positive_example_nll_weight": 0.0,
    }  # fmt: skip


def test_calls_have_the_documented_arguments() -> None:
    documented = ["next_token_logits", "data", "global_valid_seqs", "global_valid_toks", "vocab_parallel_rank"]
    documented += ["vocab_parallel_group", "context_parallel_group"]

    def positional(function: object) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:]

    for cls in (nemo_rl.ClippedPGLossFn, nemo_rl.DPOLossFn, nemo_rl.DistillationLossFn):
        assert positional(cls.__call__) == documented
    assert positional(nemo_rl.SequencePackingLossWrapper.__call__) == documented
    assert positional(nemo_rl.NLLLoss.__call__) == [*documented, "dpo_loss", "dpo_average_log_probs"]
    present = ["next_token_logprobs", *documented[1:4]]
    assert positional(nemo_rl.NLLLossFn.__call__) == [*present, "dpo_loss", "dpo_average_log_probs"]
    assert positional(nemo_rl.PreferenceLoss.__call__) == ["rewards", *documented[1:4]]
    assert positional(nemo_rl.PreferenceLossFn.__call__) == ["logits", *documented[1:4]]
    bounds = ["loss_fn", "cu_seqlens_q", "cu_seqlens_q_padded"]
    assert positional(nemo_rl.SequencePackingLossWrapper.__init__) == bounds
    assert inspect.signature(nemo_rl.DPOLossFn.__call__).parameters["global_valid_toks"].default is None
    types_of = {cls: cls.loss_type.value for cls in (nemo_rl.NLLLoss, nemo_rl.PreferenceLoss, nemo_rl.DPOLossFn)}
    assert list(types_of.values()) == ["token_level", "sequence_level", "sequence_level"]
    assert nemo_rl.ClippedPGLossFn({"token_level_loss": False}).loss_type is nemo_rl.LossType.SEQUENCE_LEVEL


def test_words_equal_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL's prepare_loss_input compares input types by its own enum, its trainer normalizers by identity."""
    host = types.ModuleType("nemo_rl.algorithms.loss.interfaces")
    host.MetricNormalizer = enum.Enum(
        "MetricNormalizer", {"TOKENS": "tokens", "SEQUENCES": "sequences", "NONE": "none"}
    )
    their = enum.Enum("LossInputType", {"LOGIT": "logit", "LOGPROB": "logprob"})
    assert nemo_rl.NLLLoss.input_type == their.LOGPROB == nemo_rl.LossInputType.LOGPROB
    assert nemo_rl.NLLLoss.input_type != their.LOGIT and nemo_rl.PreferenceLoss.input_type == their.LOGIT
    assert nemo_rl.LossType.TOKEN_LEVEL != their.LOGIT and len({nemo_rl.LossInputType.LOGIT: 0}) == 1
    assert nemo_rl.NLLLoss().metric_normalizations["loss"] is nemo_rl.MetricNormalizer.TOKENS
    monkeypatch.setitem(sys.modules, host.__name__, host)
    assert nemo_rl.ClippedPGLossFn({}).metric_normalizations["num_valid_samples"] is host.MetricNormalizer.NONE


def test_losses_go_to_other_processes() -> None:
    """NeMo-RL's driver sends the loss to its workers."""
    data = reference.batch(0)
    for fn in (nemo_rl.ClippedPGLossFn({"ratio_clip_max": 0.28}), nemo_rl.NLLLoss(), nemo_rl.DistillationLossFn({})):
        there = pickle.loads(pickle.dumps(fn))
        assert there.loss_type is fn.loss_type and there.input_type is fn.input_type
        assert there(data["logits"], data, *COUNTS)[0].item() == fn(data["logits"], data, *COUNTS)[0].item()


BAD: list[tuple[Callable[[dict], object], str]] = [
    (lambda d: nemo_rl.NLLLoss()(d["logits"], d, None, COUNTS[1], next_token_logprobs=d["logits"]), "and not both"),
    (lambda d: nemo_rl.NLLLoss()(None, d, None, COUNTS[1]), "give next_token_logits, or next_token_logprobs"),
    (lambda d: nemo_rl.NLLLoss()(d["logits"], None, None, COUNTS[1]), "data lacks the field 'token_mask'"),
    (lambda d: nemo_rl.NLLLoss()(d["logits"][:, :-2], d, None, COUNTS[1]), r"the logits have shape \[6, 6, 8\]"),
    (lambda d: nemo_rl.NLLLoss()(d["logits"][0], d, None, COUNTS[1]), r"log-probs have|has shape"),
    (
        lambda d: nemo_rl.NLLLoss()(d["logits"], {**d, "sample_mask": torch.full((6,), 0.5)}, None, COUNTS[1]),
        "0 and 1 only",
    ),
    (
        lambda d: nemo_rl.NLLLoss()(d["logits"], {**d, "input_ids": d["input_ids"] + 7}, None, COUNTS[1]),
        "outside the voc",
    ),
    (
        lambda d: nemo_rl.ClippedPGLossFn({})(d["logits"], {k: v for k, v in d.items() if k[:4] != "prev"}, *COUNTS),
        "data lacks the field 'prev_logprobs'",
    ),
    (lambda d: nemo_rl.DPOLossFn({})(d["logits"][:5], {k: v[:5] for k, v in d.items()}, *COUNTS), r"must be \[2P\]"),
    (lambda d: nemo_rl.PreferenceLoss()(torch.zeros(3), d, *COUNTS), r"rewards \[3\] and sample_mask \[6\]"),
    (
        lambda d: nemo_rl.DistillationLossFn({})(
            d["logits"], {**d, "teacher_topk_indices": torch.zeros(6, 8, 0)}, *COUNTS
        ),
        "topk must be positive",
    ),
    (
        lambda d: nemo_rl.DistillationLossFn({})(
            d["logits"], {k: v for k, v in d.items() if k != "sample_mask"}, *COUNTS
        ),
        "data lacks the field 'sample_mask'",
    ),
    (
        lambda d: nemo_rl.SequencePackingLossWrapper(nemo_rl.MseValueLossFn({}), torch.arange(7) * 8)(
            d["logits"].view(1, 48, 8), d, *COUNTS
        ),
        "MseValueLossFn reads no log-probs",
    ),
    (
        lambda d: nemo_rl.prepare_packed_loss_input(
            d["logits"], d, nemo_rl.DistillationLossFn({}), torch.arange(7) * 8
        ),
        "reads 'distillation': use SequencePackingLossWrapper",
    ),
    (lambda d: nemo_rl.prepare_loss_input(d["logits"], d, nemo_rl.DraftCrossEntropyLossFn()), "draft head's input"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_calls_that_cannot_be_right_are_refused(call: Callable[[dict], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(reference.batch(0, poison=False))


def _bad_rank(rank: int) -> str:
    data, world = reference.batch(0, poison=False), dist.group.WORLD
    half = data["logits"][:, :, 4 * rank : 4 * rank + 4]
    if rank == 1:
        data["input_ids"] = data["input_ids"] + 20
    with pytest.raises(ValueError, match=r"rank 1: .*outside the vocabulary") as caught:
        nemo_rl.NLLLoss()(half, data, None, COUNTS[1], rank, world)
    return str(caught.value)


def test_one_ranks_fault_is_an_error_on_all() -> None:
    first, second = run_world(2, _bad_rank)
    assert first == second
