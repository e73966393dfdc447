"""Any number of named losses in one, each on its own tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from parallel_rl.config.strict import configure, nearest
from parallel_rl.losses.choice import LossConfig
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.component import Component, ComponentsLoss, joint_requirements
from parallel_rl.losses.core.data_view import DataView
from parallel_rl.losses.entropy_bonus import CoefficientScheduleConfig, checked_steps
from parallel_rl.losses.registry import register_loss
from parallel_rl.losses.value import ScalarHeadLoss
from parallel_rl.metrics import Metric

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class ComponentConfig:
    """A component: a registered loss with its weight, and the tokens and fields that it reads.

    loss: {name: ..., options: {...}}; aggregation and token weights are among its options. coefficient: λ, a number or a
        `CoefficientScheduleConfig`.
    mask: name of a field [B, S] of 0 and 1 used as token_mask; "not NAME" is its complement.
    rows: name of a field [B] of 0 and 1 that selects rows; "not NAME" is its complement.
    fields: a field of the loss → the data's field to read instead, e.g. {reference_policy_logprobs: teacher_logprobs}.
    """

    loss: LossConfig
    coefficient: float | CoefficientScheduleConfig = 1.0
    mask: str | None = None
    rows: str | None = None
    fields: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        constant = self.coefficient
        if not isinstance(constant, CoefficientScheduleConfig) and (constant == 0 or not math.isfinite(constant)):
            raise ValueError(
                f"coefficient = {constant} must be a finite number other than 0; remove a component to turn it off"
            )
        if issubclass(self.loss.loss_class, ScalarHeadLoss):
            raise ValueError(f"loss.name = {self.loss.name!r} reads a scalar head; a component reads logits")
        needs = self.loss.requirements
        read = [field.name for field in (*needs.fields, *needs.optional)]
        for target in self.fields:
            if target not in read and not self.loss.unseen:
                raise ValueError(
                    f"fields.{target} = {self.fields[target]!r} has no effect: loss.name = {self.loss.name!r} does not read "
                    f"{target!r}; {nearest(target, read)}"
                )

    @property
    def view(self) -> DataView:
        return DataView(self.mask, self.rows, self.fields)


@dataclass(frozen=True)
class ComponentsLossConfig:
    """Options of `ComponentsLossFn`.

    components: the losses by names that you choose, which prefix their metrics.
    """

    components: dict[str, ComponentConfig]

    def __post_init__(self) -> None:
        if not self.components:
            raise ValueError("components is empty; name at least one")
        joint_requirements({name: (part.loss.requirements, part.view) for name, part in self.components.items()})
        for name in self.components:
            if not _NAME.fullmatch(str(name)):
                raise ValueError(
                    f"components has the name {name!r}; a name is made of a-z, 0-9 and _, and begins with a letter"
                )


@register_loss("components")
class ComponentsLossFn(ComponentsLoss[ComponentsLossConfig]):
    """Sum of named losses on one read of the logits, or of the hidden states; the local loss.

        L = Σ_c λ_c·L_c,    L_c the loss of component c on its own tokens, divided by its own counts of the step

    A component is any registered loss on log-probs or logits with its options, a coefficient, a mask of tokens or rows, and
    renamed fields. Its tokens need not be in `token_mask`, so it can also learn tokens that the policy did not sample
    (observations). `count` counts its own tokens and rows over the whole step: no component dilutes another, and one without
    a token adds an exact 0. MIX, CHORD, RL with NLL on observations (ECHO), with distillation or with a KL to a second
    reference are configs of this loss.

    The sum separates over tokens (`LMHeadInput`) if all components do. If one reads logits, whole logits are made and not
    consumed. A teacher's `LMHeadInput` is refused inside components: pass `teacher_logits` as logits.

    Metrics: loss; NAME/... of each component, and NAME/coefficient of a schedule. Call and errors: see `LossFn`.

    >>> import torch
    >>> from parallel_rl import count_valid
    >>> data = {"input_ids": torch.tensor([[0, 1, 2, 3]]), "token_mask": torch.tensor([[0, 1, 1, 0]])}
    >>> data |= {"sample_mask": torch.ones(1), "advantages": torch.ones(1, 4), "prev_logprobs": torch.full((1, 4), -1.5)}
    >>> data["observation_mask"] = torch.tensor([[0, 0, 0, 1]])
    >>> observed = {"loss": {"name": "nll"}, "mask": "observation_mask", "coefficient": 0.1}
    >>> loss_fn = ComponentsLossFn({"components": {"policy": {"loss": {"name": "policy"}}, "observed": observed}})
    >>> call = (torch.zeros(1, 4, 4), data, *count_valid(data))
    >>> loss, metrics = loss_fn(*call, statistics=loss_fn.count(data))
    >>> round(loss.item(), 4), round(metrics["observed/loss"].item(), 4)
    (-0.9818, 1.3863)
    """

    config_class = ComponentsLossConfig
    _steps = 0  # of the optimizer

    @cached_property
    def components(self) -> tuple[Component, ...]:
        return tuple(
            Component(name, self._build(part.loss), part.view) for name, part in self.config.components.items()
        )

    @cached_property
    def _schedules(self) -> dict[str, CoefficientScheduleConfig]:
        values = {name: component.coefficient for name, component in self.config.components.items()}
        return {name: value for name, value in values.items() if isinstance(value, CoefficientScheduleConfig)}

    @property
    def coefficients(self) -> Mapping[str, float]:
        constant = {name: component.coefficient for name, component in self.config.components.items()}
        moving = {name: schedule.at(self._steps) for name, schedule in self._schedules.items()}
        return {**constant, **moving}  # type: ignore[dict-item]

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self._steps += 1
        super().after_step(metrics)

    def state_dict(self) -> dict[str, float]:
        return {**({"steps": self._steps} if self._schedules else {}), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        keys = {"steps"} if self._schedules else set()
        if not keys <= set(state):
            raise ValueError(f"the state of scheduled coefficients has 'steps', got {dict(state)}")
        super().load_state_dict({name: x for name, x in state.items() if name not in keys})
        if keys:
            self._steps = checked_steps(state["steps"])

    def own_metrics(self, loss: Tensor) -> dict[str, Metric]:
        moving = {name: self.coefficients[name] for name in self._schedules}
        return {
            f"{name}/coefficient": Metric("max", torch.full_like(loss, value, requires_grad=False))
            for name, value in moving.items()
        }

    def _build(self, config: LossConfig) -> LossFn:
        make: Callable[..., LossFn] = config.loss_class
        return make(configure(config.loss_class.config_class, config.options), **self.options_of_components())
