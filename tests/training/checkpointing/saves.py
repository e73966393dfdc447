"""Small checkpoints on the warm pool, and what can befall them."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.training.helpers import run

SIZES = {"model__layers": 1, "model__hidden": 16, "batch__micro_batch_size": 4}


def arguments(folder: Path, parallel: object = "{}", **more: object) -> list[str]:
    return run("sft_arithmetic.yaml", run__dir=folder, parallel=parallel, **{**SIZES, **more})


class Small:
    """A model, its optimizer and a folder of checkpoints; every tensor of checkpoint n holds n."""

    def __init__(self, given: Sequence[str], extra: Mapping[str, object] | None = None) -> None:
        from parallel_rl.training.checkpointing.checkpoint import Contents
        from parallel_rl.training.config.load import load_config
        from parallel_rl.training.models.engine import build_engine, build_optimizer

        warnings.simplefilter("ignore")
        self.config = load_config(given[0], given[1:])
        self.folder = Path(self.config.run.dir) / "checkpoints"
        engine = build_engine(self.config, self.config.tokenizer.build().vocabulary, self.config.model.max_positions)
        assert self.config.sft is not None
        optimizer = build_optimizer(engine, self.config.sft.optimizer)
        engine.model.zero_grad_buffer()
        optimizer.step()  # it has moments from its first step on
        self.contents = Contents(engine, optimizer, extra=extra or {})  # type: ignore[arg-type]

    def save(self, number: int, newest: int = 2, every: int = 0) -> Path:
        from parallel_rl.training.checkpointing import checkpoint
        from parallel_rl.training.checkpointing.contents import checkpoint_metadata
        from parallel_rl.training.checkpointing.storage import Retention
        from parallel_rl.training.session import TrainProgress

        with torch.no_grad():
            for parameter in self.contents.engine.bare.parameters():
                parameter.fill_(number)
        metadata = checkpoint_metadata(self.config, TrainProgress("sft", number), {})
        return checkpoint.save(self.folder, number, self.contents, metadata, Retention(newest, every))

    def newest(self) -> tuple[Path | None, list[str]]:
        """What a run would go on from, and what it would say."""
        from parallel_rl.training.checkpointing.contents import same_run
        from parallel_rl.training.checkpointing.resume import newest_whole

        said: list[str] = []
        found = newest_whole(self.folder, same_run(self.config, {"sft": 10**6}), said.append)
        return (None if found is None else found[0]), said

    def load(self) -> set[float]:
        """The values that the newest whole checkpoint holds."""
        from parallel_rl.training.checkpointing import checkpoint
        from parallel_rl.training.checkpointing.contents import same_run
        from parallel_rl.training.checkpointing.resume import newest_whole

        found = newest_whole(self.folder, same_run(self.config, {"sft": 10**6}), str)
        assert found is not None
        checkpoint.load(found[0], self.contents, found[1])
        parameters = self.contents.engine.bare.parameters()
        return {float(value) for parameter in parameters for value in parameter.unique()}


class Counter:
    """A state in tensors that each data rank has its own of."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parts: list[int] = []

    def state_dict(self) -> Mapping[str, Tensor]:
        return {"number": torch.tensor(self.number)}

    def load_state_dict(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self.parts = [int(part["number"]) for part in parts]


def shard_of(path: Path) -> Path:
    """The largest file of a checkpoint."""
    return max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, a file of this process and its children that would grow beyond `size` bytes fails to be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails with OSError instead
    streams = [os.dup(1), os.dup(2)]  # pytest's files, which may be longer than that already
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        for number, stream in enumerate(streams, start=1):
            os.dup2(stream, number)
            os.close(stream)


@contextlib.contextmanager
def disk(path: Path, options: str) -> Iterator[Callable[[str], None]]:
    """A file system of its own at `path`; yields what mounts it again with other options. Needs the right to mount."""
    mount = shutil.which("mount")
    assert mount is not None
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield lambda more: subprocess.run([mount, "-o", f"remount,{more}", str(path)], check=True) and None
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def can_mount(path: Path) -> bool:
    """Whether this process may mount, tried in earnest."""
    if shutil.which("mount") is None:
        return False
    path.mkdir(parents=True)
    tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(path)], capture_output=True)
    return tried.returncode == 0 and subprocess.run(["umount", str(path)], capture_output=True).returncode == 0
