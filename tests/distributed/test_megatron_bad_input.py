"""Every bad input is a ValueError on every rank, and nothing hangs."""

from __future__ import annotations

import pytest
import torch

from parallel_rl import NLLLoss
from parallel_rl.config.architecture import Experts
from parallel_rl.testing.pool import WorldError, preload, run_world
from tests.distributed.megatron_cases import VOCAB, WIDTH, Case, make_model

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")


_STEPS = {
    "no batch": "batches is empty; ['teacher_logits'] cannot be made up, pass a micro-batch whose sample_mask is 0",
    "no mask": "rank 1: data lacks the field 'token_mask'",
    "no rows": "rank 1: data lacks the field 'input_ids'",
    "no advantages": "data lacks the field 'advantages'",
    "fewer batches": "the ranks of a group differ in the number of micro-batches: it is 1 on one and 2 on another",
    "other rows": "the ranks of a group differ in the number of tokens in their rows: it is 32 on one and 36 on another",
    "shapes": "micro-batches have local shapes [(2, 8), (2, 10)], but pipeline stages with variable_seq_lengths = False",
    "no finalizing": "config.finalize_model_grads_func must be set if, and only if",
    "fused head": "pass what `fuse_head` gave as head=",
}


_OVERRIDES: dict[str, dict[str, object]] = {
    "drops": {"moe_expert_capacity_factor": 1.0},
    "draws": {"moe_input_jitter_eps": 0.1},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
}


def _bad_step(rank: int, what: str) -> None:
    """One of the two ranks has bad micro-batches; they are data ranks, or tensor ranks, or pipeline stages."""
    import parallel_rl.megatron as M
    from parallel_rl import FullDistillationLossFn, LossFn, NLLLoss, PolicyLossFn

    sizes = {
        "fewer batches": {"tp": 2},
        "no rows": {"tp": 2},
        "other rows": {"pp": 2},
        "no advantages": {"pp": 2},
        "shapes": {"pp": 2},
    }.get(what, {})

    def rows(width: int, count: int = 2) -> dict[str, torch.Tensor]:
        ids = torch.zeros(count, width, dtype=torch.int64)
        return {"input_ids": ids, "token_mask": torch.ones(count, width), "sample_mask": torch.ones(count)}

    M.initialize(**sizes)
    model = M.wrap_model(make_model(Case(**sizes)))
    batches = [rows(8), rows(10 if what == "shapes" else 8)]
    if rank == 1 and what == "no batch":
        batches = []
    if rank == 1 and what in ("no mask", "no rows"):
        del batches[1]["token_mask" if what == "no mask" else "input_ids"]
    if rank == 1 and what == "fewer batches":
        batches = [rows(8, count=4)]
    if rank == 1 and what == "other rows":
        batches[1] = rows(10)
    if what == "shapes":
        model.config.variable_seq_lengths = False
    if what == "no finalizing":
        model.config.finalize_model_grads_func = None
    if what == "fused head":
        M.fuse_head(model)
    loss = {"no advantages": PolicyLossFn, "no batch": FullDistillationLossFn}.get(what, NLLLoss)
    loss_fn: LossFn = loss(vocab_size=VOCAB)
    M.forward_backward(model, loss_fn, batches)


