"""The device of these tests, their comparison, and a mended interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel_rl import token_stats
from parallel_rl.vocab.backends.choice import Backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NAMES = ("log-prob", "entropy", "lse", "gradient")


def round_bfloat16_to_nearest() -> None:
    """The interpreter cuts float32 to bfloat16; a GPU rounds to the nearest, ties to even. Mends the former."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    stock = InterpreterBuilder.cast_impl

    def cast(self, src, dst_type):  # type: ignore[no-untyped-def]
        if src.dtype.scalar != float32 or dst_type.scalar != bfloat16:
            return stock(self, src, dst_type)
        value = torch.from_numpy(np.array(src.data, dtype=np.float32)).bfloat16()
        return TensorHandle(value.view(torch.int16).numpy().view(np.uint16), dst_type.scalar)

    InterpreterBuilder.cast_impl = cast


def count_loops_with_one_number() -> None:
    """Bounds that a kernel computes are arrays of one number: Triton before 3.9 takes their int(), NumPy 2.4 refuses it."""
    from triton.runtime import interpreter

    stock = interpreter._patch_lang_tensor

    def patch(tensor, *scope):  # type: ignore[no-untyped-def]
        stock(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch


def patch_the_language_once_a_launch() -> None:
    """Each call of a jit function lists and wraps the whole language again, half of a kernel's time: skip what is wrapped."""
    import triton.language
    from triton.language import core
    from triton.runtime import interpreter

    stock = interpreter._patch_lang
    nothing_to_restore = getattr(interpreter, "_LangPatchScope", lambda: None)

    def patch(function):  # type: ignore[no-untyped-def]
        seen = [value for value in function.__globals__.values() if value is core or value is triton.language]
        return stock(function) if any(core.is_builtin(each.load) for each in seen) else nothing_to_restore()

    interpreter._patch_lang = patch


if INTERPRETED:
    round_bfloat16_to_nearest()
    count_loops_with_one_number()
    patch_the_language_once_a_launch()


def logits_and_targets(
    tokens: int, vocab: int, dtype: torch.dtype, shift: float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Rounded logits, alternately shifted up and down, and targets at the edges and in between."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(tokens, vocab, generator=g) * 2 + shift * (torch.arange(tokens)[:, None] % 2 * 2 - 1)
    targets = torch.randint(0, vocab, (tokens,), generator=g)
    targets[:2] = torch.tensor([0, vocab - 1])[:tokens]
    return z.to(dtype).to(DEVICE), targets.to(DEVICE)


def upstream(tokens: int, names: str = "lel") -> list[Tensor | None]:
    """Gradients of (log-prob, entropy, lse); a "-" in `names` is an output that the loss does not use."""
    g = torch.Generator().manual_seed(1)
    return [
        x.to(DEVICE) if name != "-" else None
        for x, name in zip(torch.randn(3, tokens, generator=g), names, strict=True)
    ]


def run(
    logits: Tensor,
    targets: Tensor,
    gradients: list[Tensor | None],
    backend: Backend,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Outputs and the gradient of the logits, in the dtypes in which `token_stats` gives them."""
    z = logits.detach().to(dtype or logits.dtype).requires_grad_()
    work = z * 1 if options.get("consume_logits") else z
    stats = token_stats(work, targets, backend=backend, **options)
    used = [(o, g.to(o.dtype)) for o, g in zip(stats[:3], gradients, strict=True) if o is not None and g is not None]
    torch.autograd.backward([o for o, _ in used], [g for _, g in used])
    assert z.grad is not None
    values = [*stats[:3], z.grad]
    return {name: value.detach() for name, value in zip(NAMES, values, strict=True) if value is not None}


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check(
    logits: Tensor, targets: Tensor, gradients: list[Tensor | None] | None = None, **options: Any
) -> dict[str, Tensor]:
    """Triton's error against float64 on the same rounded logits is at most twice that of the torch backend."""
    gradients = gradients or upstream(targets.numel())
    truth = run(logits, targets, gradients, "eager", torch.float64, **options)
    plain = run(logits, targets, gradients, "eager", **options)
    got = run(logits, targets, gradients, "triton", **options)
    assert list(got) == list(truth)
    for name, value in got.items():
        assert value.dtype == plain[name].dtype and value.shape == plain[name].shape
        limit = 2 * error(plain[name], truth[name]) + 1e-7  # a rounding of float32 is 6e-8
        assert error(value, truth[name]) <= limit, f"{name}: {error(value, truth[name]):.1e}, torch {limit:.1e} / 2"
    return got


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def same_sums(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Of logits at other strides, which decide what lane and what thread adds a column."""
    limits = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
    return all(error(x, second[name]) < limits[x.dtype] for name, x in first.items())
