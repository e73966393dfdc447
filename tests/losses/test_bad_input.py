"""Bad input to a loss in one process: a ValueError that names the field, the value and what is right."""

from __future__ import annotations

import math

import pytest
import torch

from parallel_rl import (
    NLLLoss,
    ParallelGroups,
    SequencePackingLossWrapper,
    count_valid,
    set_validation,
    token_logprobs,
)
from parallel_rl.losses.registry import losses
from parallel_rl.validation import get_validation, validation
from tests.losses.fault_calls import LENGTHS, Fault, S, V, make_call, make_data
from tests.losses.faults import FAULTS, REQUIRED

ALONE = ParallelGroups()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loss", sorted(name for name in losses() if not name.startswith(("doc_", "test_"))))
def test_the_call_is_right_before_it_is_spoiled(loss: str, packed: bool) -> None:
    assert math.isfinite(make_call(loss, REQUIRED.get(loss, {}), packed, ALONE).run())


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if not fault.needs_context], ids=str)
def test_a_fault_is_named(fault: Fault) -> None:
    call = make_call(fault.loss, fault.config, fault.packed, ALONE)
    right = call.run()
    fault.spoil(call)
    for mode in ("auto", "always"):
        with validation(mode), pytest.raises(ValueError, match=fault.message):
            call.run()
    assert make_call(fault.loss, fault.config, fault.packed, ALONE).run() == right


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.needs_context and not f.by_value], ids=str)
def test_shapes_dtypes_and_options_are_always_looked_at(fault: Fault) -> None:
    call = make_call(fault.loss, fault.config, fault.packed, ALONE)
    fault.spoil(call)
    with validation("never"), pytest.raises(ValueError, match=fault.message):
        call.run()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.ways], ids=str)
def test_every_way_of_calling_refuses_in_the_same_words(fault: Fault) -> None:
    """A host's log-probs and `token_scores` once took counts, masks and gradients that the call on logits refuses."""
    told = {}
    for way in ("logits", *fault.ways):
        call = make_call(fault.loss, fault.config, fault.packed, ALONE)
        assert math.isfinite(call.run(way)) and call.log_probs.isfinite().all()
        fault.spoil(call)
        with pytest.raises(ValueError) as error:
            call.run(way)
        told[way] = str(error.value).replace("response_mask", "token_mask")
    first, ordinary = told["logits"].split(";")[0], told.pop("logits")
    for way, text in told.items():  # of log-probs, shapes are told beside theirs
        assert text.split(";")[0] == first and (text == ordinary or way != "hidden states"), (way, text)


