"""Attention of prefix trees by one call of FlashAttention on a card, against a call for each path in float64."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("megatron.core")

from parallel_rl import build_tree
from parallel_rl.megatron.process_groups import ALONE
from parallel_rl.megatron.trees import attend_at_once, attend_by_path, tree_attention, tree_plan
from tests.prefix_tree.trees import padded, random_sequences
from tests.vocab.linear.cases import error

pytestmark = pytest.mark.gpu
HEADS = 8


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("multiple", [1, 64])
def test_one_call_has_the_numbers_of_each_path_alone(groups: int, dim: int, multiple: int) -> None:
    ids, lengths = padded(random_sequences(1))
    tree = build_tree(ids, lengths, multiple_of=multiple)
    plan = tree_plan(tree, ALONE, torch.device("cuda"))
    shapes = ((tree.row_length, 1, HEADS, dim), *[(1, tree.row_length, 1, groups, dim)] * 2)
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    upstream = torch.randn(tree.row_length, 1, HEADS * dim, generator=generator, device="cuda").bfloat16()

    def run(dtype: torch.dtype, attend: object) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        out = tree_attention(*inputs, plan, None, attend)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    exact = run(torch.float64, attend_by_path)
    chosen, at_once, by_path = (run(torch.bfloat16, attend) for attend in (None, attend_at_once, attend_by_path))
    for truth, default, one, each in zip(exact, chosen, at_once, by_path, strict=True):
        assert torch.equal(default, one)  # the choice on a card
        assert error(one, truth) <= 2 * error(each, truth)
