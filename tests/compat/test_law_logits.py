"""The law on logits, cut over vocabulary, sequence or rows: shares add up to what the class alone gives."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl import Metrics, ParallelGroups
from parallel_rl.compat import lightrft, openrlhf
from parallel_rl.metrics import Metric
from parallel_rl.testing.pool import run_world
from parallel_rl.validation import validation
from tests.compat.law import Answer, Case, Data, plain, run
from tests.watch import Watch


def _logits() -> Data:
    torch.manual_seed(3)
    data = {"logits": torch.randn(4, 8, 10, dtype=torch.float64), "teacher": torch.randn(4, 8, 10, dtype=torch.float64)}
    data["labels"] = torch.where(torch.rand(4, 8) < 0.4, -100, torch.randint(0, 10, (4, 8)))
    data["labels"][2] = -100
    data["inputs"] = torch.where(torch.rand(4, 8) < 0.5, 6, 1)
    data["rewards"] = torch.where(torch.rand(4, 8) < 0.3, -100, torch.tensor([7, 2])[torch.randint(0, 2, (4, 8))])
    data["soft"] = torch.rand(4, 8, dtype=torch.float64)
    return data


@functools.cache
def _logits_cases() -> dict[str, Case]:
    cases = {}
    for layout in ("zigzag", "contiguous"):
        lm = functools.partial(openrlhf.GPTLMLoss(), cp_layout=layout)
        cases[f"gptlm {layout}"] = Case(plain(lm, "logits", "labels"), ("logits",))
    cases["kd"] = Case(plain(lightrft.KDLoss(), "logits", "teacher", "labels"), ("logits",))
    for name, ids, labels in (("hard", [7, 2], "rewards"), ("full", None, "rewards"), ("soft", [7, 2], "soft")):
        fn = openrlhf.PRMLoss(6, ids)

        def call(data: Data, fn=fn, labels=labels, global_valid_toks=None, **keywords: object) -> Answer:
            loss, accuracy = fn(data["inputs"], data["logits"], data[labels], return_acc=True, **keywords)
            return loss, Metrics({"accuracy": Metric("share", accuracy)}) if keywords else {"accuracy": accuracy}

        collect = lambda data, fn=fn, labels=labels, **_: fn.collect(data["inputs"], data[labels])  # noqa: E731
        cases[f"prm {name}"] = Case(call, ("logits",), collect)
    return cases


def _held(name: str, split: str, rank: int) -> list[int]:
    """Positions of the sequence on this rank."""
    if split != "context":
        return list(range(8))
    if "zigzag" in name:
        return [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
    return list(range(4 * rank, 4 * rank + 4))


def _logits_world(rank: int, split: str) -> dict[str, tuple]:
    data, world, answers = _logits(), dist.group.WORLD, {}
    for name, case in _logits_cases().items():
        group = {"tensor": "vocab_parallel_group", "context": "context_parallel_group", "data": None}[split]
        groups = ParallelGroups(**{split: world})
        mine = {key: x[:, _held(name, split, rank)] for key, x in data.items()}
        if split == "tensor":
            mine = {key: x[..., 5 * rank : 5 * rank + 5] if x.dim() == 3 else x for key, x in mine.items()}
        rows = [slice(0, 1), slice(1, 4)] if split != "data" else [slice(2 * rank, 2 * rank + 2), slice(4, 4)]
        parts = [{key: x[each] for key, x in mine.items()} for each in rows]
        shifted = data["labels"][:, 1:] if "gptlm" in name else data["labels"]
        counts = {"global_valid_toks": (shifted != -100).sum()}
        answers[name] = run(case, parts, counts, groups, {group: world} if group else {})
    return answers


@pytest.fixture(scope="module", params=["tensor", "context", "data"])
def logits_world(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, tuple]]]:
    return request.param, run_world(2, _logits_world, request.param)


@pytest.mark.parametrize("name", _logits_cases())
def test_losses_on_logits(name: str, logits_world: tuple[str, list[dict[str, tuple]]]) -> None:
    split, worlds = logits_world
    case, data = _logits_cases()[name], _logits()
    data["logits"].requires_grad_()
    loss, metrics = case.call(data)
    (grad,) = torch.autograd.grad(loss, data["logits"])
    shares = [world[name][0] for world in worlds]
    if split == "tensor":
        torch.testing.assert_close(shares, [loss.detach()] * 2, rtol=1e-12, atol=1e-12)
    else:
        torch.testing.assert_close(sum(shares), loss.detach(), rtol=1e-12, atol=1e-12)
    found = [torch.cat([part[0] for part in world[name][1]]) for world in worlds]
    if split == "context":
        place = torch.tensor(_held(name, split, 0) + _held(name, split, 1)).argsort()
        whole = torch.cat(found, 1)[:, place]
    else:
        whole = torch.cat(found, {"tensor": 2, "data": 0}[split])
    torch.testing.assert_close(whole, grad, rtol=1e-10, atol=1e-12)
    for key, value in metrics.items():
        assert [world[name][2][key] for world in worlds] == pytest.approx([float(value)] * 2)


def _ring(rank: int) -> tuple[Tensor, Tensor]:
    data = _logits()
    logits = data["logits"][:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    loss = openrlhf.GPTLMLoss(dist.group.WORLD)(logits, data["labels"])
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def test_a_ring_is_the_mean_of_its_ranks_means() -> None:
    data, answers = _logits(), run_world(2, _ring)
    logits = data["logits"].requires_grad_()
    halves = [openrlhf.GPTLMLoss()(logits[:, half], data["labels"][:, half]) for half in (slice(0, 4), slice(4, 8))]
    expected = sum(halves) / 2
    torch.testing.assert_close([answer[0] for answer in answers], [expected.detach()] * 2)
    (grad,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(torch.cat([answer[1] for answer in answers], 1), grad)


@pytest.mark.parametrize("name", _logits_cases())
def test_nothing_reads_a_value(name: str) -> None:
    """On the meta device there are no values: whatever needs one fails."""
    data = {key: value.to("meta") for key, value in _logits().items()}
    watch = Watch()
    with validation("never"), watch:
        run(_logits_cases()[name], [data], {"global_valid_toks": torch.ones((), device="meta")}, ParallelGroups(), {})
    assert watch.syncs == []
