"""A loss by name and options, as a config has it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from parallel_rl.config.strict import configure
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.losses.core.scalar_head import ScalarHeadLoss
from parallel_rl.losses.registry import get_loss
from parallel_rl.vocab.truncation import KEEP_ALL, Truncation


@dataclass(frozen=True)
class LossConfig:
    """A registered loss, checked when the config is read.

    Attributes:
        name: in the registry (`parallel_rl.losses.losses()`), or "module:name" for one that importing the module registers.
        options: keys of the loss's config, see its `config_class`.
    """

    name: str
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.build()

    @property
    def loss_class(self) -> type[LossFn]:
        """The registered class.

        Raises:
            ValueError: an unknown name, or a module that does not import.
        """
        module, colon, name = self.name.rpartition(":")
        if colon:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ValueError(f"name = {self.name!r}: the module {module!r} cannot be imported: {error}") from None
        return get_loss(name)

    @property
    def requirements(self) -> Requirements:
        """Requirements of the loss with these options."""
        return self.build().requirements

    def build(
        self,
        *,
        vocab_size: int | None = None,
        temperature: float = 1.0,
        consume_logits: bool = False,
        truncation: Truncation = KEEP_ALL,
    ) -> LossFn:
        """The loss on logits [.., V/tp], or on a scalar head, which has no vocabulary.

        Raises:
            ValueError: options that do not fit, a truncation of a loss that does not score the sampler's policy.
        """
        cls = self.loss_class
        config = configure(cls.config_class, self.options, "options")
        if issubclass(cls, ScalarHeadLoss):
            return cls(config)
        return cls(
            config,
            vocab_size=vocab_size,
            temperature=temperature,
            consume_logits=consume_logits,
            top_k=truncation.top_k,
            top_p=truncation.top_p,
        )
