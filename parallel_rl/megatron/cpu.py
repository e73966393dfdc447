"""Run an unmodified megatron-core on CPU tensors with gloo.

Megatron uses `device="cuda"`, `torch.cuda.current_device()` and `tensor.cuda()` throughout. Without a CUDA device a torch
function mode and a few replaced `torch.cuda` functions map them to the host. With CUDA nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_TYPE_PREFIX = "torch."


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class _HostMode(TorchFunctionMode):
    """Maps `cuda` to the host."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return _type_name(torch.typename(args[0]), sys._getframe(1).f_globals.get("__name__", ""))
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _type_name(name: object, caller: str) -> object:
    # Megatron's optimizers compare parameter types with 'torch.cuda.FloatTensor'
    if isinstance(name, str) and caller.startswith("megatron.") and not name.startswith("torch.cuda."):
        return "torch.cuda." + name.removeprefix(_TYPE_PREFIX)
    return name


_mode: _HostMode | None = None


def enable_cpu() -> bool:
    """Make megatron-core usable without CUDA in this process and thread; call it before a model is built.

    Returns whether the CPU replaces CUDA; does nothing if a CUDA device is available or when called again.

    >>> enable_cpu() == (not torch.cuda.is_available())
    True
    """
    global _mode
    if torch.cuda.is_available():
        return False
    if _mode is None:
        _replace_cuda_functions()
        _name_our_layers()
        _mode = _HostMode()
        _mode.__enter__()
    return True


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Turn the function mode off in a `with` block, e.g. for compiled or counted code."""
    if _mode is None or torch.overrides._get_current_function_mode() is not _mode:
        yield
        return
    _mode.__exit__(None, None, None)
    try:
        yield
    finally:
        _mode.__enter__()


@contextlib.contextmanager
def without_builds() -> Iterator[None]:
    """Keep megatron-core 0.15 from building a GPU allocator at import without a GPU, which would fail."""
    name, before = "TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR")
    if torch.cuda.is_available():
        yield
        return
    os.environ[name] = os.devnull  # Megatron catches the error of a folder that cannot be made
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


class _HostStream:
    """The host's only stream, where every call is complete when it returns."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing: earlier work is done."""

    def record_event(self) -> _HostStream:
        return self

    def synchronize(self) -> None:
        """Do nothing: earlier work is done."""


def _replace_cuda_functions() -> None:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    stream = _HostStream()

    def current_device() -> torch.device:
        return _CPU

    def nothing(*_: object, **__: object) -> None:
        return None

    def get_state(*_: object, **__: object) -> Tensor:
        return torch.get_rng_state()

    def set_state(state: Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.manual_seed(value)

    def current_stream(*_: object, **__: object) -> _HostStream:
        return stream

    def moved_to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        # Megatron's own does this only for a tensor of another device
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    replaced: dict[tuple[object, str], object] = {
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"): stream,
        (token_dispatcher, "maybe_move_tensor_to_cpu"): moved_to_cpu,
        (torch.cuda, "current_stream"): current_stream,
        (torch.cuda, "current_device"): current_device,
        (torch.cuda, "synchronize"): nothing,
        (torch.cuda, "get_rng_state"): get_state,
        (torch.cuda, "set_rng_state"): set_state,
        (torch.cuda, "manual_seed"): seed,
        (megatron_random, "_get_cuda_rng_state"): get_state,
        (megatron_random, "_set_cuda_rng_state"): set_state,
    }
    for (module, name), function in replaced.items():
        setattr(module, name, function)


def _name_our_layers() -> None:
    """Name our layers in assertions of Megatron's, which lack context parallelism or packed rows."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = "parallel_rl.megatron.layer_spec(config)"
    attention = f"on a CPU give the GPTModel transformer_layer_spec={spec}, whose attention takes them"
    norm = f"on a CPU give the GPTModel TransformerBlockSubmodules([{spec}] * layers, layer_norm=ShardedNorm)"
    for owner, name, cure in (
        (DotProductAttention, "__init__", attention),
        (DotProductAttention, "forward", attention),
        (WrappedTorchNorm, "__new__", norm),
    ):
        setattr(owner, name, _with_cure(getattr(owner, name), cure))


def _with_cure(function: Callable[..., object], cure: str) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return function(*args, **kwargs)
        except AssertionError as error:
            raise AssertionError(f"{error}; {cure}") from error

    return call