def _bad(rank: int, what: str) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    import parallel_rl.megatron as M

    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    if what == "world":
        M.initialize(tp=3)
    elif what == "size":
        M.initialize(cp=0)
    elif what in ("dropout", "heads", "layers", "overrides", "attention", *_OVERRIDES):
        M.initialize(tp=1 if what == "layers" else 2, pp=2 if what == "layers" else 1)
        if what == "dropout":
            M.build_config(**sizes, dropout=0.1)
        if what in _OVERRIDES:
            M.build_config(**sizes, experts=Experts(4, 8), overrides=_OVERRIDES[what])
        if what == "heads":
            M.build_config(**(sizes | {"num_attention_heads": 1}))
        if what == "layers":
            M.build_config(**(sizes | {"num_layers": 3}))
        if what == "overrides":
            M.build_config(**sizes, overrides={"hiden_dropout": 0.0})
        M.build_model(M.build_config(**sizes, overrides={"window_size": (4, 0)}), VOCAB, WIDTH)
    elif what in ("zigzag", "bounds", "total"):
        M.initialize(cp=2)
        ids = torch.zeros(2, 6, dtype=torch.int64)
        if what == "zigzag":
            M.padded_input(ids)
        if what == "bounds":
            M.packed_input(ids, torch.tensor([0, 6, 12]))
        M.packed_bounds(torch.tensor([3, 5]), total=11)
    elif what == "sequence parallel":
        M.initialize(tp=2)
        model = make_model(Case(tp=2, sp=True))
        M.forward_logits(model, M.padded_input(torch.zeros(1, 5, dtype=torch.int64)))
    elif what in ("experts", "routed"):
        M.initialize()
        config = make_model(Case(experts="alltoall", per_token=what == "routed")).config
        M.megatron_loss_func(None, {}, None, None, config=config, num_microbatches=1, ddp=what == "routed")
    elif what == "uneven experts":
        M.initialize(ep=2)
        model = M.wrap_model(make_model(Case(experts="alltoall", ep=2)))
        M.forward_backward(model, NLLLoss(vocab_size=VOCAB), [_rows()] * (1 + rank))
    elif what == "biases of experts":
        M.initialize()
        overrides = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
        config = M.build_config(**sizes, experts=Experts(4, 8), overrides=overrides)
        M.forward_backward(M.build_model(config, VOCAB, WIDTH), NLLLoss(vocab_size=VOCAB), [_rows()])
    elif what in ("positions of fp8", "micro-batches of fp8"):
        M.initialize()
        model = M.wrap_model(make_model(Case()))
        model.config.fp8 = "hybrid"
        batches = [_rows(16)] * (1 + rank) if what == "micro-batches of fp8" else [_rows(16), _rows(16 - 4 * rank)]
        M.forward_backward(model, NLLLoss(vocab_size=VOCAB), batches)
    elif what == "unmarked replicas":
        M.initialize(tp=2, etp=1)
        bare = make_model(Case(experts="alltoall", tp=2, sp=True))
        for _name, parameter in bare.named_parameters():
            parameter.allreduce = True  # as Megatron makes them
        M.forward_backward(M.wrap_model(bare), NLLLoss(vocab_size=VOCAB), [_rows()])
    elif what in ("global_aux_loss", "seq_aux_loss"):
        M.initialize()
        config = make_model(Case(experts="alltoall", per_token=False, balance=what)).config
        M.megatron_loss_func(None, {}, None, None, config=config, num_microbatches=1)
    elif what == "shared heads":
        M.initialize()
        model = make_model(Case(experts="alltoall", balance="seq_aux_loss", mtp="token-mean"))
        model.config.mtp_use_repeated_layer = True
        M.forward_backward(M.wrap_model(model), NLLLoss(vocab_size=VOCAB), [_rows()])
    elif what == "micro-batches":
        M.initialize()
        M.megatron_loss_func(None, {}, None, None, config=make_model(Case()).config, num_microbatches=0)
    elif what in _STEPS:
        _bad_step(rank, what)
    elif what == "scalar head":
        M.initialize()
        config = M.build_config(**sizes, overrides={"mtp_num_layers": 1})
        M.build_model(config, VOCAB, WIDTH, scalar_head=True)
    elif what == "no heads":
        M.initialize()
        data = {
            "input_ids": torch.zeros(1, 4, dtype=torch.int64),
            "token_mask": torch.ones(1, 4),
            "sample_mask": torch.ones(1),
        }
        M.forward_backward(make_model(Case()), NLLLoss(), [data], mtp_loss=NLLLoss())
    elif what == "idle heads":
        M.initialize()
        model = M.build_model(M.build_config(**sizes, overrides={"mtp_num_layers": 1}), VOCAB, WIDTH)
        overlap = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        M.forward_backward(M.wrap_model(model, ddp=overlap), NLLLoss(vocab_size=VOCAB), [_rows()])
    elif what == "detached heads":
        M.initialize()
        model = M.wrap_model(make_model(Case(mtp="token-mean")))
        model.config.mtp_detach_heads = True  # a field from 0.19 on
        M.forward_backward(model, NLLLoss(vocab_size=VOCAB), [_rows()], mtp_loss=NLLLoss(vocab_size=VOCAB))
    elif what == "rotary":
        M.initialize(cp=2)
        M.build_model(M.build_config(**sizes, cp_layout="contiguous"), VOCAB, WIDTH)
    elif what == "another cut":
        M.initialize(cp=2)
        model = make_model(Case(position="learned_absolute", cut="contiguous"))
        M.forward_backward(model, NLLLoss(cp_layout="contiguous"), [M.padded_batch(_rows())])
    elif what == "cut of the loss":
        M.initialize(cp=2)
        model = make_model(Case(position="learned_absolute", cut="contiguous"))
        M.forward_backward(model, NLLLoss(), [_rows()])
    elif what == "context twice":
        M.initialize(cp=2)
        M.forward_backward(make_model(Case()), NLLLoss(), [M.padded_batch(_rows(), context_group=None)])
    elif what == "recompute":
        M.initialize()
        model = M.build_model(M.build_config(**sizes, recompute=True), VOCAB, WIDTH)
        M.forward_backward(model, NLLLoss(), [M.padded_batch(_rows(), context_group=None)])
    elif what == "position":
        M.initialize()
        M.build_model(M.build_config(**sizes), VOCAB, WIDTH, position_embedding="alibi")


