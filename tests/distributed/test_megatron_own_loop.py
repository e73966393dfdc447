"""Slips in a Megatron loop of one's own: each is an error on every rank, or a warning; the right loop keeps its numbers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_rl import ClippedPGLossFn, NLLLoss
from parallel_rl.testing.pool import preload, run_world
from tests.collectives import recorded
from tests.distributed.megatron_cases import VOCAB, Case, make_data, make_loss, make_model
from tests.distributed.megatron_step import wrapper
from tests.watch import Operators, Watch

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

Batches = Sequence[dict[str, Tensor]]
NLL = partial(make_loss, Case())


def _mine(parts: int = 4) -> Batches:
    """This data rank's micro-batches of the six rows."""
    from parallel_rl import ParallelGroups

    groups = ParallelGroups.from_megatron()
    rows = {name: field[:4] for name, field in make_data("ragged").items() if name != "lengths"}
    return [{name: field[i : i + 4 // parts] for name, field in rows.items()} for i in range(0, 4, 4 // parts)][
        groups.dp_rank :: groups.dp_size
    ]


def _own(model: torch.nn.Module, loss_fn: Any, batches: Batches, counts: Any = None, **options: Any) -> None:
    """A step through Megatron's schedule and `megatron_loss_func`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import parallel_rl.megatron as M
    from parallel_rl import ParallelGroups, count_valid

    counts = counts or count_valid(batches, ParallelGroups.from_megatron().data)
    heads, labels = options.get("mtp_loss") is not None, options.pop("labels", False)
    without_data, change = options.pop("without_data", False), options.pop("change", lambda result: result)
    options = {"config": M.unwrap(model).config, "num_microbatches": len(batches), **options}

    def step(queue: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., object]]:
        data = next(queue)
        loss_func = M.megatron_loss_func(loss_fn, None if without_data else data, *counts, **options)
        output = M.forward_logits(model, M.padded_input(data["input_ids"]), mtp=heads)
        return output[..., 0] * 1 if labels else output, lambda output: change(loss_func(output))

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0]["input_ids"].shape[1],
        micro_batch_size=len(batches[0]["input_ids"]),
        forward_only=False,
    )


def _wrapped(case: Case | None = None, **fields: object) -> torch.nn.Module:
    import parallel_rl.megatron as M

    model = M.wrap_model(make_model(case or Case()))
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def _lacking(name: str) -> Batches:
    return [{key: field for key, field in data.items() if key != name} for data in _mine()]


def _counts(group: str) -> None:
    """Counts over a wrong group, or of one micro-batch."""
    import torch.distributed as dist

    from parallel_rl import ParallelGroups, count_valid

    batches, groups = _mine(), ParallelGroups.from_megatron()
    wrong = {"world": dist.group.WORLD, "none": None, "context": groups.data_context, "micro-batch": groups.data}[group]
    counts = count_valid(batches[1:2] if group == "micro-batch" else batches, wrong)
    _own(_wrapped(), make_loss(Case()), batches, counts)


def _wrong_counts_over_stages() -> None:
    from parallel_rl import count_valid

    batches = _mine()
    _own(_wrapped(Case(pp=2)), make_loss(Case()), batches, count_valid([*batches, *batches]))


def _fault_in(place: int, batches: Batches) -> Batches:
    """The micro-batch at `place` lacks a field."""
    lacking = {name: field for name, field in batches[place].items() if name != "prev_logprobs"}
    return [lacking if i == place % len(batches) else data for i, data in enumerate(batches)]


def _later_fault(place: int, parts: int = 4, steps: int = 1) -> None:
    """On two stages; `steps` right ones come first, after three of which no stage exchanges its faults."""
    model, loss_fn, batches = _wrapped(Case(pp=2)), _pg(), _mine(parts)
    for _ in range(steps - 1):
        _own(model, loss_fn, batches)
    _own(model, loss_fn, _fault_in(place, batches))


def _narrow(own: bool) -> None:
    """A vocabulary beyond the model's, which only the last stage sees."""
    (_own if own else _step_of)(_wrapped(Case(pp=2)), NLLLoss(vocab_size=9 * VOCAB), _mine())


def _step_of(model: torch.nn.Module, loss_fn: Any, batches: Batches) -> None:
    import parallel_rl.megatron as M

    M.forward_backward(model, loss_fn, batches)


def _one_less() -> None:
    """A micro-batch less on the second data rank, with experts that data ranks ask together."""
    from parallel_rl import ParallelGroups

    _own(
        _wrapped(Case(experts="alltoall", ep=2, per_token=False)),
        make_loss(Case()),
        _mine()[ParallelGroups.from_megatron().dp_rank :],
    )


def _torch_optimizer(copies: bool, own: bool = False) -> float:
    """A step of a torch optimizer on Megatron's DDP: how far a weight moves."""
    import parallel_rl.megatron as M

    model, loss_fn = _wrapped(), make_loss(Case())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if own:
        _own(model, loss_fn, _mine())
    else:
        M.forward_backward(model, loss_fn, _mine())
    weight = next(model.parameters())
    before = weight.detach().clone()
    if copies:
        M.copy_main_grads(model)
    optimizer.step()
    return float((weight.detach() - before).abs().max())


def _left_in_grad(zeroes: bool) -> None:
    """Two steps with Megatron's float32 optimizer, which leaves `main_grad` in `grad`."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import parallel_rl.megatron as M

    model = M.wrap_model(make_model(Case(), torch.float32))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    for _ in range(2):
        model.zero_grad_buffer()
        if zeroes:
            optimizer.zero_grad()
        _own(model, make_loss(Case()), _mine())
        optimizer.step()


def _not_zeroed(ddp: bool) -> None:
    import parallel_rl.megatron as M

    model = M.wrap_model(make_model(Case()), ddp=ddp)
    for _ in range(2):
        M.forward_backward(model, make_loss(Case()), _mine())


def _step(
    loss: Any,
    *,
    case: Case | None = None,
    fields: dict[str, object] | None = None,
    training: bool = True,
    **options: Any,
) -> None:
    import parallel_rl.megatron as M

    model = _wrapped(case, **(fields or {})).train(training)
    M.forward_backward(model, loss, _mine(), **options)


def _pg() -> Any:
    return make_loss(Case(loss="pg"))


def _dpo() -> Any:
    from parallel_rl import DPOLossFn

    return DPOLossFn(vocab_size=VOCAB)


def _bare(loss: Any, **options: Any) -> None:
    _own(make_model(Case()), loss, _mine(), **options)


def _idle() -> None:
    """Without DDP a data rank that has no micro-batch runs no schedule: none waits for it."""
    import parallel_rl.megatron as M
    from parallel_rl import ParallelGroups, count_valid

    groups, model = ParallelGroups.from_megatron(), make_model(Case())
    batches = _mine() if groups.dp_rank == 0 else []
    counts = count_valid(batches, groups.data)
    if batches:
        _own(model, make_loss(Case()), batches, counts, ddp=False)
    M.sum_gradients(model)


def _one_callback() -> None:
    import parallel_rl.megatron as M
    from parallel_rl import count_valid

    model, batches = _wrapped(Case(tp=2)), _mine(2)
    once = M.megatron_loss_func(NLL(), batches[0], *count_valid(batches), config=model.config, num_microbatches=2)
    for data in batches:
        once(M.forward_logits(model, M.padded_input(data["input_ids"])))


def _in_torch_ddp() -> None:
    import parallel_rl.megatron as M

    model = torch.nn.parallel.DistributedDataParallel(make_model(Case(tp=2)))
    M.forward_backward(model, NLL(), _mine())


def _chunks(order: list[int], micro_batches: int = 4) -> None:
    import parallel_rl.megatron as M

    case = Case(pp=2, chunks=2)
    M.forward_backward([M.wrap_model(make_model(case, chunk=i)) for i in order], NLL(), _mine()[:micro_batches])


def _scale_of_rank(loss: Tensor) -> Tensor:
    return loss * (1 + torch.distributed.get_rank())


def _foreign_prompt(**layout: int) -> None:
    """Tensor ranks embed an id of a prompt beyond the vocabulary as 0; a stage or context rank fails alone."""
    batches = _mine()
    prompt = (batches[1]["token_mask"] == 0).nonzero()[0].tolist()
    batches[1]["input_ids"] = batches[1]["input_ids"].clone()
    batches[1]["input_ids"][tuple(prompt)] = VOCAB + 40
    _own(_wrapped(Case(**layout)), _pg(), batches)


def _without_rows() -> None:
    import parallel_rl.megatron as M

    rows = [{name: field[: torch.distributed.get_rank()] for name, field in data.items()} for data in _mine()]
    M.forward_backward(_wrapped(), NLL(), rows)


def _frozen(own: bool, case: Case) -> None:
    """A layer is frozen on the second rank alone."""
    import parallel_rl.megatron as M

    model = make_model(case)
    model.decoder.layers[0].requires_grad_(torch.distributed.get_rank() == 0)
    model = M.wrap_model(model)
    if own:
        _own(model, make_loss(case), _mine())
    else:
        M.forward_backward(model, make_loss(case), _mine())


def _other_norm(own: bool) -> None:
    """Tensor ranks begin with another replica of a norm."""
    import parallel_rl.megatron as M

    model = _wrapped(Case(tp=2))
    with torch.no_grad():
        M.unwrap(model).decoder.final_layernorm.weight.mul_(1 + torch.distributed.get_rank())
    (_own if own else M.forward_backward)(model, NLL(), _mine())


def _steps(
    own: bool,
    *,
    finalize: Any = None,
    ddp: Any = True,
    after: Callable[[Any], object] = lambda model: None,
    optimized: Any = None,
    change: Callable[[Any], Any] = lambda result: result,
    steps: int = 2,
) -> None:
    """Steps of Megatron's optimizer with one slip."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import parallel_rl.megatron as M

    model = M.wrap_model(make_model(Case(), torch.float32), ddp=ddp)
    if finalize is not None:
        model.config.finalize_model_grads_func = finalize
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0)
    optimizer = get_megatron_optimizer(settings, [optimized() if optimized else model])
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        if own:
            _own(model, NLL(), _mine(), change=change)
        else:
            M.forward_backward(model, NLL(), _mine())
        after(model)
        optimizer.step()


def _sharded_steps() -> None:
    """Three steps of the distributed optimizer, whose data ranks keep the same weights."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import parallel_rl.megatron as M

    model = M.wrap_model(make_model(Case(), torch.float32), ddp=wrapper(Case(sharded=True)))
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model])
    for own in (True, False, True):
        model.zero_grad_buffer()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not a leaf")  # Megatron's
            optimizer.zero_grad()
        (_own if own else M.forward_backward)(model, NLL(), _mine())
        optimizer.step()


def _finalize_again(model: torch.nn.Module) -> None:
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([model])


def _other_model() -> torch.nn.Module:
    import parallel_rl.megatron as M

    return M.wrap_model(make_model(Case(), torch.float32))


def _accumulated_by_hand() -> None:
    model, batches = _wrapped(), _mine()
    for _ in range(2):
        _own(model, NLL(), batches)


def _chunks_with_configs(overlap: bool, loss: Callable[[], Any] = NLL, steps: Sequence[Batches] = ()) -> None:
    """Megatron-LM's model_provider makes a config for each chunk; steps hold other rows."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import parallel_rl.megatron as M
    from parallel_rl import ParallelGroups, count_valid

    models = [M.wrap_model(make_model(Case(pp=2, chunks=2), chunk=i)) for i in range(2)]
    for model in models:
        model.config.overlap_p2p_comm = overlap
    for batches in steps or (_mine(), [*_mine()[2:], *_mine()[2:]], _mine()[:2]):
        counts = count_valid(batches, ParallelGroups.from_megatron().data)

        def step(queue: Any, model: Any, counts: Any = counts, number: int = len(batches)) -> Any:
            data = next(queue)
            config = M.unwrap(model).config
            loss_func = M.megatron_loss_func(loss(), data, *counts, config=config, num_microbatches=number)
            return M.forward_logits(model, M.padded_input(data["input_ids"])), loss_func

        for model in models:
            model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in models],
            model=models,
            num_microbatches=len(batches),
            seq_length=batches[0]["input_ids"].shape[1],
            micro_batch_size=len(batches[0]["input_ids"]),
            forward_only=False,
        )


