"""The fused head on the real megatron-core: the gradients and log-probs are those of the output layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import VOCAB, WIDTH, Case, make_data, make_model
from tests.distributed.megatron_check import with_references
from tests.distributed.megatron_step import compare

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

LAYOUTS = {
    1: [Case(fused=True), Case(rows="padding", loss="pg", fused=True)],
    2: [
        Case(tp=2, fused=True),
        Case(tp=2, sp=True, rows="packed", position="learned_absolute", tied=True, loss="pg", fused=True),
        Case(cp=2, rows="padding", loss="pg", fused=True),
        Case(pp=2, tied=True, rows="packed", fused=True),
    ],
    4: [
        Case(tp=2, cp=2, sp=True, rows="packed", loss="pg", fused=True),
        Case(tp=2, pp=2, sp=True, tied=True, fused=True),
    ],
}
WAYS = {"ddp": {}, "no ddp": {"ddp": False, "per_token": False}, "wgrad fusion": {"wgrad_fusion": True}}


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_gradients_are_those_of_one_process(world: int) -> None:
    # on four ranks each way on one layout
    ways = (
        zip([*LAYOUTS[4], LAYOUTS[4][0]], WAYS.values(), strict=True)
        if world == 4
        else product(LAYOUTS[2], WAYS.values())
    )
    cases = [replace(case, **way) for case, way in ways]
    for rank, errors in enumerate(run_world(world, compare, with_references(cases))):
        for case, worst in zip(cases, errors, strict=True):
            bad = {name: error for name, error in worst.items() if not error < 1e-12}
            assert not bad, f"rank {rank}, {case}: {bad}"


def logprobs(rank: int, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """From the output layer, from the fused head, and from the output layer while the head is off."""
    import parallel_rl.megatron as M
    from parallel_rl import ParallelGroups, token_logprobs

    M.initialize(case.tp, case.cp)
    model = M.wrap_model(make_model(case), ddp=False)
    groups, data = ParallelGroups.from_megatron(), make_data("ragged")
    inputs = M.padded_input(data["input_ids"])

    def compute(head: M.FusedHead | None) -> Tensor:
        with torch.no_grad():
            out = M.forward_logits(model, inputs)
        given = out if head is None else head(out)
        return token_logprobs(given, data, None, groups.tensor, groups.context, vocab_size=VOCAB)

    whole = compute(None)
    names = list(model.state_dict())
    head = M.fuse_head(model, budget=1 << 13)
    assert list(model.state_dict()) == names
    fused = compute(head)
    with head.logits():
        off = compute(head)
    head.remove()
    return whole, fused, off if torch.equal(compute(head), whole) else torch.zeros_like(off)


def test_log_probs_are_those_of_the_output_layer() -> None:
    for whole, fused, off in run_world(2, logprobs, Case(tp=2, sp=True)):
        assert whole.shape == (len(whole), WIDTH) and bool((whole[:, 1:] != 0).any())
        torch.testing.assert_close(fused, whole, rtol=1e-12, atol=1e-12)
        assert torch.equal(off, whole)


def straight(rank: int) -> list[tuple[float | None, Tensor]]:
    """The factor that the head was given, and the gradient of its weight, with Megatron's data parallelism and without."""
    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss, count_valid

    M.initialize()
    data, loss_fn, found = make_data("ragged"), NLLLoss(vocab_size=VOCAB), []
    inputs, counts = M.padded_input(data["input_ids"]), count_valid(data)
    for ddp in (True, False):
        model = M.wrap_model(make_model(Case()), ddp=ddp)
        head = M.fuse_head(model)
        weight = head.model.output_layer.weight
        given = head(M.forward_logits(model, inputs))
        loss_fn(given, data, *counts)[0].backward()
        with head.logits():
            (3 * loss_fn(head(M.forward_logits(model, inputs)), data, *counts)[0]).backward()
        (loss_fn(head(M.forward_logits(model, inputs)), data, *counts)[0] + weight.square().sum()).backward()
        with torch.no_grad():
            teacher = M.forward_logits(model, inputs)
        assert head(teacher).main_grad_factor is None
        found.append((given.main_grad_factor, M.gradient(weight).clone()))
    M.destroy()
    return found


def test_the_gradient_goes_straight_to_main_grad_and_nothing_beside_it_is_lost() -> None:
    """Without `gradient_accumulation_fusion`, the trainer's way: in one step a fused loss, one on logits, and a penalty on the
    weight. Megatron drops what comes while the flag of the first is set, in later micro-batches too."""
    [[(factor, got), (none, want)]] = run_world(1, straight)
    assert factor == 1.0 and none is None
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def refused(rank: int) -> list[str]:
    import parallel_rl.megatron as M

    M.initialize()
    found = []
    for change in ("scalar", "gathered", "mode"):
        model = make_model(Case())
        if change == "scalar":
            model.output_layer = M.ScalarHead(model.config)
        if change == "gathered":
            model.output_layer.gather_output = True
        with pytest.raises(ValueError) as error:
            M.fuse_head(model, mode="fast" if change == "mode" else "auto")  # type: ignore[arg-type]
        found.append(str(error.value))
    return found


def test_heads_that_cannot_be_fused_are_refused() -> None:
    ((scalar, gathered, mode),) = run_world(1, refused)
    assert "ScalarHead" in scalar and "parallel_output" in gathered and "'fast'" in mode
