"""Findings on this host: versions and kinds of packages, environment variables, and addresses that a run needs."""

from __future__ import annotations

import errno
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from parallel_rl.doctor import Finding
from parallel_rl.vocab.backends.choice import COMPILER

_LEAST_TORCH, _LEAST_MEGATRON, _NEXT_MEGATRON = (2, 8), (0, 15), (0, 20)


def packages() -> Iterator[Finding]:
    """Report Python, torch and its backends, megatron-core, Transformer Engine, Apex and Triton."""
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield _torch()
    yield from _cards()
    yield _backends()
    yield _megatron()
    yield _transformer_engine()
    yield _apex()
    yield _triton()


def settings(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report environment variables that change numbers, hide faults or hang jobs.

    >>> [finding.severity for finding in settings({"CUDA_LAUNCH_BLOCKING": "1"})]
    ['warning']
    """
    reported = False
    for name, bad, text, advice in (
        ("CUDA_LAUNCH_BLOCKING", "1", "each kernel is waited for", "unset it: a debugging aid, several times slower"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a failed collective hangs its rank", "unset it, or set 1 or 3"),
        ("NCCL_ASYNC_ERROR_HANDLING", "0", "a failed collective hangs its rank", "unset it"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "collectives block the host", "unset it: nothing overlaps"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "Transformer Engine's attention is deterministic, and slower", ""),
        ("NCCL_DEBUG", "TRACE", "NCCL writes every call", "set WARN"),
    ):
        if environment.get(name) == bad:
            reported = True
            yield Finding(name, "warning" if advice else "note", f"{bad}: {text}", advice)
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if torch.cuda.is_available() and connections not in (None, "1"):
        reported = True
        yield Finding(
            "CUDA_DEVICE_MAX_CONNECTIONS", "note", f"{connections}",
            "Megatron expects 1 where tensor or context parallel communication overlaps with products before Blackwell",
        )  # fmt: skip
    if not reported:
        yield Finding("environment", "ok", "no variable is set that is known to hurt")


def apex_kind(folder: Path) -> str:
    """Distinguish NVIDIA's Apex ("nvidia") from the unrelated package ("other") by its folder.

    >>> apex_kind(Path("nowhere"))
    'other'
    """
    return "nvidia" if any((folder / part).is_dir() for part in ("optimizers", "normalization", "contrib")) else "other"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _torch() -> Finding:
    if _numbers(torch.__version__) < _LEAST_TORCH:
        return Finding("torch", "error", torch.__version__, "parallel_rl needs torch ≥ 2.8")
    return Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")


def _cards() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPU", "note", "none is visible: ranks run on the CPU, over gloo")
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield Finding(
            f"GPU {index}", "ok", f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}"
        )


def _backends() -> Finding:
    available = [
        name for name, usable in (("nccl", dist.is_nccl_available()), ("gloo", dist.is_gloo_available())) if usable
    ]
    if torch.cuda.is_available() and "nccl" not in available:
        return Finding("backends", "error", f"{available}", "GPUs without NCCL: install a torch that was built with it")
    return Finding("backends", "ok", ", ".join(available))


def _megatron() -> Finding:
    installed = _version("megatron-core")
    if installed is None:
        return Finding(
            "megatron-core",
            "note",
            "not installed",
            "the losses need none; the trainer does: megatron-core>=0.15,<0.20",
        )
    if _numbers(installed) < _LEAST_MEGATRON:
        return Finding("megatron-core", "error", installed, "parallel_rl.megatron needs 0.15 or newer")
    if _numbers(installed) >= _NEXT_MEGATRON:
        return Finding(
            "megatron-core", "warning", installed, "newer than 0.19, the newest that parallel_rl has been run with"
        )
    return Finding("megatron-core", "ok", installed)


def _transformer_engine() -> Finding:
    if not _there("transformer_engine"):
        text = "not installed: layers are Megatron's local ones with attention in plain PyTorch"
        return Finding("transformer-engine", "note" if not torch.cuda.is_available() else "warning", text)
    if not torch.cuda.is_available():
        return Finding("transformer-engine", "note", "installed, not used: there is no GPU")
    text = f"{_version('transformer-engine')}; bfloat16 and float16 runs use its layers, float32 and float64 the local ones"
    return Finding("transformer-engine", "ok", text)


def _apex() -> Finding:
    spec = find_spec("apex")
    if spec is None:
        return Finding("apex", "note", "not installed: no gradient accumulation fusion, no fused Adam of Apex")
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    if any(apex_kind(folder) == "nvidia" for folder in folders):
        return Finding("apex", "ok", "NVIDIA's")
    return Finding(
        "apex", "error", f"{_version('apex')} is an unrelated package of that name",
        "megatron-core takes any importable apex for NVIDIA's: pip uninstall apex",
    )  # fmt: skip


def _triton() -> Finding:
    installed = _version("triton")
    if installed is None:
        return Finding(
            "triton", "warning" if torch.cuda.is_available() else "note", "not installed: statistics by plain PyTorch"
        )
    if torch.cuda.is_available() and COMPILER is None:
        text = f"{installed}, but no C compiler (CC, gcc, clang)"
        return Finding(
            "triton", "warning", text, "its launchers cannot be built: install gcc, or statistics run in plain PyTorch"
        )
    return Finding("triton", "ok", installed)


_SECONDS = 3.0
_DEFAULT = "29500"  # torchrun's


def ask_ports(urls: Sequence[str], environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that the rendezvous answers in a job, or is free before one, and that servers answer.

    >>> [finding.severity for finding in ask_ports(["http://127.0.0.1:9"], {"MASTER_PORT": "0"})]
    ['error', 'warning']
    """
    host, port = environment.get("MASTER_ADDR", "127.0.0.1"), environment.get("MASTER_PORT", _DEFAULT)
    if not (port.isdecimal() and 0 < int(port) < 65536):
        yield Finding("MASTER_PORT", "error", f"{port} is not a port", "give a number from 1 to 65535")
    elif "RANK" in environment:
        fault = _refused(host, int(port))
        advice = "torchrun's store listens there: look at rank 0's host, its name on this one and its firewall"
        yield Finding(
            "rendezvous", "error" if fault else "ok", f"{host}:{port} {fault or 'answers'}", advice if fault else ""
        )
    else:
        yield _free(host, port, "MASTER_PORT" in environment)
    for url in urls:
        parts = urlsplit(url)
        fault = _refused(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        advice = "start it before the run, or correct the address in the config: the run would wait for it"
        yield Finding("server", "warning" if fault else "ok", f"{url} {fault or 'answers'}", advice if fault else "")


def _refused(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=_SECONDS):
            return ""
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}"


def _free(host: str, port: str, is_set: bool) -> Finding:
    """Check that a rendezvous could listen here, if the host is this one."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return Finding(
            "MASTER_ADDR", "error", f"{host} has no address: {error.strerror or error}", "a name that all resolve"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # another host's address
                return Finding(
                    "MASTER_PORT", "note", f"{host} is another host: whether {port} is free there shows in the job"
                )
            name = "MASTER_PORT" if is_set else "torchrun's port"
            return Finding(
                name, "error" if is_set else "note", f"{port} is taken: {error.strerror}",
                "export another MASTER_PORT, or torchrun --master-port / --standalone",
            )  # fmt: skip
    return Finding("MASTER_PORT" if is_set else "torchrun's port", "ok", f"{port} is free")
