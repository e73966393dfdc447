"""Arguments of another kind than a step takes: each error names what to give in their place, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import NLLLoss, count_valid
from parallel_rl.testing.pool import preload, run_world
from tests.distributed.megatron_cases import VOCAB, Case, make_data, make_model, split

pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

Batch = dict[str, Tensor]
LOSS = NLLLoss(vocab_size=VOCAB)

#: what is given, and what the message says
STEPS: dict[str, str] = {
    "one dict": r"batches is one dict; give the step's micro-batches as a list, [batch]",
    "one packed batch": "batches is one MicroBatch; give the step's micro-batches as a list",
    "an iterator": "got list_iterator; of an iterator take [next(iterator) for _ in range(get_num_microbatches())]",
    "an exhausted loader, on rank 1": "rank 1: batches[1] is NoneType; a micro-batch is a dict of tensors",
    "a name": "loss_fn = 'grpo' is a name; give a loss: get_loss('grpo')",
    "a class": "loss_fn is the class NLLLoss; give an instance, NLLLoss(vocab_size=...)",
    "a function": "loss_fn must be a loss of this package, got _bare; `register_objective` makes one of a function",
    "a partial of options": "a partial may give statistics= alone",
    "no gradient": "forward_backward runs under torch.no_grad (or inference_mode), where there is no backward",
    "sizes of the config": "the model's config has tensor_model_parallel_size = 1, the process groups have 2; give Transfo",
    "packed rows on local layers": "packed rows on Megatron's DotProductAttention, which takes padded ones only; build the",
}


def _bare(logits: Tensor, data: Batch) -> Tensor:
    return logits.sum()


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _errors(rank: int) -> dict[str, str]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    import parallel_rl.megatron as M

    M.initialize(tp=2)
    model = M.wrap_model(make_model(Case(tp=2)))
    data = split(make_data("ragged"), 2)
    packed = M.packed_batch(data[0], data[0]["lengths"])
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, tensor_model_parallel_size=2, use_cpu_initialization=True
    )
    local = M.wrap_model(GPTModel(config, get_gpt_layer_local_spec(), 32, 16))

    def step(batches: object = data, loss_fn: object = LOSS, model: torch.nn.Module = model) -> str:
        return _error(lambda: M.forward_backward(model, loss_fn, batches))  # type: ignore[arg-type]

    found = {
        "one dict": step(data[0]),
        "one packed batch": step(packed),
        "an iterator": step(iter(data)),
        "an exhausted loader, on rank 1": step([data[0], None if rank else data[1]]),
        "a name": step(loss_fn="grpo"),
        "a class": step(loss_fn=NLLLoss),
        "a function": step(loss_fn=_bare),
        "a partial of options": step(loss_fn=partial(LOSS, vocab_parallel_group=None)),
        "packed rows on local layers": step([packed], model=local),
    }
    with torch.no_grad():
        found["no gradient"] = step()
    M.unwrap(model).config.tensor_model_parallel_size = 1
    found["sizes of the config"] = step()
    own = partial(M.megatron_loss_func, data=data[0], config=M.unwrap(model).config, num_microbatches=1)
    counts = dict(zip(("global_valid_seqs", "global_valid_toks"), count_valid(data[0]), strict=True))
    found |= {f"{what}, own schedule": _error(lambda loss_fn=loss_fn: own(loss_fn, **counts)) for what, loss_fn in (
        ("a name", "grpo"), ("a class", NLLLoss), ("sizes of the config", LOSS)
    )}  # fmt: skip
    M.destroy()
    return found


def test_each_names_what_to_give_instead() -> None:
    for found in run_world(2, _errors):
        for what, text in found.items():
            assert text.startswith("ValueError: ") and STEPS[what.removesuffix(", own schedule")] in text, (what, text)
        assert STEPS.keys() <= found.keys()


def _with_statistics(rank: int) -> list[float]:
    """The loss of a step by itself, and with its statistics in a partial."""
    import parallel_rl.megatron as M

    M.initialize(pp=2)
    data = make_data("ragged")
    batches, loss_fn, losses = split(data, 3), NLLLoss({"token_weights": "sum"}, vocab_size=VOCAB), []
    for batch in batches:
        batch["token_weights"] = batch["advantages"].abs()
    for loss in (loss_fn, partial(loss_fn, statistics=loss_fn.count(batches))):
        model = M.wrap_model(make_model(Case(pp=2)))
        model.zero_grad_buffer()
        losses.append(M.forward_backward(model, loss, batches).floats()["loss"])
    M.destroy()
    return losses


def test_a_partial_brings_the_statistics_of_the_step() -> None:
    """The form that `megatron_loss_func` asks for."""
    for alone, given in run_world(2, _with_statistics):
        assert alone == given != 0


def _assertions(rank: int) -> list[str]:
    """Of Megatron's local layers, as one builds a GPTModel of one's own."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    import parallel_rl.megatron as M

    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True}
    found = []
    for layout, options in (({"cp": 2}, {"context_parallel_size": 2}), ({"tp": 2}, {"sequence_parallel": True})):
        M.initialize(**layout)
        tp = layout.get("tp", 1)
        config = TransformerConfig(**sizes, **options, tensor_model_parallel_size=tp)
        found.append(_error(lambda config=config: GPTModel(config, get_gpt_layer_local_spec(), 32, 16)))
    config = TransformerConfig(**sizes, tensor_model_parallel_size=2)
    model, ids = GPTModel(config, get_gpt_layer_local_spec(), 32, 16), torch.zeros(1, 4, dtype=torch.int64)
    found.append(_error(lambda: M.forward_logits(model, M.packed_input(ids, torch.tensor([0, 4])))))
    dist.barrier()
    M.destroy()
    return found


def test_assertions_of_megatrons_layers_name_those_that_do_what_is_missing() -> None:
    for context, parallel, packed in run_world(2, _assertions):
        assert "only supported by TEDotProductAttention!; on a CPU give the GPTModel transformer_layer_spec" in context
        assert "sequence parallel not supported by torch LayerNorm; on a CPU give the GPTModel Transformer" in parallel
        assert "Packed sequence is not supported" in packed and "parallel_rl.megatron.layer_spec(config)" in packed