def _rows_by_stage() -> None:
    batches = _mine()
    _own(_wrapped(Case(pp=2)), NLL(), batches[:: 1 - 2 * torch.distributed.get_rank()])


def _own_statistics() -> None:
    """Statistics that each data rank counted alone."""
    options = {"reference_policy_kl_penalty": 0.0, "positive_example_nll_weight": 0.1}
    loss_fn, batches = ClippedPGLossFn(options, vocab_size=VOCAB), _mine()
    batches = [{**data, "rewards": torch.ones(len(data["sample_mask"]), dtype=torch.float64)} for data in batches]
    _own(_wrapped(), partial(loss_fn, statistics=loss_fn.count(batches)), batches)


def _groups(sizes: dict[str, int]) -> None:
    import parallel_rl.megatron as M
    from parallel_rl import ParallelGroups

    groups = ParallelGroups.from_megatron()
    wrong = ParallelGroups(context=groups.context, data=groups.data_context) if sizes else ParallelGroups()
    M.forward_backward(_wrapped(Case(**sizes)), NLL(), _mine(), groups=wrong)


def _head(of_other: bool) -> None:
    """Hidden states and the head of another model, or a head on one rank alone."""
    import parallel_rl.megatron as M

    model, other = _wrapped(Case(tp=2)), _wrapped(Case(tp=2))
    head = M.fuse_head(model)
    if of_other:
        _own(model, NLL(), _mine(), head=M.fuse_head(other))
    elif torch.distributed.get_rank():
        head.remove()
        head = None
    if not of_other:
        M.forward_backward(model, NLL(), _mine(), head=head)


