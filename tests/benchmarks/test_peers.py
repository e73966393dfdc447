"""The peers are called as they want to be, and do what `benchmarks.peers` says of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks.common import run_ranks
from benchmarks.token_stats_gpu import check_result
from benchmarks.token_stats_gpu_methods import Method, make_case, methods
from benchmarks.token_stats_gpu_methods import ours as methods_of_ours
from parallel_rl.testing.pool import preload, run_world

preload("megatron.core")
SHARDS = {peers.MEGATRON, peers.MEGATRON_FUSED}
CARD = {"Transformer Engine cross-entropy", "Liger cross-entropy", "Liger vocab-parallel cross-entropy"}


def test_a_peer_takes_part_where_it_is_installed_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(device: str, tp: int = 1) -> set[str]:
        return {peer.name for peer in peers.peers(device, tp)}

    monkeypatch.setattr(peers, "imports", lambda module: True)
    assert names("cpu", 2) == SHARDS
    assert names("cuda", 2) == SHARDS | {name for name in CARD if name != "Liger cross-entropy"}
    assert names("cpu") == {peers.PLAIN, peers.COMPILED, "TRL selective_log_softmax"} | SHARDS == names("cuda") - CARD
    monkeypatch.setattr(peers, "imports", lambda module: module == "torch")
    assert names("cuda") == {peers.PLAIN, peers.COMPILED} and names("cuda", 2) == set()


def test_a_peer_that_cannot_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the whole benchmark, with a card's minutes."""
    monkeypatch.setattr(peers, "_broken", {})
    (tmp_path / "broken_peer.py").write_text("raise ImportError('wants libcuda.so.1\\nand more')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not peers.imports("broken_peer") and not peers.imports("broken_peer") and not peers.imports("absent_peer")
    assert capsys.readouterr().out == "not run: broken_peer: ImportError: wants libcuda.so.1\n"
    assert peers.broken() == {"broken_peer": "ImportError: wants libcuda.so.1"}


def _errors(rank: int, tp: int) -> dict[tuple[str, torch.dtype], tuple[float, float, bool]]:
    """Of loss and gradient, and whether the logits were overwritten; of the peers that compile nothing."""
    from megatron.core import parallel_state

    peers.join_megatron(tp)
    g = torch.Generator().manual_seed(0)
    found = {}
    try:
        for dtype in (torch.float32, torch.bfloat16):
            whole, targets = 3 * torch.randn(12, 64, generator=g).to(dtype), torch.randint(64, (12,), generator=g)
            upstream = torch.randn(12, generator=g)
            z = whole.double().requires_grad_()
            want = -torch.log_softmax(z, -1).gather(1, targets[:, None])[:, 0]
            truth = torch.autograd.grad(want, z, upstream.double())[0].chunk(tp, 1)[rank]
            for peer in peers.peers("cpu", tp):
                if peer.name in (peers.COMPILED, peers.MEGATRON_FUSED):
                    continue
                mine = whole.chunk(tp, 1)[rank]
                logits = mine.clone().requires_grad_()
                loss = peer.loss(logits, targets)
                (gradient,) = torch.autograd.grad(loss, logits, upstream.to(loss.dtype))
                assert gradient.dtype == dtype
                found[peer.name, dtype] = (
                    (loss.double() - want).abs().max().item(),
                    ((gradient.double() - truth).norm() / truth.norm()).item(),
                    not torch.equal(logits.detach(), mine),
                )
    finally:
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_peers_are_right_and_overwrite_what_they_say(tp: int) -> None:
    pytest.importorskip("megatron.core")
    for errors in run_world(tp, _errors, tp):
        assert peers.MEGATRON in {name for name, _ in errors} and (
            tp == 2 or peers.PLAIN in {name for name, _ in errors}
        )
        for (name, dtype), (of_loss, of_gradient, overwritten) in errors.items():
            narrow = dtype == torch.bfloat16
            assert of_loss < (0.1 if narrow and "TRL" in name else 1e-5) and of_gradient < (4e-3 if narrow else 1e-5)
            assert overwritten == (name == peers.MEGATRON and not narrow)


def test_a_peer_that_fails_on_a_card_takes_no_other_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Its kernel is not built by that Triton, say: the minutes of all others were lost. Ours ends the run, and so on a CPU."""
    ours, other = methods_of_ours("eager")
    peer = replace(ours, name="a peer", kind="peer")
    every = [ours, peer, other]

    def check(failing: Method, method: Method) -> str:
        if method is failing:
            raise RuntimeError("PassManager::run failed\nand more")
        return method.name

    found = peers.results_of(every, partial(check, peer), "cuda")
    assert found == {ours.name: ours.name, other.name: other.name}
    assert capsys.readouterr().out == f"not run: {peer.name}: RuntimeError: PassManager::run failed\n"
    for failing, device in ((ours, "cuda"), (peer, "cpu")):
        with pytest.raises(RuntimeError, match="PassManager"):
            peers.results_of(every, partial(check, failing), device)


def _on_card(rank: int) -> int:
    if find_spec("megatron") is not None:
        peers.join_megatron()
    chosen = methods("cuda", "auto")
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(128, 4096, dtype, "cuda")
        for method in chosen:
            check_result(method, case, torch.empty_like(case.logits))
    return len(chosen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_peer_is_right_on_a_card() -> None:
    (methods,) = run_ranks(1, _on_card)  # the pool's ranks see no card
    assert methods >= 4
