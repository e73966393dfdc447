"""The law for DSA's indexer (DeepSeek-V3.2), whose loss attention adds in backward: real layers, from megatron-core 0.19 on."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import Tensor

from parallel_rl.testing.pool import WorldError, preload, run_world
from tests.distributed.megatron_cases import Batch

core = pytest.importorskip("megatron.core")
preload("parallel_rl.megatron")

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.skipif(
    core.__version__ < "0.19", reason="megatron-core 0.19 is the first whose schedules scale the indexer's loss"
)
VOCAB, WIDTH, ROWS = 31, 16, 4


class Layout(NamedTuple):
    tp: int = 1
    cp: int = 1
    pp: int = 1
    packed: bool = False
    per_token: bool = True


class Copied(torch.nn.Module):
    """The same matrix on all tensor ranks, which Megatron has of Transformer Engine alone."""

    def __init__(
        self, size: int, width: int, *, config: TransformerConfig, parallel_mode: str = "", **_: object
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width, size, dtype=config.params_dtype))
        # the indexer's matrices see whole rows, and Megatron averages their gradients; the others see a tensor rank's part
        self.weight.sequence_parallel = config.sequence_parallel and parallel_mode != "duplicated"

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.t(), None


def _model(layout: Layout) -> GPTModel:
    """Latent attention with an indexer that keeps four keys. Its naive backward is in float32."""
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    import parallel_rl.megatron as M

    class Layers(LocalSpecProvider):
        def linear(self) -> type:
            return Copied

        def layer_norm(self, *_: object, **__: object) -> type:
            return M.ShardedNorm

    absorbed_mla.Linear = Copied
    plain = M.build_config(
        num_layers=2, hidden_size=16, num_attention_heads=4, init_std=0.3, sequence_parallel=True,
        calculate_per_token_loss=layout.per_token,
    )  # fmt: skip
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain) if field.init}
    latent = {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope",
        "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0, "qk_layernorm": True, "multi_latent_attention": True,
    }  # fmt: skip
    indexer = {
        "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4,
        "dsa_indexer_loss_coeff": 0.5, "cp_comm_type": "allgather", "kv_channels": None, "num_query_groups": None,
        "dsa_indexer_rotate_activation": False,  # its kernel is for GPUs
        "dsa_indexer_scoring_relu": False,  # which gives ties among the keys, broken otherwise in rows of another width
    }  # fmt: skip
    config = MLATransformerConfig(**(fields | latent | indexer))
    first = parallel_state.get_pipeline_model_parallel_rank() * 2 // layout.pp
    layers = variants.get_transformer_layer_with_experimental_attention_variant_spec(config, Layers())
    spec = TransformerBlockSubmodules(
        layer_specs=layers[first : first + get_num_layers_to_build(config)], layer_norm=M.ShardedNorm
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=M.padded_vocab_size(VOCAB),
        max_sequence_length=WIDTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    ).float()
    M.initialize_weights([model], 3, VOCAB)
    return model


def _data() -> Batch:
    """Rows of which a third carries loss, and one that carries none."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=g)
    mask = (torch.rand(ROWS, WIDTH, generator=g) > 0.7).double()
    return {"input_ids": ids, "token_mask": mask, "sample_mask": torch.tensor([1.0, 0, 1, 1]).double()}


def _oracle(rank: int) -> dict[str, Tensor]:
    """One process without a schedule or a callback: the loss, and what the indexer's layers add to one forward of all rows:
    the mean over their tokens of KL(attention ∥ indexer).
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

    import parallel_rl.megatron as M

    M.initialize()
    model, whole = _model(Layout(per_token=False)), _data()
    DSAIndexerLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    logprobs = M.forward_logits(model, M.padded_input(whole["input_ids"]))[:, :-1, :VOCAB].log_softmax(-1)
    chosen = logprobs.gather(-1, whole["input_ids"][:, 1:, None])[..., 0]
    weight = whole["token_mask"][:, 1:] * whole["sample_mask"][:, None]
    (-(chosen * weight).sum() / weight.sum()).backward()
    grads = {name: parameter.grad.clone() for name, parameter in M.global_parameters([model])}
    M.destroy()
    return grads


def _errors(rank: int, layouts: list[Layout], whole: dict[str, Tensor]) -> list[dict[str, float]]:
    from megatron.core import parallel_state

    import parallel_rl.megatron as M
    from parallel_rl import NLLLoss

    found = []
    for layout in layouts:
        M.initialize(layout.tp, layout.cp, layout.pp)
        model = M.wrap_model(_model(layout))
        rows = [{name: field[i : i + 1] for name, field in _data().items()} for i in range(ROWS)]
        mine = rows[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
        batches = [M.packed_batch(row, torch.tensor([WIDTH])) if layout.packed else row for row in mine]
        M.forward_backward(model, NLLLoss(vocab_size=VOCAB), batches)
        errors = {}
        for name, parameter in M.global_parameters([model]):
            right = M.local_shard(whole[name], parameter)
            errors[name] = ((M.gradient(parameter) - right).norm() / whole[name].norm()).item()
        found.append(errors)
    M.destroy()
    return found


def test_the_indexers_loss_is_a_mean_over_all_tokens_on_every_layout() -> None:
    """Neither masks nor tensor, context, data or pipeline ranks weigh it, nor how Megatron divides. Float32 throughout."""
    sizes = {1: [Layout()], 4: [Layout(tp=2, cp=2), Layout(cp=2, pp=2), Layout(tp=2, pp=2), Layout(tp=2)]}
    whole = run_world(1, _oracle)[0]
    assert any("indexer" in name and grad.norm() > 1e-3 for name, grad in whole.items())
    for world, layouts in sizes.items():
        ways = [each._replace(packed=packed, per_token=per_token)
                for each, packed, per_token in product(layouts, (False, True), (True, False))
                if per_token or each.cp == 1]  # fmt: skip
        for rank in run_world(world, _errors, ways, whole):
            for layout, errors in zip(ways, rank, strict=True):
                bad = {name: error for name, error in errors.items() if not error < 2e-5}
                assert not bad, f"{layout}: {bad}"


def test_context_ranks_without_calculate_per_token_loss_are_refused() -> None:
    """Each context rank's mean would count as a whole one: twice the gradient on two."""
    with pytest.raises(WorldError, match="times CP in this megatron-core"):
        run_world(2, _errors, [Layout(cp=2, per_token=False)], {})