def _short(own: bool) -> None:
    """Packed sequences that end before their last token that carries loss."""
    import parallel_rl.megatron as M
    from parallel_rl import SequencePackingLossWrapper

    batches, lengths = _mine(2), torch.tensor([2, 2])
    if own:
        _own(_wrapped(Case(pp=2)), SequencePackingLossWrapper(NLL(), *M.packed_bounds(lengths)), batches)
    else:
        M.forward_backward(_wrapped(Case(pp=2)), NLL(), [M.packed_batch(data, lengths) for data in batches])


def _moved_mask(own: bool, places: int) -> None:
    """Recorded log-probs are 0 outside of responses of three tokens; the mask lies some places beside them."""
    rows = {name: torch.cat([data[name] for data in _mine(2)]) for name in _mine()[0]}
    mask = torch.zeros_like(rows["token_mask"])
    mask[:, 3:6] = 1
    rows |= {name: torch.where(mask.bool(), -0.5, 0.0) for name in ("prev_logprobs", "generation_logprobs")}
    rows |= {"token_mask": mask.roll(places, 1), "sample_mask": torch.ones_like(rows["sample_mask"])}
    (_own if own else _step_of)(_wrapped(Case(tp=2)), _pg(), [rows])


def _normalised(own: bool) -> None:
    """The model returns the log_softmax of each tensor rank's columns."""
    import parallel_rl.megatron as M

    model = _wrapped(Case(tp=2))
    layer = M.unwrap(model).output_layer
    layer.register_forward_hook(lambda module, args, out: (out[0].log_softmax(-1), out[1]))
    (_own if own else _step_of)(model, NLL(), _mine())


def _head_of_another_model() -> None:
    """The hidden size is V/tp, so no shape tells logits from hidden states."""
    import parallel_rl.megatron as M

    other, model = (M.wrap_model(make_model(Case(tp=2))) for _ in range(2))
    _own(model, NLL(), _mine(), head=M.fuse_head(other))