@pytest.mark.parametrize("name", ["target V", "a mask of 2", "NaN in advantages", "a token too far"])
def test_values_are_not_looked_at_where_validation_is_off(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    call = make_call(fault.loss, fault.config, fault.packed, ALONE)
    fault.spoil(call)
    with validation("never"):
        call.run()


def test_values_of_device_tensors_are_looked_at_on_request_only() -> None:
    """On the meta device a look at a value is an error of torch: no look, no error."""
    data = {name: value.to("meta") for name, value in make_data().items()}
    counts = torch.ones((), device="meta"), torch.ones((), device="meta")
    logits = torch.randn(4, S, V, device="meta")
    loss, _ = NLLLoss(vocab_size=V)(logits, data, *counts)
    assert loss.device.type == "meta"
    with validation("always"), pytest.raises((RuntimeError, NotImplementedError)):
        NLLLoss(vocab_size=V)(logits, data, *counts)
    with pytest.raises(ValueError, match="input_ids is on cpu, the model's output on meta"):
        NLLLoss(vocab_size=V)(logits, make_data(), *counts)


def test_masked_places_may_hold_anything() -> None:
    """What a fault is in a valid place is none where no loss is carried."""
    call = make_call("clipped_pg", {}, False, ALONE)
    right = call.run()
    for name, value in {"input_ids": 10**6, "advantages": math.nan, "prev_logprobs": math.inf}.items():
        call.data[name] = call.data[name].clone()
        call.data[name][:, 0] = value
        for row, length in enumerate(LENGTHS):
            call.data[name][row, length:] = value
    assert call.run() == right


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        ({}, {}, "data lacks the field 'input_ids'; this loss needs input_ids"),
        ({}, {"input_ids": torch.zeros(4, S)}, r"input_ids must be int64 or int32 \[B, S\], got torch.float32"),
        (
            {},
            {"input_ids": torch.zeros(4, S - 1).long()},
            r"the logits have leading shape \[4, 8\]; data of shape \[4, 7\] over cp = 1 needs \[4, 7\]",
        ),
        ({}, {"input_ids": torch.full((4, S), 11)}, r"target 11 at \[0, 0\] lies outside the vocabulary \[0, 11\)"),
        ({}, {"input_ids": torch.zeros(4, S, device="meta").long()}, "input_ids is on meta, the model's output on cpu"),
        ({"temperature": 0.0}, None, "temperature = 0.0 must be positive"),
        ({"vocab_size": 99}, None, "vocab_size = 99 splits"),
        ({"cp_layout": "ring"}, None, "cp_layout = 'ring' is not valid"),
        ({"backend": "cuda"}, None, "backend = 'cuda' is not valid"),
    ],
)
def test_log_probs_as_data(arguments: dict, data: dict | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprobs(torch.zeros(4, S, V), make_data() if data is None else data, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_token_logits": None}, "next_token_logits must be a tensor or an LMHeadInput, got NoneType"),
        ({"next_token_logits": [[0.0]]}, "next_token_logits must be a tensor or an LMHeadInput, got list"),
        ({"data": None}, "data must be a mapping from names to tensors, got NoneType"),
        ({"data": [make_data()]}, "data must be a mapping from names to tensors, got list"),
        ({"vocab_parallel_group": 2}, "vocab_parallel_group must be a ProcessGroup or None, got 2"),
        ({"context_parallel_group": "cp"}, "context_parallel_group must be a ProcessGroup or None, got 'cp'"),
    ],
)
def test_an_argument_of_another_kind_is_named(change: dict, message: str) -> None:
    """What any rank's program has wrong before a tensor is looked at; these were AttributeErrors."""
    data = make_data()
    right = {"next_token_logits": torch.zeros(4, S, V), "data": data} | count_valid(data)._asdict()
    right = {{"seqs": "global_valid_seqs", "toks": "global_valid_toks"}.get(k, k): v for k, v in right.items()}
    with pytest.raises(ValueError, match=message):
        NLLLoss()(**{**right, **change})


def test_bounds_that_are_no_tensor_are_named() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens must be a tensor of integers \[B \+ 1\], got \[0, 8\]"):
        SequencePackingLossWrapper(NLLLoss(), [0, 8])  # type: ignore[arg-type]


def test_collect_is_checked_like_the_call() -> None:
    call = make_call("clipped_pg", {"positive_example_nll_weight": 0.1}, False, ALONE)
    del call.data["rewards"]
    from parallel_rl import ClippedPGLossFn

    with pytest.raises(ValueError, match="data lacks the field 'rewards'"):
        ClippedPGLossFn(call.config, vocab_size=V).count(call.data)
    packed = SequencePackingLossWrapper(NLLLoss(), torch.tensor([0, 8]))
    for loss_fn in (NLLLoss(), packed):
        assert not loss_fn.needs_collect and dict(loss_fn.count(call.data)) == {}
        with pytest.raises(ValueError, match="NLLLoss in this configuration collects nothing from the model's output"):
            loss_fn.collect(call.logits, call.data, *count_valid(call.data))


def test_modes() -> None:
    assert get_validation() == "auto"
    with pytest.raises(ValueError, match="validation mode 'off' is not valid; choose one of auto, always, never"):
        set_validation("off")  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), validation("never"):
        assert get_validation() == "never"
        raise ZeroDivisionError
    assert get_validation() == "auto"