def _rows(width: int = 4) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.zeros(1, width, dtype=torch.int64),
        "token_mask": torch.ones(1, width),
        "sample_mask": torch.ones(1),
    }


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("world", "the world has 2 ranks, which is not divisible by tp 3 × cp 1 × pp 1 = 3"),
        ("size", "cp = 0 must be at least 1"),
        ("dropout", "hidden_dropout = 0.1 must be 0"),
        ("drops", "moe_expert_capacity_factor = 1.0 must be None: with it the numbers depend on the layout"),
        ("draws", "moe_input_jitter_eps = 0.1 must be None"),
        ("norms", "recompute_modules = ['layernorm', 'mlp'] needs Transformer Engine for 'layernorm'"),
        ("sinkhorn", "'sinkhorn' balances the tokens that a rank holds at a time"),
        ("heads", "num_attention_heads = 1 is not divisible by 2 tensor parallel ranks"),
        ("layers", "num_layers = 3 is not divisible by 2 pipeline stages"),
        ("overrides", "hiden_dropout"),
        ("attention", "window_size = (4, 0) is not supported"),
        ("zigzag", "sequence length 6 is not divisible by 4"),
        ("bounds", "padded lengths [6, 6] are not divisible by 4"),
        ("total", "total = 11 must be at least 12"),
        ("sequence parallel", "sequence_parallel splits the 5 local positions over tp = 2"),
        ("experts", "auxiliary losses (of experts) need Megatron's DDP"),
        (
            "routed",
            "routed is missing: with calculate_per_token_loss = True auxiliary losses (of experts) are divided by",
        ),
        ("uneven experts", "differ in the number of micro-batches (with expert parallelism; add masked ones): it is 1"),
        (
            "positions of fp8",
            "rank 1: a micro-batch has 1 × 12 positions on a context rank, which with fp8 = 'hybrid' must be a",
        ),
        (
            "micro-batches of fp8",
            "differ in the number of micro-batches (with FP8 by delayed scaling; add masked ones, or",
        ),
        ("unmarked replicas", "tensor ranks hold replicas of experts (expert_tensor_parallel_size = 1 of 2)"),
        ("global_aux_loss", "divides it by the data ranks; use `forward_backward`, which balances the whole step"),
        ("seq_aux_loss", "'seq_aux_loss' takes a packed row for one sequence and padding for tokens of it"),
        ("shared heads", "mtp_use_repeated_layer = True runs one router for all heads"),
        ("micro-batches", "num_microbatches = 0 must be at least 1"),
        *_STEPS.items(),
        ("scalar head", "mtp_num_layers = 1 is incompatible with scalar_head = True"),
        ("no heads", "mtp_loss is given, but mtp_num_layers = None"),
        ("idle heads", "overlap_grad_reduce = True waits for the gradients of the heads"),
        ("detached heads", "mtp_detach_heads = True with mtp_loss: the loss of the heads would train the LM head"),
        ("biases of experts", "moe_router_enable_expert_bias = True has no effect without Megatron's data parallelism"),
        ("rotary", "cp_layout = 'contiguous' needs position_embedding = 'learned_absolute'"),
        ("another cut", "a micro-batch is cut 'zigzag' over context ranks, the model wants 'contiguous'"),
        ("cut of the loss", "the model wants 'contiguous', the loss 'zigzag'"),
        ("context twice", "context groups of micro-batches need context_parallel_size = 1"),
        ("recompute", "recompute_granularity runs a layer's forward again in backward"),
        ("position", "position_embedding = 'alibi' is not valid"),
    ],
)
def test_bad_input_is_an_error_on_every_rank(what: str, message: str) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, _bad, what)
    assert not caught.value.silent and sorted(caught.value.errors) == [0, 1]
    for text in caught.value.errors.values():
        assert text.startswith("ValueError") and message in text