def _both_ends() -> None:
    import parallel_rl.megatron as M

    model = _wrapped(Case(pp=2))
    M.unwrap(model).pre_process = M.unwrap(model).post_process = True
    M.forward_backward(model, NLL(), _mine())


def _mode_by_rank() -> None:
    import parallel_rl.megatron as M
    from parallel_rl.validation import validation

    with validation("never" if torch.distributed.get_rank() else "auto"):
        M.forward_backward(_wrapped(Case(tp=2)), NLL(), _mine())


DROPS = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
HALF: dict[str, object] = {"fp16": True}
STEP_HOLDS = "micro-batches of this step hold"
# name: layout, the slip, what an error on every rank says
REFUSED: dict[str, tuple[dict[str, int], Callable[[], object], str]] = {
    "counts over the world": ({"tp": 2}, lambda: _counts("world"), STEP_HOLDS),
    "counts over data and context": ({"cp": 2}, lambda: _counts("context"), STEP_HOLDS),
    "counts without a group": ({}, lambda: _counts("none"), STEP_HOLDS),
    "counts of one micro-batch": ({"tp": 2}, lambda: _counts("micro-batch"), STEP_HOLDS),
    "counts over stages": ({"pp": 2}, _wrong_counts_over_stages, STEP_HOLDS),
    "a fault of the second micro-batch over stages": ({"pp": 2}, lambda: _later_fault(1), "'prev_logprobs'"),
    "a fault of the last micro-batch over stages": ({"pp": 2}, lambda: _later_fault(-1), "'prev_logprobs'"),
    "a fault of the only micro-batch over stages": ({"pp": 2}, lambda: _later_fault(0, 1), "'prev_logprobs'"),
    "a fault in the fourth step over stages": ({"pp": 2}, lambda: _later_fault(-1, steps=4), "'prev_logprobs'"),
    "a fault over chunks": (
        {"pp": 2, "virtual_pp": 2},
        lambda: _chunks_with_configs(True, _pg, [_lacking("prev_logprobs")]),
        "data lacks the field 'prev_logprobs'",
    ),
    "a loss that returns one number over stages": (
        {"pp": 2},
        lambda: _own(_wrapped(Case(pp=2)), lambda logits, *_, **__: logits.sum(), _mine()),
        "<lambda> returned Tensor; a loss returns (its local loss, its Metrics)",
    ),
    "a vocabulary that is too wide over stages": ({"pp": 2}, lambda: _narrow(True), "vocab_size"),
    "a vocabulary that is too wide over stages of a step": ({"pp": 2}, lambda: _narrow(False), "vocab_size"),
    "too few num_microbatches": (
        {},
        lambda: _own(_wrapped(), NLL(), _mine(), num_microbatches=1),
        "pass the schedule's num_microbatches",
    ),
    "no micro-batch": ({}, lambda: _own(_wrapped(), NLL(), _mine(), num_microbatches=0), "must be at least 1"),
    "no DDP": ({}, lambda: _bare(NLL()), "ddp = True, but config.finalize_model_grads_func is None"),
    "DDP that is not finalized": (
        {},
        lambda: _own(_wrapped(finalize_model_grads_func=None), NLL(), _mine()),
        "ddp = True, but config.finalize_model_grads_func is None",
    ),
    "DDP that is denied": (
        {},
        lambda: _own(_wrapped(), NLL(), _mine(), ddp=False),
        "ddp = False, but config.finalize_model_grads_func is set",
    ),
    "dropout": (
        {},
        lambda: _own(_wrapped(**DROPS), _pg(), _mine()),
        "hidden_dropout = 0 in the model's config, or pass",
    ),
    "dropout over stages": ({"pp": 2}, lambda: _own(_wrapped(Case(pp=2), **DROPS), _pg(), _mine()), "allow_dropout"),
    "dropout beside a reference": (
        {},
        lambda: _own(_wrapped(hidden_dropout=0.1), _dpo(), _mine(2)),
        "hidden_dropout = 0.1: this loss compares the policy with reference_policy_logprobs",
    ),
    "dropout in a step": ({"tp": 2}, lambda: _step(_pg(), case=Case(tp=2), fields=DROPS), "allow_dropout=True"),
    "no field": ({}, lambda: _own(_wrapped(), _pg(), _lacking("advantages")), "data lacks the field 'advantages'"),
    "no field over stages": (
        {"pp": 2},
        lambda: _own(_wrapped(Case(pp=2)), _pg(), _lacking("prev_logprobs")),
        "data lacks the field 'prev_logprobs'",
    ),
    "no mask over stages": (
        {"pp": 2},
        lambda: _own(_wrapped(Case(pp=2)), NLL(), _lacking("sample_mask"), (torch.tensor(4), torch.tensor(9))),
        "data lacks the field 'sample_mask'",
    ),
    "no statistics over stages": (
        {"pp": 2},
        lambda: _own(_wrapped(Case(pp=2)), make_loss(Case(loss="cov")), _mine()),
        "needs statistics= of the whole step",
    ),
    "labels given to the model": (
        {"tp": 2},
        lambda: _own(_wrapped(Case(tp=2)), NLL(), _mine(), labels=True),
        "the losses that GPTModel returns if it is given labels",
    ),
    "a micro-batch less with experts": (
        {"ep": 2},
        _one_less,
        "the number of micro-batches (with expert parallelism; add masked ones): it is 1 on one and 2 on another",
    ),
    "no data on the last stage": (
        {},
        lambda: _own(_wrapped(), NLL(), _mine(), without_data=True),
        "data is None on the last pipeline stage",
    ),
    "a schedule of layers": (
        {},
        lambda: _step(NLL(), fields={"overlap_moe_expert_parallel_comm": True}),
        "overlap_moe_expert_parallel_comm = True needs a forward step that returns a schedule plan",
    ),
    "no heads": ({}, lambda: _own(_wrapped(), NLL(), _mine(), mtp_loss=NLL()), "mtp_loss is given, but mtp_num_layers"),
    "a mean over tokens that DDP does not know of": (
        {},
        lambda: _step(NLL(), fields={"calculate_per_token_loss": False}),
        "config.calculate_per_token_loss = False was set after Megatron's DDP was made",
    ),
    "torch's DDP": ({"tp": 2}, lambda: _in_torch_ddp(), "the model is in torch's DistributedDataParallel"),
    "another dtype between stages": (
        {"pp": 2},
        lambda: _step(NLL(), case=Case(pp=2), fields={"pipeline_dtype": torch.float32}),
        "config.pipeline_dtype = torch.float32, in which stages receive hidden states, but the model is in torch.float64",
    ),
    "one chunk of two": (
        {"pp": 2, "virtual_pp": 2},
        lambda: _chunks([0]),
        "model has 1 chunks (vp_stage [0]), the sched",
    ),
    "an odd number of micro-batches": (
        {"pp": 2, "virtual_pp": 2},
        lambda: _chunks([0, 1], 3),
        "3 micro-batches on 2 stages of 2 chunks each, but their schedule takes a multiple of 2; add masked ones",
    ),
    "chunks in another order": (
        {"pp": 2, "virtual_pp": 2},
        lambda: _chunks([1, 0]),
        "model has 2 chunks (vp_stage [1, 0])",
    ),
    "another scale of auxiliary losses": (
        {},
        lambda: _step(NLL(), case=Case(experts="alltoall"), fields={"moe_grad_scale_func": lambda: torch.ones(1)}),
        "config.moe_grad_scale_func is set",
    ),
    "a micro-batch without rows": ({}, lambda: _without_rows(), "input_ids is [0, 16]; leave an empty micro-batch out"),
    "labels beside ids over stages": (
        {"pp": 2},
        lambda: _own(
            _wrapped(Case(pp=2)), NLL(), [{**data, "shift_labels": data["input_ids"].roll(-1, 1)} for data in _mine()]
        ),
        "data has input_ids and shift_labels",
    ),
    "a frozen layer": ({}, lambda: _frozen(False, Case()), "differ in the model's weights (a checksum, also of which"),
    "a frozen layer in an own step": ({}, lambda: _frozen(True, Case()), "differ in the model's weights"),
    "a frozen layer on tensor ranks": ({"tp": 2}, lambda: _frozen(False, Case(tp=2)), "which weights train"),
    "another norm": ({"tp": 2}, lambda: _other_norm(False), "the weights that tensor ranks hold alike, such as norms"),
    "another norm in an own step": ({"tp": 2}, lambda: _other_norm(True), "the weights that tensor ranks hold alike"),
    "gradients that nothing sums": (
        {},
        lambda: _steps(False, finalize=lambda *_, **__: None),
        "later config.finalize_model_grads_func",
    ),
    "gradients that nothing sums in an own step": (
        {},
        lambda: _steps(True, finalize=lambda *_, **__: None),
        "later config.finalize_model_grads_func",
    ),
    "shards for an optimizer without": (
        {},
        lambda: _steps(False, ddp=wrapper(Case(sharded=True))),
        "one kind of optimizer on all keep them so",
    ),
    "another number of tokens": (
        {},
        lambda: _steps(True, change=lambda result: (result[0], torch.tensor(7), result[2])),
        "tokens from the callbacks in place of 0",
    ),
    "a mean over tokens that DDP does not know of in an own step": (
        {},
        lambda: _own(_wrapped(calculate_per_token_loss=False), NLL(), _mine()),
        "was set after Megatron's DDP was made",
    ),
    "rows by stage": ({"pp": 2}, _rows_by_stage, "input_ids or masks of this step differ between pipeline stages"),
    "statistics of a data rank": ({}, _own_statistics, "Call loss_fn.count once a step on all its micro-batches"),
    "no groups": ({}, lambda: _groups({}), "groups has 1 data ranks, Megatron's process groups 2"),
    "context ranks among data ranks": ({"cp": 2}, lambda: _groups({"cp": 2}), "groups has 2 data ranks"),
    "the head of another model": ({"tp": 2}, lambda: _head(True), "head is the fused head of another model"),
    "the head of another model in an own step": ({"tp": 2}, _head_of_another_model, "fused head of another model"),
    "log-probs of a shard": ({"tp": 2}, lambda: _normalised(False), "normalised over this tensor rank's columns alone"),
    "log-probs of a shard in an own step": (
        {"tp": 2},
        lambda: _normalised(True),
        "normalised over this tensor rank's columns alone",
    ),
    "a head on one rank": ({"tp": 2}, lambda: _head(False), "whether head= is given (1, or 0)"),
    "packed sequences that end early": ({"pp": 2}, lambda: _short(False), "but cu_seqlens gives sequence 0 2 tokens"),
    "packed sequences that end early in an own step": (
        {"pp": 2},
        lambda: _short(True),
        "but cu_seqlens gives sequence 0 2 tokens",
    ),
    "both ends on each stage": ({"pp": 2}, _both_ends, "(pre_process, post_process) of the chunks are [(True, True)]"),
    "validation by rank": ({"tp": 2}, _mode_by_rank, "differ in set_validation (0: never, 1: auto, 2: always)"),
    **{
        f"a foreign prompt over {axis}": (
            {axis: 2},
            partial(_foreign_prompt, **{axis: 2}),
            "the highest of input_ids is 71",
        )
        for axis in ("tp", "cp", "pp")
    },
    "a loss scale by rank": (
        {},
        lambda: _step(NLL(), fields={"grad_scale_func": _scale_of_rank}),
        "the loss scale (config.",
    ),
    "a loss scale of 0": (
        {},
        lambda: _step(NLL(), fields={"grad_scale_func": lambda loss: loss * 0}),
        "must multiply a loss by a finite scale above 0, got 0.0",
    ),
    "a loss scale that is a number in an own step": (
        {},
        lambda: _own(_wrapped(grad_scale_func=8.0), NLL(), _mine()),
        "must multiply a loss by a finite scale above 0, got nan",
    ),
    "ids below 0": (
        {"tp": 2},
        lambda: _own(_wrapped(Case(tp=2)), NLL(), [{**d, "input_ids": d["input_ids"] - VOCAB} for d in _mine()]),
        "lies outside the",
    ),
}
# the same, and what a warning says
WARNED: dict[str, tuple[dict[str, int], Callable[[], object], str]] = {
    "dropout without recorded log-probs": (
        {},
        lambda: _own(_wrapped(**DROPS), NLL(), _mine()),
        "dropout differs between",
    ),
    "dropout in a step": ({}, lambda: _step(NLL(), fields=DROPS), "dropout differs between layouts"),
    "a mask to the left": ({"tp": 2}, lambda: _moved_mask(False, -1), "token_mask lies one place to the left of prev_"),
    "a mask to the right in an own step": (
        {"tp": 2},
        lambda: _moved_mask(True, 1),
        "token_mask lies one place to the right of prev_logprobs",
    ),
    "one micro-batch many times": (
        {"tp": 2},
        lambda: _step_of(_wrapped(Case(tp=2)), NLL(), [_mine()[0]] * 3),
        "all 3 micro-batches of the first step are the same tensor",
    ),
    "fp16 without a scale": ({}, lambda: _step(NLL(), fields=HALF), "fp16 without config.grad_scale_func"),
    "idle heads": ({}, lambda: _step(NLL(), case=Case(mtp="token-mean")), "mtp_num_layers = 2 without mtp_loss"),
    "idle heads in an own step": (
        {},
        lambda: _own(_wrapped(Case(mtp="token-mean")), NLL(), _mine()),
        "the heads of multi-token prediction do not learn",
    ),
    "a torch optimizer": ({}, lambda: _torch_optimizer(False), "SGD steps without a gradient, so no weight moves"),
    "a torch optimizer in an own step": (
        {},
        lambda: _torch_optimizer(False, own=True),
        "copy_main_grads(model) before",
    ),
    "gradients that were not zeroed": ({}, lambda: _not_zeroed(True), "call model.zero_grad_buffer() and optimizer."),
    "routers in eval mode": (
        {},
        lambda: _step(NLL(), case=Case(experts="alltoall"), training=False),
        "the model is in eval mode",
    ),
    "a gradient that the optimizer left": ({}, lambda: _left_in_grad(False), "optimizer.zero_grad() and model."),
    "one callback for all micro-batches": ({"tp": 2}, lambda: _one_callback(), "a callback was called twice"),
    "a loss that cuts rows in order": (
        {"cp": 2},
        lambda: _own(_wrapped(Case(cp=2)), NLLLoss(vocab_size=VOCAB, cp_layout="contiguous"), _mine()),
        "the loss has cp_layout = 'contiguous', the model's config cp_partition_mode = 'zigzag'",
    ),
    "experts that drop tokens": (
        {},
        lambda: _step(NLL(), case=Case(experts="alltoall"), fields={"moe_expert_capacity_factor": 1.0}),
        "moe_expert_capacity_factor = 1.0 must be None: with it the numbers depend on the layout",
    ),
    "gradients that were zeroed": (
        {},
        lambda: _steps(False, after=lambda model: model.zero_grad_buffer(), steps=1),
        "steps on gradients that are all 0",
    ),
    "an optimizer of another model": ({}, lambda: _steps(False, optimized=_other_model, steps=1), "all 0"),
    "gradients that are summed twice": (
        {},
        lambda: _steps(False, after=_finalize_again, steps=1),
        "the gradients grew between the step's backward and the optimizer",
    ),
    "gradients that are summed twice in an own step": (
        {},
        lambda: _steps(True, after=_finalize_again, steps=1),
        "so do not call finalize_model_grads again",
    ),
    "a detached loss": (
        {},
        lambda: _steps(True, change=lambda result: (result[0].detach(), *result[1:]), steps=1),
        "a loss that was detached",
    ),
    "gradients that were not zeroed in an own step": ({}, _accumulated_by_hand, "the gradients of an earlier step are"),
    "gradients without DDP": ({}, lambda: _not_zeroed(False), "before each step call optimizer.zero_grad()"),
}
# right, without a word
SILENT: dict[str, tuple[dict[str, int], Callable[[], object]]] = {
    "dropout that is accepted": ({}, lambda: _own(_wrapped(**DROPS), _pg(), _mine(), allow_dropout=True)),
    "dropout that a step accepts": ({}, lambda: _step(_pg(), fields=DROPS, allow_dropout=True)),
    "a torch optimizer with copied gradients": ({}, lambda: _torch_optimizer(True)),
    "Megatron's optimizer": ({}, lambda: _left_in_grad(True)),
    "shards of gradients": ({}, lambda: _sharded_steps()),
    "chunks with a config each": ({"pp": 2, "virtual_pp": 2}, lambda: _chunks_with_configs(True)),
    "an idle data rank without DDP": ({}, _idle),
    "no DDP, and said so": ({}, lambda: _bare(NLL(), ddp=False)),
    "no data on the first stage": (
        {"pp": 2},
        lambda: _own(_wrapped(Case(pp=2)), NLL(), _mine(), without_data=torch.distributed.get_rank() == 0),
    ),
    "statistics": ({}, lambda: _own(_wrapped(), partial(make_loss(Case()), statistics=None), _mine())),
}


