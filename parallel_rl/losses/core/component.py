"""Several losses on one read of the model's output, each with its own tokens and counts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel_rl.counts import ValidCounts, check_zeros_and_ones
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import ModelOutput, TokenBatch
from parallel_rl.losses.core.data_view import DataView
from parallel_rl.losses.core.local_batch import LocalBatch
from parallel_rl.losses.core.loss import Account, ConfigT, Reader
from parallel_rl.losses.core.measures import count_true
from parallel_rl.losses.core.readers import LogProbReader, check_declared, masked_stats, token_output
from parallel_rl.losses.core.requirements import Field, Requirements
from parallel_rl.losses.core.run import count_local
from parallel_rl.metrics import Metric, Metrics
from parallel_rl.statistics import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from parallel_rl.losses.core.options import VocabOptions


def joint_requirements(parts: Mapping[str, tuple[Requirements, DataView]]) -> Requirements:
    """Merge the requirements of components by name; ValueError if two conflict or one cannot take part."""
    fields: dict[str, Field] = {}
    optional: dict[str, Field] = {}
    for name, (needs, view) in parts.items():
        if needs.reads == "scalar" or not needs.shift:
            what = "a scalar head" if needs.reads == "scalar" else "the position that holds a token"
            raise ValueError(f"component {name!r} must score predicted tokens by their logits; its loss reads {what}")
        optional |= {field.name: field for field in view.named(needs.optional)}
        for read in (*view.named(needs.fields), *view.masks):
            known = fields.get(read.name, read)
            if known.dtype == "mask":  # the other loss's dtype is more specific
                known = replace(known, dtype=read.dtype)
            elif read.dtype == "mask":
                read = replace(read, dtype=known.dtype)
            fields[read.name] = known
            if known != read:
                raise ValueError(
                    f"component {name!r} reads the field {read.name!r} as {read}, another as {known}; rename one "
                    "under `fields`"
                )
    all_needs = [needs for needs, _ in parts.values()]
    reads_logits = any(needs.reads != "log-probs" for needs in all_needs)
    return Requirements(
        tuple(fields.values()),
        optional=tuple(field for name, field in optional.items() if name not in fields),
        reads="logits" if reads_logits else "log-probs",
        paired=any(needs.paired for needs in all_needs),
        counted=True,
        collected=any(needs.collected for needs in all_needs),
        entropy=any(needs.entropy for needs in all_needs),
        entropy_measured=all(needs.entropy_measured for needs in all_needs if needs.entropy),
        entropy_gradient=any(needs.entropy and needs.entropy_gradient for needs in all_needs),
        untruncated=any(needs.untruncated for needs in all_needs),
        truncatable=all(needs.truncatable for needs in all_needs),
        token_separable=all(needs.token_separable for needs in all_needs) and not reads_logits,
        weighs_sequences=any(needs.weighs_sequences for needs in all_needs),
        ordered=any(needs.reads_places for needs in all_needs),  # under the losses' own field names
    )


@dataclass(frozen=True)
class Component:
    """One loss of a sum, its view of the data, and the prefix `name/` of its metrics and state."""

    name: str
    loss: LossFn
    view: DataView = field(default_factory=DataView)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the component's name and field names to the message of an error."""
        try:
            yield
        except ValueError as error:
            renamed = {"token_mask": self.view.mask, "sample_mask": self.view.rows, **self.view.fields}
            reads = ", ".join(f"{target} from {name!r}" for target, name in renamed.items() if name is not None)
            raise ValueError(f"component {self.name!r}{f' (reads {reads})' if reads else ''}: {error}") from error

    def requirements(self, data: Mapping[str, Tensor], whole: Requirements) -> Requirements:
        """Return the needs of its loss on its view of the data; `whole` are those of all components."""
        needs = self.loss.requirements.given(data)
        return needs if whole.shift else needs.on_rows()

    def part(self, local: LocalBatch) -> LocalBatch:
        """Restrict the batch to this component's tokens, counts and statistics."""
        counts, statistics = local.counts, local.statistics
        if statistics:  # not yet while they are counted or collected
            sums = (statistics[f"{self.name}_{unit}"].clamp(min=1) for unit in ("sequences", "tokens"))
            counts = ValidCounts(*sums)
        data = self.view.of(local.data)
        needs = self.requirements(data, local.requirements)
        of_part = None if statistics is None or not needs.statistics else statistics.under(f"{self.name}/")
        return self.loss.narrowed(replace(local, data=data, counts=counts, requirements=needs, statistics=of_part))

    def batch(self, whole: TokenBatch) -> TokenBatch:
        local, output = whole.local.parts[self.name], whole.output
        if self.name in output.parts:
            return TokenBatch(local, output.parts[self.name])
        stats, untruncated = (
            None if read is None else masked_stats(read, local.mask) for read in (output.stats, output.untruncated)
        )
        return TokenBatch(local, ModelOutput(stats, untruncated=untruncated))

    def counted(self, whole: TokenBatch) -> Statistics:
        """Count its sequences and tokens, and what its loss counts."""
        batch = self.batch(whole)
        sequences, tokens = batch.sequence_mask, batch.local.valid
        counted = Statistics({
            f"{self.name}_sequences": count_true(batch, sequences).value,
            f"{self.name}_tokens": count_true(batch, tokens).value,
        })  # fmt: skip
        return counted | count_local(self.loss, batch.local).prefixed(f"{self.name}/")


