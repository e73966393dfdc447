"""A loss by name and options, as in a config."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from parallel_rl.config.names import is_left
from parallel_rl.config.strict import configure
from parallel_rl.losses.core.base import LossFn
from parallel_rl.losses.core.batch import TokenBatch
from parallel_rl.losses.core.options import NoConfig
from parallel_rl.losses.core.requirements import Requirements
from parallel_rl.losses.registry import get_loss, losses
from parallel_rl.losses.value import ScalarHeadLoss
from parallel_rl.metrics import Metrics
from parallel_rl.vocab.shards import KEEP_ALL, Truncation


class _Unseen(LossFn[NoConfig]):
    """Stand-in for a loss that this process does not import; never called."""

    config_class = NoConfig
    requirements = Requirements(truncatable=True)

    def compute(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        raise NotImplementedError("a loss that was not imported")


@dataclass(frozen=True)
class LossConfig:
    """A registered loss, checked when the config is read.

    Attributes:
        name: a registered name (`parallel_rl.losses.losses()`); a module of --import may add names.
        options: keys of the loss's config, see its `config_class`.
    """

    name: str
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.build()

    @property
    def loss_class(self) -> type[LossFn]:
        """Return the registered class; ValueError for an unknown name."""
        return _Unseen if self.unseen else get_loss(self.name)

    @property
    def unseen(self) -> bool:
        """Return whether only the ranks know this loss, so its fields are unknown here (`parallel-rl check`)."""
        return self.name not in losses() and is_left("loss", self.name)

    @property
    def requirements(self) -> Requirements:
        return self.build().requirements

    def build(
        self,
        *,
        vocab_size: int | None = None,
        temperature: float = 1.0,
        consume_logits: bool = False,
        truncation: Truncation = KEEP_ALL,
    ) -> LossFn:
        """Build the loss on logits or a scalar head; ValueError for options or a truncation that do not fit."""
        cls = self.loss_class
        if cls is _Unseen:
            return cls()
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