def _norms_of_heads(rank: int, case: Case) -> tuple[float, float, float]:
    """Gradient norms with heads that learn, by `forward_backward` and in an own schedule, and with heads that do not."""
    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss

    M.initialize(case.tp, case.cp, case.pp)
    norms, mtp_loss = [], NLLLoss(vocab_size=VOCAB)
    for run in (
        lambda model: M.forward_backward(model, make_loss(case), _mine(), mtp_loss=mtp_loss),
        lambda model: _own(model, make_loss(case), _mine(), mtp_loss=mtp_loss),
        lambda model: _own(model, make_loss(case), _mine()),
    ):
        model = _wrapped(case)
        run(model)
        norms.append(M.grad_norm(model).item())
    M.destroy()
    return norms[0], norms[1], norms[2]


@pytest.mark.parametrize("case", [Case(tp=2, sp=True, mtp="token-mean"), Case(pp=2, per_token=False, mtp="token-mean")])
def test_heads_learn_in_a_schedule_of_ones_own(case: Case) -> None:
    """They did not, without a word."""
    for step, own, idle in run_world(2, _norms_of_heads, case):
        assert own == pytest.approx(step, rel=1e-12) and abs(idle / step - 1) > 1e-3


def _norms_of_one_tensor_rank(rank: int, own: bool) -> str:
    import parallel_rl.megatron as M

    case = Case(tp=2, pp=2)
    M.initialize(tp=2, pp=2)
    model = _wrapped(case)
    with torch.no_grad():
        for name, weight in M.unwrap(model).named_parameters():
            if "input_layernorm" in name and torch.distributed.get_rank() == 1:
                weight.mul_(2)
    try:
        (_own if own else _step_of)(model, NLL(), _mine())
    except ValueError as error:
        return str(error)
    finally:
        M.destroy()
    return ""


