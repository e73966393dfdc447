"""A provider of Megatron-Bridge's kind: a config that builds its own model, with the vocabulary as a field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.transformer.transformer_config import TransformerConfig

from tests.testing.whole_step.models import provider

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass
class BridgeProvider(TransformerConfig):
    """Fields of the model beside those of its layers."""

    vocab_size: int = 151936
    seq_length: int = 4096

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> GPTModel:
        """Build the model of this stage."""
        return provider(self, bool(pre_process), bool(post_process), vp_stage, self.vocab_size, self.seq_length)
