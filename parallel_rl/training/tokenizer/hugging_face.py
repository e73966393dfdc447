"""Tokenizer of a Hugging Face folder: tokenizer.json, chat template, end tokens. Needs `tokenizers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_rl.config.strict import nearest
from parallel_rl.training.tokenizer.chat_template import ChatOptions, ChatTemplate, turns
from parallel_rl.training.tokenizer.protocol import Message, Target, Tools, Vocabulary, plain_answer, plain_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HuggingFaceTokenizer:
    """Tokenizer of a folder written by transformers' `save_pretrained`; only JSON and templates are read.

    End tokens are the eos_token of tokenizer_config.json and each eos_token_id of generation_config.json and
    config.json. Without `chat`, conversations are plain texts. ValueError for a missing or malformed file, `tokenizers`
    not installed, no or several chat templates, or no end token.
    """

    def __init__(self, folder: Path, chat: ChatOptions | None = None) -> None:
        self._folder = folder
        self._tokenizer = _load(folder)
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        special = {name: text for name in _SPECIAL if (text := _content(config.get(name))) is not None}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        configs = [_read_json(folder / name) for name in ("generation_config.json", "config.json")]
        eos = vocabulary.get(special.get("eos_token", ""))
        ends = [
            *([] if eos is None else [eos]),
            *(end for settings in configs for end in _ids(settings.get("eos_token_id"))),
        ]
        if not ends:
            raise ValueError(
                f"{folder} has no end token: neither an eos_token of tokenizer_config.json that tokenizer.json knows nor an "
                "eos_token_id of generation_config.json or config.json"
            )
        if outside := [end for end in ends if not 0 <= end < size]:
            raise ValueError(
                f"{folder}: eos_token_id = {outside[0]} lies outside the vocabulary [0, {size}) of tokenizer.json"
            )
        pad = vocabulary.get(special.get("pad_token", ""), ends[0])
        self.vocabulary = Vocabulary(size, frozenset(ends), pad)
        self._end = ends[0]
        self._no_form = f"{folder} has no chat template, or tokenizer.chat = False disables it"
        self._begin = _begin(self._tokenizer, vocabulary)
        self._template = (
            None if chat is None else ChatTemplate(_template(folder, config, chat), str(folder), special, chat)
        )

    def encode(self, text: str) -> list[int]:
        """Encode `text` alone; as in transformers, names of special tokens become these tokens."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a lone surrogate is a TypeError, for instance
            raise ValueError(f"the text {text!r} cannot be tokenized: {error}") from None

    def decode(self, ids: Iterable[int]) -> str:
        """Decode up to the first end token, without special tokens; U+FFFD for an id without a token."""
        tokens = list(takewhile(lambda token: token not in self.vocabulary.ends, ids))
        text, known = "", list[int]()
        for token in tokens:
            if 0 <= token < self.vocabulary.size:
                known.append(token)
            else:
                text, known = f"{text}{self._tokenizer.decode(known)}\ufffd", []
        return text + self._tokenizer.decode(known)

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Encode as transformers' `apply_chat_template(messages, tools=tools, add_generation_prompt=True)`."""
        if self._template is None:
            return [*self._begin, *self.encode(self._plain(messages, tools))]
        return self.encode(self._template.render(messages, answered=False, tools=tools))

    def target(self, messages: Sequence[Message], answers: Sequence[Message], tools: Tools = None) -> Target:
        """Encode the template's text after the prompt, up to the last answer's end token; only answers train."""
        if self._template is None:
            self._plain(messages, tools)
            return Target((*self.encode(plain_answer(answers, self._no_form)), self._end))
        tokens, mask = list[int](), list[int]()
        learned = [int(message.get("weight") != 0) for message in answers if message["role"] == "assistant"]
        for weight, (answer, following) in zip(learned, turns(self._template, messages, answers, tools), strict=True):
            answer_ids = self._answer_ids(answer, last=not following)
            ids = self.encode(answer + following) if following else answer_ids
            if ids[: len(answer_ids)] != answer_ids:
                raise ValueError(
                    f"the tokenizer merges the end token of an answer with the text that the chat template of {self._folder} "
                    "writes after it; set data.mask_history: true to learn the last answer only"
                )
            tokens += ids
            mask += [weight] * len(answer_ids) + [0] * (len(ids) - len(answer_ids))
        return Target(tuple(tokens), None if all(mask) else tuple(mask))

    def _answer_ids(self, answer: str, last: bool) -> list[int]:
        ids = self.encode(answer)
        end = max((place for place, token in enumerate(ids) if token in self.vocabulary.ends), default=None)
        if end is not None:
            return ids[: end + 1]
        if not last:
            raise ValueError(
                f"the chat template of {self._folder} writes no end token after earlier answers, so the policy would not "
                "learn to end them; set data.mask_history: true to learn the last answer only"
            )
        return [*ids, self._end]

    def document(self, text: str) -> list[int]:
        """Encode a text with tokenizer.json's prefix and the end token."""
        return [*self._begin, *self.encode(text), self._end]

    def _plain(self, messages: Sequence[Message], tools: Tools) -> str:
        return plain_text(messages, self._no_form, tools)


def has_chat_template(folder: Path) -> bool:
    """Return whether a folder has a chat template; ValueError for a malformed file."""
    return bool(_templates(folder, _read_json(folder / "tokenizer_config.json")))


def fingerprint(folder: Path) -> str:
    """Hash tokenizer.json, which a model's weights depend on; ValueError if missing."""
    return hashlib.sha256(_tokenizer_json(folder).read_bytes()).hexdigest()[:16]


def _load(folder: Path) -> Tokenizer:
    path = _tokenizer_json(folder)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(f"{path} is read with tokenizers, which is not installed: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _begin(tokenizer: Tokenizer, vocabulary: Iterable[str]) -> list[int]:
    """Return the special tokens that tokenizer.json puts before a text, maybe the end token among them."""
    for text in ("a", *vocabulary):
        encoding = tokenizer.encode(text, add_special_tokens=True)
        if not all(encoding.special_tokens_mask):
            return encoding.ids[: encoding.special_tokens_mask.index(0)]
    return []


def _tokenizer_json(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"tokenizer.hf = {str(folder)!r} is not a folder; one with a tokenizer.json is needed")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    return folder / "tokenizer.json"


def _template(folder: Path, config: Mapping[str, object], options: ChatOptions) -> str:
    templates = _templates(folder, config)
    if not templates:
        raise ValueError(
            f"{folder} has no chat template, neither in tokenizer_config.json nor as chat_template.jinja; leave out "
            "tokenizer.chat, or set it to false"
        )
    name = options.template or (next(iter(templates)) if len(templates) == 1 else "default")
    if name not in templates:
        raise ValueError(
            f"tokenizer.template = {options.template!r}: {folder} has no such chat template; {nearest(name, templates)}"
        )
    return templates[name]


def _templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Map names to a folder's template sources; files override tokenizer_config.json."""
    entry, templates = config.get("chat_template"), dict[str, object]()
    if isinstance(entry, list):
        templates |= {str(item.get("name")): item.get("template") for item in entry if isinstance(item, dict)}
    elif entry is not None:
        templates["default"] = entry
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    templates |= {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    for name, source in templates.items():
        if not isinstance(source, str):
            raise ValueError(f"{folder}: the chat template {name!r} is {source!r:.80}; a text is needed")
    return {name: str(source) for name, source in templates.items()}


def _read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; {} without the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _content(token: object) -> str | None:
    """Return the text of a special token, given as a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(value: object) -> list[int]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
