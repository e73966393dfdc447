"""Small cases on the installed megatron-core, on CPU ranks: its behaviour where versions are known to differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_rl.doctor.findings import Finding, Severity

_SPARE = "parallel_rl does not call it"


def ask_contracts() -> list[Finding]:
    """Run the cases on two gloo ranks of this machine; report those that a version cannot run."""
    from parallel_rl.testing.pool import preload, run_world

    preload("parallel_rl.megatron")
    answers: list[dict[str, object]] = run_world(2, _rank)
    return [judge([answer[name] for answer in answers]) for name, (_, judge) in _CASES.items()]


def _rank(rank: int) -> dict[str, object]:
    answers: dict[str, object] = {}
    for name, (ask, _) in _CASES.items():
        try:
            answers[name] = ask(rank)
        except Exception as error:  # another version's signature
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def _groups(rank: int) -> object:
    import parallel_rl.megatron as M
    from parallel_rl.groups import ParallelGroups

    seen = []
    for sizes in ({"tp": 2}, {"cp": 2}, {}):
        M.initialize(**sizes)
        groups = ParallelGroups.from_megatron()
        seen.append((groups.tp_size, groups.cp_size, groups.dp_size))
    M.destroy()
    return seen == [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


def _scaling(rank: int) -> object:
    """Return the weights at CP 2 of a three-value callback's token sum, with 1 and 3 valid tokens."""
    tokens = torch.tensor([1, 3][rank], dtype=torch.int)
    return _scaled((tokens, {}), per_token=False, micro_batches=1) / 2  # DDP averages over both context ranks


def _two_values(rank: int) -> object:
    return _scaled(({},), per_token=True, micro_batches=4)


def _scaled(rest: tuple[object, ...], per_token: bool, micro_batches: int) -> float:
    """Return Megatron's scaled loss at CP 2, for a loss of 1 that a callback returns with `rest`."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    config = SimpleNamespace(
        calculate_per_token_loss=per_token, timers=None, num_moe_experts=None, mtp_num_layers=None, grad_scale_func=None
    )
    out = forward_step_calc_loss(
        None, torch.ones(()), lambda x: (x.clone(), *rest), config, None, False, micro_batches, [], cp_group_size=2,
        is_last_stage=True,
    )  # fmt: skip
    return float(out[0])


def _logits(rank: int) -> tuple[Tensor, Tensor]:
    whole = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(0))
    return whole.chunk(2, -1)[rank].contiguous(), torch.tensor([[0], [3], [5], [6]])


@contextlib.contextmanager
def _cross_entropy() -> Iterator[Callable[..., Tensor]]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    import parallel_rl.megatron as M

    M.initialize(tp=2)
    yield vocab_parallel_cross_entropy
    M.destroy()


def _overwrites(rank: int) -> object:
    logits, targets = _logits(rank)
    before = logits.clone()
    with _cross_entropy() as cross_entropy:
        cross_entropy(logits, targets)
    return not torch.equal(before, logits)


def _smoothing(rank: int) -> object:
    with _cross_entropy() as cross_entropy:
        losses = cross_entropy(*_logits(rank), label_smoothing=0.1).flatten()
        both = [torch.empty_like(losses) for _ in range(2)]
        dist.all_gather(both, losses)
    return float((both[0] - both[1]).abs().max())


def _padding(rank: int) -> object:
    """Return how far log-probs fall with one padding column a rank, whose logits are 0."""
    logits, _ = _logits(rank)
    targets = torch.zeros(4, 1, dtype=torch.int64)
    with _cross_entropy() as cross_entropy:
        plain = cross_entropy(logits.clone(), targets)
        padded = cross_entropy(torch.nn.functional.pad(logits, (0, 1)), targets)
    return float((padded - plain).abs().max())


Judge = Callable[[list[object]], Finding]


def _judged(
    subject: str,
    bad: Callable[[list[object]], bool],
    text: Callable[[list[object]], str],
    severity: Severity,
    advice: str,
) -> Judge:
    def judge(answers: list[object]) -> Finding:
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            return Finding(subject, "note", f"the case fails on this version: {failed[0]}")
        if bad(answers):
            return Finding(subject, severity, text(answers), advice)
        return Finding(subject, "ok", "as it should be")

    return judge


def _floats(answers: list[object]) -> list[float]:
    return [float(answer) for answer in answers]  # type: ignore[arg-type]


_ENTROPY = "vocab_parallel_cross_entropy"
_CASES: dict[str, tuple[Callable[[int], object], Judge]] = {
    "groups": (_groups, _judged(
        "groups of tensor, context and data ranks", lambda a: not all(a), lambda a: "not those that parallel_rl expects",
        "error", "no run is safe on this version: report it with its number")),
    "two values": (_two_values, _judged(
        "loss callback of two values at CP 2, 4 micro-batches", lambda a: _floats(a) != [0.5, 0.5],
        lambda a: f"scaled by {_floats(a)}, not by CP/M = 0.5", "error", "megatron_loss_func would undo another factor")),
    "three values": (_scaling, _judged(
        "loss callback of three values without calculate_per_token_loss at CP 2", lambda a: len(set(_floats(a))) > 1,
        lambda a: f"divides by each context rank's own tokens: weights {_floats(a)[0]:.3f}, {_floats(a)[1]:.3f} for 1 and 3",
        "warning", "a loop of your own returns two values, or sets calculate_per_token_loss; megatron_loss_func does")),
    "overwrites": (_overwrites, _judged(
        f"{_ENTROPY} in float32", any, lambda a: "overwrites the caller's logits", "warning",
        f"an entropy that is computed from them afterwards is wrong; {_SPARE}")),
    "smoothing": (_smoothing, _judged(
        f"{_ENTROPY} with label smoothing", lambda a: max(_floats(a)) > 1e-6,
        lambda a: f"losses differ between tensor ranks by {max(_floats(a)):.3f}", "warning",
        f"do not smooth under TP; {_SPARE}")),
    "padding": (_padding, _judged(
        f"{_ENTROPY} with a padded vocabulary", lambda a: max(_floats(a)) > 1e-6,
        lambda a: f"counts the padding columns: losses off by {max(_floats(a)):.3f} nats here", "warning",
        f"log-probs of a trainer and of its sampler differ; {_SPARE}: losses take vocab_size=")),
}  # fmt: skip
