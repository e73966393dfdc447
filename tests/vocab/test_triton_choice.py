"""Which backend runs, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel_rl import NLLLoss, token_stats
from parallel_rl.vocab.backends import choice, passes, torch_backend
from parallel_rl.vocab.backends.choice import Backend, check_backend, runs_on_triton


class OnCard:
    """Logits on a card, as far as the choice looks at them."""

    device = torch.device("cuda")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_by_itself_on_a_card_only(dtype: torch.dtype) -> None:
    with patch.object(choice, "_INSTALLED", True):
        assert runs_on_triton(OnCard(dtype), "auto")  # type: ignore[arg-type]
        assert not runs_on_triton(torch.zeros(1, 1, dtype=dtype), "auto")
        for backend in ("compiled", "eager"):
            assert not runs_on_triton(OnCard(dtype), backend)  # type: ignore[arg-type]
    with patch.object(choice, "_INSTALLED", False):
        assert not runs_on_triton(OnCard(dtype), "auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_float64_never(backend: Backend) -> None:
    assert not runs_on_triton(OnCard(torch.float64), backend)  # type: ignore[arg-type]


def test_triton_is_refused_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_INTERPRETED", False)
    logits, targets = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match='"triton" needs logits on a CUDA device, got cpu'):
        token_stats(logits, targets, backend="triton")
    data = {
        "input_ids": torch.zeros(1, 2, dtype=torch.int64),
        "token_mask": torch.ones(1, 2),
        "sample_mask": torch.ones(1),
    }
    with pytest.raises(ValueError, match="needs logits on a CUDA device"):
        NLLLoss(backend="triton")(torch.zeros(1, 2, 4), data, torch.tensor(1), torch.tensor(1))
    monkeypatch.setattr(choice, "_INTERPRETED", True)
    check_backend("triton", logits.device)


def test_triton_that_is_not_installed_is_named() -> None:
    with (
        patch.object(choice, "_INSTALLED", False),
        pytest.raises(ValueError, match="needs Triton: pip install triton"),
    ):
        check_backend("triton", torch.device("cuda"))


@pytest.fixture
def _unwarned() -> Iterator[None]:
    """As in a process that has not warned yet; and those after have not either."""
    choice._warn_of_no_compiler.cache_clear()
    yield
    choice._warn_of_no_compiler.cache_clear()


@pytest.mark.usefixtures("_unwarned")
def test_without_a_compiler_the_torch_backend_runs_with_a_warning() -> None:
    """Triton builds each kernel's launcher in C; in a container without gcc the first launch died."""
    with patch.object(choice, "_INSTALLED", True), patch.object(choice, "COMPILER", None):
        with pytest.warns(UserWarning, match="Triton needs a C compiler, so the torch backend is used: install gcc"):
            assert not runs_on_triton(OnCard(torch.bfloat16), "auto")  # type: ignore[arg-type]
        with (
            patch.object(choice, "_INTERPRETED", False),
            pytest.raises(ValueError, match='backend = "triton" needs a C compiler: install gcc or clang'),
        ):
            check_backend("triton", torch.device("cuda"))


@pytest.mark.usefixtures("_unwarned")
def test_a_missing_compiler_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass of a step asks which backend runs."""
    asked = []

    def as_on_a_card(z: torch.Tensor, backend: Backend) -> bool:
        asked.append(z)
        return runs_on_triton(OnCard(z.dtype), backend)  # type: ignore[arg-type]

    monkeypatch.setattr(passes, "runs_on_triton", as_on_a_card)
    monkeypatch.setattr(choice, "_INSTALLED", True)
    monkeypatch.setattr(choice, "COMPILER", None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        z = torch.zeros(2, 4, requires_grad=True)
        token_stats(z, torch.zeros(2, dtype=torch.int64)).logprobs.sum().backward()
    assert len(asked) > 1 and z.grad is not None
    assert [str(warning.message).split(",")[0] for warning in said] == ["Triton needs a C compiler"]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend = 'cuda' is not valid; choose one of auto, triton, compiled, eager"):
        token_stats(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), backend="cuda")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_package_itself_needs_no_triton() -> None:
    code = (
        "import sys, parallel_rl, parallel_rl.vocab.backends.triton, parallel_rl.vocab.backends.passes; "
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_small_shard_is_not_compiled_on_a_card() -> None:
    """Nor where the passes stay with torch there: a compiler takes a minute to start, and the gate of a run only seconds."""
    with FakeTensorMode(), patch.object(torch_backend, "compiler_works", lambda device: True):
        small, large = (torch.empty(size, 1 << 12, dtype=torch.float64, device="cuda") for size in (8, 1 << 10))
        assert not torch_backend.compiles(small, "auto") and torch_backend.compiles(small, "compiled")
        assert torch_backend.compiles(large, "auto") and not torch_backend.compiles(large, "eager")
