"""The section `tokenizer`: characters, or the tokenizer of a Hugging Face folder."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parallel_rl.training.tokenizer.characters import CharTokenizer
from parallel_rl.training.tokenizer.chat_template import RESERVED, ChatOptions
from parallel_rl.training.tokenizer.hugging_face import HuggingFaceTokenizer, fingerprint, has_chat_template
from parallel_rl.training.tokenizer.protocol import Tokenizer

AUTO = "auto"


@dataclass(frozen=True)
class TokenizerConfig:
    """Either `alphabet` or `hf`. The other keys configure the chat template of `hf`.

    Attributes:
        alphabet: every character that the data uses. "auto": the characters of the data when the run begins.
        hf: a folder with tokenizer.json, tokenizer_config.json and the like; relative to the config file.
        chat: true: prompts and answers go through the folder's chat template. null: if it has one.
        template: name of the chat template, if the folder has several.
        variables: extra variables of the template, such as {enable_thinking: false}.
        date: the date that the template takes for today (2026-01-31). A run that is resumed later keeps its prompts.
    """

    alphabet: str | None = None
    hf: str | None = None
    chat: bool | None = None
    template: str | None = None
    variables: dict[str, object] = field(default_factory=dict)
    date: datetime.date | None = None

    def __post_init__(self) -> None:
        if (self.alphabet is None) == (self.hf is None):
            fault = "both are given" if self.hf is not None else "neither is given"
            raise ValueError(f"exactly one of alphabet and hf is needed; {fault}")
        if self.alphabet not in (None, AUTO):
            self.build()
        for name in ("chat", "template", "variables", "date"):
            value = getattr(self, name)
            if value in (None, {}):
                continue
            if self.hf is None:
                raise ValueError(f"{name} = {value!r} has no effect with alphabet, which has no chat template")
            if name != "chat" and self.chat is False:
                raise ValueError(f"{name} = {value!r} has no effect with chat = False; leave one of them out")
        for name in self.variables:
            if name in RESERVED:
                raise ValueError(f"variables.{name} is not valid: the trainer gives a template its {name!r} itself")

    def build(self) -> Tokenizer:
        """Make the tokenizer; ValueError for an unsettled alphabet or a folder without a tokenizer."""
        if self.hf is None:
            assert self.alphabet is not None
            if self.alphabet == AUTO:
                raise ValueError(
                    "tokenizer.alphabet = 'auto' is known when a run has seen its data; give the config.yaml of its folder"
                )
            return CharTokenizer(self.alphabet)
        folder, options = Path(self.hf), ChatOptions(self.template, self.variables, self.date)
        wanted = options != ChatOptions() if self.chat is None else self.chat
        chat = wanted or (self.chat is None and has_chat_template(folder))
        return HuggingFaceTokenizer(folder, options if chat else None)

    @property
    def identity(self) -> Mapping[str, str | None]:
        """Identify the vocabulary that a model's weights depend on, for a checkpoint."""
        tokens = None if self.hf is None else f"tokenizer.json with the SHA-256 {fingerprint(Path(self.hf))}"
        return {"tokenizer.alphabet": self.alphabet, "tokenizer.hf": tokens}
