"""Chat templates of Hugging Face folders, rendered in a bounded process, and the places of answers in their output."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from parallel_rl.training.tokenizer.protocol import Message, Tools

# names that `render` passes itself
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
LARGEST = 1 << 24  # characters of a rendering
MEMORY = 512 << 20  # bytes
SECONDS = 10.0  # a real template takes a thousandth
_TOO_LARGE = f"makes a text of more than {LARGEST:,} characters, or needs more than {MEMORY >> 20} MB"
# ordered as template_worker's states: OK, SYNTAX, SANDBOX, REFUSED, FAILED, TOO_LARGE
_WORDS = ("", "is no Jinja template", "tries what the sandbox forbids", "refuses the conversation", "fails", "")


@dataclass(frozen=True)
class ChatOptions:
    """Options of a template besides the conversation.

    Attributes:
        template: which of a folder's templates; None: the one named "default", or the only one.
        variables: by the template's names, such as enable_thinking.
        today: the date of `strftime_now`; None: an error for templates that read it.
    """

    template: str | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    today: date | None = None


class ChatTemplate:
    """Chat template, compiled and rendered in a bounded process; messages name the folder `where`.

    A rendering is bounded by 16 million characters, 512 MB and ten seconds. The process is restarted after a fork or a
    kill. ValueError if `source` is no template, or takes too much to compile.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "this example")
    >>> template.render([{"role": "user", "content": "hi"}], answered=True)
    '<user>hi'
    """

    def __init__(
        self,
        source: str,
        where: str,
        variables: Mapping[str, object] | None = None,
        options: ChatOptions | None = None,
    ) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise ValueError("chat templates need jinja2, which is not installed: pip install jinja2")
        options = ChatOptions() if options is None else options
        self.where = f"the chat template of {where}"
        variables = {**(variables or {}), **options.variables}
        self._first = pickle.dumps((source, options.today, variables, LARGEST, MEMORY, SECONDS))
        self._process: subprocess.Popen[bytes] | None = None
        self._pid, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            self._worker()

    def render(self, messages: Sequence[Message], *, answered: bool, tools: Tools = None) -> str:
        """Return the text of a conversation; unless `answered`, up to where the answer begins.

        ValueError if the template refuses the conversation, fails, leaves the sandbox, or exceeds a bound.
        """
        return self.render_all([(messages, answered)], tools)[0]

    def render_all(self, conversations: Sequence[tuple[Sequence[Message], bool]], tools: Tools = None) -> list[str]:
        """Render several (messages, answered), under one bound; see `render`."""
        request = pickle.dumps([(list(messages), not answered, tools) for messages, answered in conversations])
        if os.getpid() != self._pid:  # after a fork the parent reads its own process's replies
            self._process, self._pid, self._lock = None, os.getpid(), threading.Lock()
        with self._lock:
            process = self._worker()
            text = self._ask(process, request)
            return [text, *(self._reply(process) for _ in conversations[1:])]

    def _worker(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            script = str(Path(__file__).with_name("template_worker.py"))
            self._process = subprocess.Popen(  # nosec B603 # fixed words
                [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            weakref.finalize(self, _end, self._process, os.getpid())
            self._ask(self._process, self._first)
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> str:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: there is no reply
            process.stdin.write(request)
            process.stdin.flush()
        return self._reply(process)

    def _reply(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        head = process.stdout.read(9)
        if len(head) < 9:
            raise ValueError(f"{self.where} {_ended(process.wait())}")
        text = process.stdout.read(int.from_bytes(head[1:], "big")).decode("utf-8", "surrogatepass")
        if head[0] == 0:
            return text
        raise ValueError(f"{self.where} {_WORDS[head[0]]}: {text}" if text else f"{self.where} {_TOO_LARGE}")


def _ended(status: int) -> str:
    if status == -signal.SIGALRM:
        return f"takes more than {SECONDS:g} seconds"
    if status == -signal.SIGPROF:
        return "takes more than a second to compile"
    return f"{_TOO_LARGE} (its process ended with status {status})"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process that this process started, not a fork of it."""
    if owner == os.getpid():
        process.kill()
        process.communicate()


def turns(
    template: ChatTemplate, messages: Sequence[Message], answers: Sequence[Message], tools: Tools = None
) -> Iterator[tuple[str, str]]:
    """Iterate over answers as the template writes them, each with the text up to the next ("" at the end).

    An answer is what the rendering up to it adds to that of its prompt. Both must be prefixes of the whole rendering;
    then the answer's tokens are those that the policy would sample. ValueError for a template that refuses the
    conversation, or writes it differently when it continues.

    >>> template = ChatTemplate("{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    ...                         "{% if add_generation_prompt %}a{% endif %}", "this example")
    >>> answers = [{"role": role, "content": text} for role, text in (("assistant", "4"), ("user", "+2"), ("assistant", "6"))]
    >>> list(turns(template, [{"role": "user", "content": "2+2"}], answers))
    [('4;', 'u+2;a'), ('6;', '')]
    """
    conversation = [*messages, *answers]
    places = [
        place for place, message in enumerate(conversation) if place >= len(messages) and message["role"] == "assistant"
    ]
    prefixes = [
        (conversation[: place + answered], bool(answered))
        for place in places
        for answered in (0, 1)
        if not answered or place < len(conversation) - 1
    ]
    full_text, *texts = template.render_all([(conversation, True), *prefixes], tools)
    bounds: list[tuple[int, int]] = []
    for place, prompt, answer in zip(places, texts[::2], [*texts[1::2], full_text], strict=False):
        if not answer.startswith(prompt):
            raise ValueError(
                f"{template.where} renders an answer without its prompt before it: the conversation does not begin with the "
                f"prompt, which ends in {_end_of(prompt)}; fix the template, or set tokenizer.variables"
            )
        if not full_text.startswith(answer) or (bounds and len(prompt) < bounds[-1][1]):
            raise ValueError(
                f"{template.where} renders the answer messages[{place}] differently once the conversation continues: alone "
                f"it ends in {_end_of(answer)}. Set data.mask_history: true to learn the last answer only, or "
                "tokenizer.template to one that keeps earlier answers"
            )
        bounds.append((len(prompt), len(answer)))
    for (begin, end), following in zip(bounds, [*bounds[1:], None], strict=True):
        yield full_text[begin:end], "" if following is None else full_text[end : following[0]]


def _end_of(text: str) -> str:
    return repr(text if len(text) <= 40 else f"…{text[-40:]}")
