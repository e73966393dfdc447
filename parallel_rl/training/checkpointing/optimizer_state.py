"""An optimizer's state in one format, readable on any layout, with the distributed optimizer or without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor
from torch.nn import Parameter

from parallel_rl.training.checkpointing.sharded import State

_MOMENTS, _MASTER = ("exp_avg", "exp_avg_sq"), "fp32_param"
_TORCH = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class _Shard:
    """A parameter, and the part `span` of it that this data rank's optimizer updates in `main`, if any."""

    parameter: Parameter
    main: Tensor | None
    span: slice
    group: dist.ProcessGroup

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the optimizer's tensors; a half-precision parameter has a master weight, too."""
        return _MOMENTS if self.parameter.dtype == torch.float32 else (*_MOMENTS, _MASTER)


def optimizer_state(optimizer: MegatronOptimizer, model: State, *, loading: bool) -> State:
    """Return the sharded moments and master weights of an optimizer, by parameter name.

    Pieces of a distributed optimizer are gathered on the first data rank, one parameter at a time, in host memory. The
    file then resumes on any layout, with the distributed optimizer or without. `model` is the sharded state of the
    optimizer's model. With `loading`, values do not matter and nothing is communicated.
    """
    of_parameter: Mapping[int, Any] | None = None
    states: list[State] = []
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            if of_parameter is None:
                tensors = extract_sharded_tensors_and_factories(model)[0]
                of_parameter = {id(tensor.data): tensor for tensor in nested_values(tensors)}
            states.append(_megatron_state(part, of_parameter, loading))
        else:
            states.append(part.sharded_state_dict(model, is_loading=loading))
    # experts' own optimizer under expert parallelism: its tensors keep their usual names
    return states[0] if len(states) == 1 else _numbered(states)


@torch.no_grad()
def fill_optimizer(optimizer: MegatronOptimizer, state: State) -> None:
    """Load the state of `optimizer_state`, after the model's weights; ValueError if groups differ."""
    parts = _parts(optimizer)
    groups, step = _common(state)
    for number, part in enumerate(parts):
        saved: Any = state if len(parts) == 1 else state[number]  # type: ignore[index]
        inner = saved.get("optimizer", saved)
        current_groups = part.optimizer.state_dict()["param_groups"]
        # a fused Adam counts steps in its groups, torch's in each parameter's state
        in_state, in_groups = _step_of(part.optimizer, step)
        inner["param_groups"] = [{**group, **_values_of(group, groups), **in_groups} for group in current_groups]
        if not isinstance(part, DistributedOptimizer):
            inner["state"].pop("common_step", None)
            inner["state"] |= {} if in_state is None else {"common_step": in_state}
            part.load_state_dict(saved)
            continue
        for place, shard in enumerate(_shards(part)):
            if shard.main is None:
                continue
            tensors = {name: inner["state"][place][name].flatten()[shard.span] for name in shard.names}
            if _MASTER in tensors:
                shard.main.copy_(tensors[_MASTER])
            moments = {name: tensors[name].to(shard.main.device, copy=True) for name in _MOMENTS}
            part.optimizer.state[shard.main] = moments | ({} if in_state is None else {"step": in_state.clone()})
        for group, values in zip(part.optimizer.param_groups, inner["param_groups"], strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _common(state: Mapping[Any, Any]) -> tuple[list[Mapping[str, Any]], int | None]:
    """Return a checkpoint's parameter groups, and its step."""
    groups: list[Mapping[str, Any]] = []
    steps = []
    for saved in (state, *(value for key, value in state.items() if isinstance(key, int))):
        inner = saved.get("optimizer", saved)
        groups += inner.get("param_groups", ())
        steps.append(inner.get("state", {}).get("common_step"))
    steps += [group.get("step") for group in groups]
    # the largest: a fused Adam does not count steps of a group without parameters on the writing rank
    return groups, max((int(step) for step in steps if step is not None), default=None)


def _step_of(optimizer: torch.optim.Optimizer, step: int | None) -> tuple[Tensor | None, dict[str, int]]:
    """Return the step from the parameters' states, and from the groups."""
    if step is None:
        return None, {}
    return (torch.tensor(float(step)), {}) if isinstance(optimizer, _TORCH) else (None, {"step": step})


def _values_of(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a parameter group as stored; experts have their own only under expert parallelism."""
    names = ("wd_mult", "lr_mult", "is_decoupled_lr")
    # from 0.17 on the identifiers include the ends of schedules
    excluded = ("params", "step", *param_group_identifier_keys)
    for other in saved:
        if all(group.get(name) == other.get(name) for name in names):
            return {name: value for name, value in other.items() if name not in excluded}
    raise ValueError(f"it has no group of parameters with { {name: group.get(name) for name in names} }")


def _shards(part: DistributedOptimizer) -> Iterator[_Shard]:
    """List the optimizer's parameters in an order that the data ranks share."""
    for buffer in part.buffers:
        for parameter in buffer.param_index_map:
            main, span = None, slice(0, 0)
            if parameter in part.model_param_gbuf_map:
                group, place = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][place]
                bounds = part._get_model_param_range_map(parameter)["param"]
                span = slice(bounds.start, bounds.end)
            yield _Shard(parameter, main, span, buffer.data_parallel_group)


def _megatron_state(part: DistributedOptimizer, of_parameter: Mapping[int, Any], loading: bool) -> State:
    """Convert to the state dict of Megatron's other optimizers: {"state": ..., "param_groups": ...}."""
    tensors: list[State] = []
    for shard in _shards(part):
        about = of_parameter[id(shard.parameter)]
        tensors.append(
            {
                name: make_sharded_optimizer_tensor(
                    about, _gathered(part, shard, name, loading), f"optimizer.state.{name}"
                )
                for name in shard.names
            }
        )
    state = _numbered(tensors)
    if loading:
        return _nested(part, {"state": state})
    steps = [values["step"] for values in part.optimizer.state.values() if "step" in values]
    if steps:
        state["common_step"] = steps[0]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in part.optimizer.param_groups]
    return _nested(part, {"state": state, "param_groups": groups})


def _numbered(parts: Sequence[State]) -> State:
    numbered: dict[Any, Any] = dict(enumerate(parts))
    return numbered


def _nested(part: DistributedOptimizer, state: State) -> State:
    return {"optimizer": state} if part.config.bf16 or part.config.fp16 else state


@torch.no_grad()
def _gathered(part: DistributedOptimizer, shard: _Shard, name: str, loading: bool) -> Tensor:
    """Gather one tensor of a parameter in its local shape on the first data rank, which writes it."""
    shape = shard.parameter.shape
    if not loading:
        values = torch.zeros(shape.numel(), dtype=torch.float32, device=shard.parameter.device)
        if shard.main is not None:
            values[shard.span] = shard.main if name == _MASTER else part.optimizer.state[shard.main][name]
        dist.reduce(values, dist.get_global_rank(shard.group, 0), group=shard.group)
        if dist.get_rank(shard.group) == 0:
            return values.view(shape).cpu()
    return torch.empty(shape, dtype=torch.float32, device="cpu")  # untouched memory is free