class ComponentsLoss(LossFn[ConfigT]):
    """Base of losses that are a sum of other losses, L = Σ_c λ_c·L_c.

    Each component has its own mask, counts of the step, metrics and state; tokens of no component are never read.
    """

    @property
    @abstractmethod
    def components(self) -> tuple[Component, ...]:
        """Return the components, always the same objects: a loss may hold state."""

    @property
    @abstractmethod
    def coefficients(self) -> Mapping[str, float]:
        """Return λ of each component in the current optimizer step."""

    @cached_property
    def requirements(self) -> Requirements:
        for component in self.components:
            check_declared(component.loss)
        return joint_requirements({part.name: (part.loss.requirements, part.view) for part in self.components})

    def options_of_components(self) -> dict[str, object]:
        """Return the constructor arguments of the components' losses."""
        options = self.options
        truncation = options.truncation
        return {
            "vocab_size": options.vocab_size, "vocab_start": options.vocab_start, "cp_layout": options.cp_layout,
            "temperature": options.temperature, "backend": options.backend, "top_k": truncation.top_k,
            "top_p": truncation.top_p, "kept_sets": truncation.kept_sets, "logit_scale": options.logit_scale,
        }  # fmt: skip

    def with_options(self, options: VocabOptions) -> Self:
        loss = super().with_options(options)

        def on_columns(loss: LossFn) -> LossFn:
            merged = replace(loss.options, vocab_size=options.vocab_size, vocab_start=options.vocab_start)
            return loss.with_options(merged)

        vars(loss)["components"] = tuple(replace(part, loss=on_columns(part.loss)) for part in self.components)
        return loss

    @property
    def on_policy(self) -> bool:
        return any(component.loss.on_policy for component in self.components)

    @property
    def kl_in_reward(self) -> bool:
        return any(component.loss.kl_in_reward for component in self.components)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        for component in self.components:
            component.loss.after_step(_under(f"{component.name}/", metrics))

    def state_dict(self) -> dict[str, float]:
        return {
            f"{component.name}/{name}": value
            for component in self.components
            for name, value in component.loss.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        known = tuple(f"{component.name}/" for component in self.components)
        strange = [name for name in state if not name.startswith(known)]
        if strange:
            raise ValueError(f"the state has {strange}; this loss has the components {', '.join(known)}")
        for component in self.components:
            component.loss.load_state_dict(_under(f"{component.name}/", state))

    def count_from(self, batch: TokenBatch) -> Statistics:
        return reduce(or_, (component.counted(batch) for component in self.components))

    def collect_from(self, batch: TokenBatch) -> Statistics:
        collecting = [component for component in self.components if component.loss.needs_collect]
        collected = (part.loss.collect_from(part.batch(batch)).prefixed(f"{part.name}/") for part in collecting)
        return reduce(or_, collected)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        terms: list[Tensor] = []
        metrics: dict[str, Metric] = {}
        coefficients = self.coefficients
        for component in self.components:
            share, measured = component.loss.compute(component.batch(batch))
            terms.append(coefficients[component.name] * share)
            metrics |= {f"{component.name}/{key}": measured.parts(key) for key in measured}
        loss = reduce(torch.add, terms)
        return loss, Metrics({"loss": Metric("share", loss), **self.own_metrics(loss), **metrics})

    def account(self, batch: TokenBatch) -> Account:
        coefficients = self.coefficients
        accounts = (
            part.loss.account(part.batch(batch)).under(f"{part.name}/", coefficients[part.name])
            for part in self.components
        )
        return reduce(or_, accounts)

    def own_metrics(self, loss: Tensor) -> dict[str, Metric]:
        """Return metrics in addition to those of the components."""
        return {}

    def narrowed(self, local: LocalBatch) -> LocalBatch:
        parts = {component.name: component.part(local) for component in self.components}
        scored = reduce(or_, (part.valid for part in parts.values()))
        return replace(local, data={**local.data, "token_mask": scored}, parts=parts)

    def scored(self, data: Mapping[str, Tensor]) -> Tensor:
        return reduce(or_, (component.loss.scored(component.view.of(data)) for component in self.components))

    def check_data(self, data: Mapping[str, Tensor], needs: Requirements) -> None:
        for component in self.components:
            check_zeros_and_ones(
                data, names=("token_mask", "sample_mask", *(mask.name for mask in component.view.masks))
            )
            view = component.view.of(data)
            with component.named():
                component.loss.check_data(view, component.requirements(view, needs))

    @property
    def reader(self) -> Reader:
        return ComponentsReader(self)


@dataclass(frozen=True, eq=False)
class ComponentsReader(LogProbReader):
    """Reader for several losses: one shared read of log-probs, and one per loss that reads logits."""

    loss: ComponentsLoss

    def check(self, logits: Tensor, data: Mapping[str, Tensor], tensor_group: ProcessGroup | None) -> None:
        super().check(logits, data, tensor_group)
        for component in self.loss.components:
            with component.named():
                component.loss.reader.check(logits, component.view.of(data), tensor_group)

    def read(self, local: LocalBatch, logits: Tensor, tensor_group: ProcessGroup | None) -> TokenBatch:
        components = self.loss.components
        readers = {part.name: part.loss.reader for part in components if part.loss.requirements.reads != "log-probs"}
        if not readers:
            return super().read(local, logits, tensor_group)
        parts = {name: reader.read(local.parts[name], logits, tensor_group).output for name, reader in readers.items()}
        if len(readers) == len(components):
            return TokenBatch(local, ModelOutput(parts=parts))
        # several readers share the logits, so none may overwrite them
        options = replace(self.loss.options.for_batch(local), consume_logits=False)
        output = token_output(local, logits, tensor_group, options, self.loss.requirements.entropy)
        return TokenBatch(local, output._replace(parts=parts))


def _under(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): x for name, x in values.items() if name.startswith(prefix)}
