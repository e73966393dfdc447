"""The common part of a checkpoint where megatron writes it apart: before 0.19, which writes it with all the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

from parallel_rl.agreement import raise_on_all_ranks

WriteTo = Callable[[Path, Callable[[], object]], None]


@contextlib.contextmanager
def told_to_every_rank(what: str, write_to: WriteTo) -> Iterator[None]:
    """Inside, every rank hears whether the first one wrote the common part."""
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, _CommonOnEveryRank(what, write_to))
    try:
        yield
    finally:
        register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, TorchCommonSaveStrategy("torch", 1))


class _CommonOnEveryRank(TorchCommonSaveStrategy):
    """The first rank writes the common part; the others wait for its word."""

    def __init__(self, what: str, write_to: WriteTo) -> None:
        super().__init__("torch", 1)
        self.what, self.write_to = what, write_to

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        save = super().save_common
        write = partial(self.write_to, Path(checkpoint_dir), lambda: save(common_state_dict, checkpoint_dir))
        raise_on_all_ranks(write, what=self.what)
