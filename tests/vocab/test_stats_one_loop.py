"""The statistics without entropy on a CPU, in one loop over a row: rows whose maximum is not where it is looked for."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from parallel_rl import token_stats
from parallel_rl.validation import validation
from parallel_rl.vocab.backends import torch_backend


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loop", ["as written", pytest.param("compiled", marks=pytest.mark.slow)])
def test_one_loop_on_a_cpu_takes_any_row(loop: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reference is the maximum of a row's first columns: a row whose own is far from that, or nothing, must not notice."""
    if loop == "as written":
        monkeypatch.setattr(torch_backend, "compiled", lambda function: function)
    g = torch.Generator().manual_seed(0)
    rows, width = 12, torch_backend._FIRST + 200
    z = torch.randn(rows, width, generator=g)
    z[1, -1], z[2, -1], z[3, -1] = 15.0, 60.0, 3e4
    z[4, : torch_backend._FIRST] = -torch.inf
    z[5, : torch_backend._FIRST], z[5, torch_backend._FIRST :] = -torch.inf, -200.0  # e^z is 0, were it relative to 0
    z[6] -= 1000
    z[7] += 1000
    z[8, 1:], z[9, 3], z[10, -1], z[11] = -torch.inf, torch.nan, torch.inf, -torch.inf
    z = z.to(dtype)
    temperature = torch.linspace(0.5, 2, rows)
    targets = torch.randint(width, (rows,), generator=g)
    targets[:4], targets[8] = width - 1, 0
    with validation("never"):
        got = token_stats(z, targets, temperature=temperature, entropy=False, backend="compiled")
        want = token_stats(z, targets, temperature=temperature, entropy=False, backend="eager")
    rtol = 1e-13 if dtype == torch.float64 else 2e-6
    assert_close(got.logprobs, want.logprobs, rtol=rtol, atol=rtol, equal_nan=True)
    assert_close(got.lse, want.lse, rtol=rtol, atol=rtol, equal_nan=True)
