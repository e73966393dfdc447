"""What would make a GPU and its host wait for each other, or give other bits each time, seen without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.linear_model import run_operator

SYNCS = (
    *("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"),
    *("unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
    "bincount",  # its length is the largest value
)


#: what adds floats on a card in any order, where torch knows no other way
NO_ORDER = ("cumsum", "cumsum_", "histc", "kthvalue", "median", "nanmedian", "put_")
ATOMICS = ("index_add", "index_add_", "scatter_add", "scatter_add_", "bincount")


class _Made(TorchFunctionMode):
    """Notes Python numbers that become a tensor or places on a device: a blocking copy that no dispatch mode sees."""

    def __init__(self, syncs: list[str]) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        options = kwargs or {}
        made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        device = args[0].device if func is Tensor.new_tensor else "cpu"
        if (made or func is Tensor.new_tensor) and torch.device(options.get("device") or device).type != "cpu":
            self.syncs.append(f"{func.__name__} on a device")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device.type != "cpu":
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(place, list) for place in places):
                self.syncs.append("index by a list")
        return func(*args, **options)


class AnyOrder(TorchDispatchMode):
    """Notes what gives other bits on a card each time; `NO_ORDER` is refused under `torch.use_deterministic_algorithms`."""

    def __init__(self, names: tuple[str, ...] = NO_ORDER + ATOMICS) -> None:
        super().__init__()
        self.names = names
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().removeprefix("aten::").split(".")[0]
        floats = (isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves((args, kwargs)))
        if name in self.names and any(floats):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """The names of the operators that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Counts operators, and notes what would make a GPU and its host wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.collectives: list[str] = []
        self.syncs: list[str] = []
        self._made = _Made(self.syncs)

    def __enter__(self) -> Watch:
        self._made.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._made.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().split("::")[1].split(".")[0]
        self.operators += name != "detach"  # no launch, and torch 2.8 makes more of them
        if func.namespace == "c10d":
            self.collectives.append(name)
        if name in SYNCS:
            self.syncs.append(name)
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.syncs.append("repeat_interleave by counts on the device")
        if name in ("index", "index_put", "index_put_"):
            places = [t for t in args[1] if t is not None]
            if any(t.dtype in (torch.bool, torch.uint8) for t in places):
                self.syncs.append(f"{name} by a mask")
            if any(t.device != args[0].device for t in places):
                self.syncs.append(f"{name} by places on another device")
        options = kwargs or {}
        # arithmetic is given a number of the host, but `where` copies it
        devices = {x.device.type for x in args if isinstance(x, Tensor)}
        waits = name == "where" or (name == "copy_" and args[2:] != (True,))
        if waits and "cpu" in devices and len(devices) > 1:
            self.syncs.append(f"{name} from the host")
        moves = name == "_to_copy" and options.get("device") not in (None, args[0].device)
        if moves and not (args[0].device.type == "cpu" and options.get("non_blocking")):  # from the host it may go on
            self.syncs.append("copy to another device")
        return run_operator(func, args, options)
