"""Loss functions for RL post-training: one loss, any layout, the same numbers.

Names and subpackages are imported on first use. The options of the losses (`...Config`) are in `parallel_rl.losses`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_rl.counts import ValidCounts, count_valid, global_group_ids
    from parallel_rl.groups import ParallelGroups
    from parallel_rl.layout import SequenceLayout
    from parallel_rl.losses import (
        ClippedPGLossFn,
        ComponentsLossFn,
        CPOLossFn,
        DistillationLossFn,
        DPOLossFn,
        FullDistillationLossFn,
        KTOLossFn,
        MixLossFn,
        MuSchedule,
        NLLLoss,
        ORPOLossFn,
        PolicyLossFn,
        PreferenceLoss,
        PRMLossFn,
        SimPOLossFn,
        ValueLossFn,
    )
    from parallel_rl.losses.core.base import LossFn
    from parallel_rl.losses.core.batch import TokenBatch
    from parallel_rl.losses.registry import ObjectiveConfig, get_loss, register_loss, register_objective
    from parallel_rl.losses.scores import TokenScores, token_logprobs, token_scores
    from parallel_rl.losses.teacher_topk import teacher_topk
    from parallel_rl.metrics import Mean, Metrics, MinMax, Sum, reduce_metrics
    from parallel_rl.packing import PrefixTreeLossWrapper, SequencePackingLossWrapper
    from parallel_rl.prefix_tree import PrefixTree, build_tree, from_nodes
    from parallel_rl.recipes import load_recipe
    from parallel_rl.statistics import Statistics
    from parallel_rl.training.reporting.loggers import register_logger
    from parallel_rl.validation import set_validation
    from parallel_rl.vocab.linear.lm_head import LMHeadInput
    from parallel_rl.vocab.linear.token_stats import LinearTokenStats, linear_token_stats
    from parallel_rl.vocab.stats import TokenStats, token_stats

__version__ = "0.1.0"

__all__ = [
    # call a loss
    "PolicyLossFn",
    "ClippedPGLossFn",
    "ComponentsLossFn",
    "MixLossFn",
    "MuSchedule",
    "ValueLossFn",
    "DPOLossFn",
    "SimPOLossFn",
    "CPOLossFn",
    "ORPOLossFn",
    "KTOLossFn",
    "PreferenceLoss",
    "PRMLossFn",
    "NLLLoss",
    "DistillationLossFn",
    "FullDistillationLossFn",
    "get_loss",
    "load_recipe",
    "count_valid",
    "global_group_ids",
    "ValidCounts",
    "ParallelGroups",
    "SequencePackingLossWrapper",
    "PrefixTreeLossWrapper",
    "PrefixTree",
    "build_tree",
    "from_nodes",
    "LMHeadInput",
    "Statistics",
    "set_validation",
    # write one
    "register_objective",
    "ObjectiveConfig",
    "TokenBatch",
    "register_loss",
    "LossFn",
    "Mean",
    "MinMax",
    "Sum",
    "register_logger",
    # reduce
    "Metrics",
    "reduce_metrics",
    # the parts below
    "token_logprobs",
    "token_scores",
    "TokenScores",
    "teacher_topk",
    "token_stats",
    "TokenStats",
    "linear_token_stats",
    "LinearTokenStats",
    "SequenceLayout",
]

_ROOMS = {
    "counts": ("ValidCounts", "count_valid", "global_group_ids"),
    "groups": ("ParallelGroups",),
    "layout": ("SequenceLayout",),
    "losses.core.base": ("LossFn",),
    "losses.core.batch": ("TokenBatch",),
    "losses.registry": ("ObjectiveConfig", "get_loss", "register_loss", "register_objective"),
    "metrics": ("Mean", "Metrics", "MinMax", "Sum", "reduce_metrics"),
    "packing": ("PrefixTreeLossWrapper", "SequencePackingLossWrapper"),
    "prefix_tree": ("PrefixTree", "build_tree", "from_nodes"),
    "recipes": ("load_recipe",),
    "statistics": ("Statistics",),
    "training.reporting.loggers": ("register_logger",),
    "validation": ("set_validation",),
    "vocab.linear.lm_head": ("LMHeadInput",),
    "vocab.linear.token_stats": ("LinearTokenStats", "linear_token_stats"),
    "losses.scores": ("TokenScores", "token_logprobs", "token_scores"),
    "vocab.stats": ("TokenStats", "token_stats"),
    "losses.teacher_topk": ("teacher_topk",),
}
_ROOM = {name: room for room, names in _ROOMS.items() for name in names}  # of all others: losses


if not TYPE_CHECKING:  # a checker would take every name for known

    def __getattr__(name: str) -> object:
        if name in __all__:
            value = getattr(import_module(f"{__name__}.{_ROOM.get(name, 'losses')}"), name)
            globals()[name] = value
            return value
        room = f"{__name__}.{name}"
        try:
            if not name.startswith("_"):
                return import_module(room)
        except ModuleNotFoundError as error:
            if error.name != room:
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