@pytest.mark.parametrize("own", [False, True])
def test_replicas_of_a_stage_are_compared_over_its_tensor_ranks(own: bool) -> None:
    for error in run_world(4, _norms_of_one_tensor_rank, own):
        assert "the weights that tensor ranks hold alike" in error


def _half(rank: int) -> dict[str, tuple[float, float, Tensor]]:
    """The gradient norm before and after clipping, and a weight after SGD: clipped here, or by Megatron's optimizer."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import parallel_rl.megatron as M

    M.initialize(tp=2)
    found = {}
    for name, scale, clip in (("plain", 1.0, 0.0), ("scaled", 1024.0, 0.0), ("by Megatron", 1024.0, 0.5)):
        model = M.wrap_model(make_model(Case(tp=2), torch.float16))
        settings = OptimizerConfig(
            optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=clip, fp16=True, bf16=False,
            params_dtype=torch.float16, loss_scale=scale,
        )  # fmt: skip
        optimizer = get_megatron_optimizer(settings, [model])
        model.config.grad_scale_func = optimizer.scale_loss
        M.forward_backward(model, NLL(), _mine())
        norm = M.grad_norm(model)
        if not clip:
            M.clip_grads_(model, 0.5, norm)
        clipped = M.grad_norm(model).item()
        assert optimizer.step()[0]
        found[name] = (norm.item(), clipped, M.unwrap(model).output_layer.weight.detach().float())
    M.destroy()
    return found


def test_the_norm_and_clipping_know_the_loss_scale_of_fp16() -> None:
    """The norm was 1024 times too large, and clipping by it left a gradient of 1/1024."""
    for found in run_world(2, _half):
        (norm, clipped, weight), (of_scaled, after, moved), (_, _, right) = found.values()
        assert of_scaled == pytest.approx(norm, rel=1e-2) and norm > 0.5
        assert after == pytest.approx(0.5, rel=1e-5) and clipped == pytest.approx(0.5, rel=1e-5)
        assert (moved - right).abs().max() < 1e-3 and (moved - weight).abs().max() < 1e-2


def _copied(rank: int) -> str:
    import parallel_rl.megatron as M

    M.initialize()
    model = M.wrap_model(make_model(Case(), torch.bfloat16))
    model.config.grad_scale_func = lambda loss: loss * 8
    M.forward_backward(model, NLL(), _mine())
    M.copy_main_grads(model)
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
        assert torch.equal(parameter.grad, (parameter.main_grad / 8).bfloat16())
    sharded = M.wrap_model(make_model(Case()), ddp=wrapper(Case(sharded=True)))
    try:
        M.copy_main_grads(sharded)
    except ValueError as error:
        return str(error)
    finally:
        M.destroy()
    return ""


def test_copied_gradients_have_the_dtype_of_their_parameters_and_no_scale() -> None:
    [refusal] = set(run_world(2, _copied))
    assert "use_distributed_optimizer = True" in refusal


def _cost(rank: int) -> tuple[list[bool], list[bool], list[list[str]], list[str]]:
    """Whether making a step's callbacks runs operators and collectives, by step; a step's collectives; syncs of the norm."""
    import parallel_rl.megatron as M
    from parallel_rl import ParallelGroups, count_valid

    M.initialize()
    model, config, batches = _wrapped(), _wrapped().config, _mine()
    counts = count_valid(batches, ParallelGroups.from_megatron().data)
    runs, communicates, collectives = [], [], []
    for _ in range(5):
        with Operators() as operators:
            for data in batches:
                M.megatron_loss_func(NLL(), data, *counts, config=config, num_microbatches=len(batches))
        runs.append(operators.names != [])
        communicates.append(any(name.startswith("c10d::") for name in operators.names))
        model.zero_grad_buffer()
        with recorded() as seen:
            M.forward_backward(model, NLL(), batches)
        collectives.append(list(seen))
    M.unwrap(model).config.grad_scale_func = lambda loss: loss * 8
    with Watch() as watch:
        M.clip_grads_(model, 0.5, M.grad_norm(model))
        M.copy_main_grads(model)
    M.destroy()
    return runs, communicates, collectives, watch.syncs


def test_what_costs_runs_in_the_first_three_steps() -> None:
    """Afterwards a callback is made on the host alone, and no step has a collective that the first one lacks."""
    for runs, communicates, collectives, syncs in run_world(2, _cost):
        assert runs == communicates == [True, True, True, False, False]
        first, *later = map(Counter, collectives)
        assert not any(step - first for step in later) and later == later[:1] * len(later) and syncs == []


def _run(rank: int, kind: str, layout: dict[str, int], names: list[str]) -> dict[str, str | list[str]]:
    """The error, or the warnings, of each slip on this rank."""
    import parallel_rl.megatron as M

    table = {"refused": REFUSED, "warned": WARNED, "silent": SILENT}[kind]
    found: dict[str, str | list[str]] = {}
    for name in names:
        M.initialize(**layout)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", message="When using async grad")  # Megatron's, in the first forward
            try:
                table[name][1]()
                found[name] = [str(one.message) for one in caught if one.category is UserWarning]
            except ValueError as error:
                found[name] = str(error)
        M.destroy()  # what is under way between stages ends with its group
    return found


#: slips whose guard another row meets: in a step or in an own one, and at further places of a step
TWINS = {
    "a fault of the last micro-batch over stages", "a fault of the only micro-batch over stages", "no DDP", "no groups",
    "a vocabulary that is too wide over stages of a step", "dropout over stages", "a frozen layer in an own step",
    "another norm", "gradients that nothing sums in an own step", "the head of another model",
    "a mean over tokens that DDP does not know of in an own step", "log-probs of a shard", "packed sequences that end early",
    "dropout in a step", "idle heads in an own step", "a torch optimizer in an own step", "an optimizer of another model",
    "gradients that are summed twice in an own step",
}  # fmt: skip
TWIN = pytest.mark.parametrize("twins", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "twins"])


def _in_worlds(kind: str, table: dict[str, Any]) -> dict[str, list[str | list[str]]]:
    layouts = {tuple(sorted(row[0].items())): row[0] for row in table.values()}
    found: dict[str, list[str | list[str]]] = {}
    for layout in layouts.values():
        names = [name for name, row in table.items() if row[0] == layout]
        for of_rank in run_world(2, _run, kind, layout, names):
            for name, outcome in of_rank.items():
                found.setdefault(name, []).append(outcome)
    return found


@TWIN
def test_a_slip_is_an_error_on_every_rank(twins: bool) -> None:
    """A step with it hung, or gave other numbers without a word."""
    table = {name: row for name, row in REFUSED.items() if (name in TWINS) == twins}
    found = _in_worlds("refused", table)
    for name, (_, _, message) in table.items():
        assert len(found[name]) == 2, name
        for outcome in found[name]:
            assert isinstance(outcome, str) and message in outcome, (name, outcome)


OF_FIRST_RANK = ("a mask to the left", "a mask to the right in an own step", "one micro-batch many times")


@pytest.mark.slow
@TWIN
def test_a_slip_that_may_be_meant_is_warned_of_once(twins: bool) -> None:
    table = {name: row for name, row in WARNED.items() if (name in TWINS) == twins}
    found = _in_worlds("warned", table)
    for name, (_, _, message) in table.items():
        for outcome in found[name][: 1 if name in OF_FIRST_RANK else 2]:
            assert len(outcome) == 1 and message in outcome[0], (name, outcome)


@pytest.mark.slow
def test_what_is_right_is_not_warned_of() -> None:
    found = _in_worlds("silent", SILENT)
    assert {name: outcomes for name, outcomes in found.items() if outcomes != [[], []]} == {}
