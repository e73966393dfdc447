"""Process that renders one chat template: pickled conversations in, texts out.

It runs by its path, to start without torch. The kernel ends it when a template takes too long, also inside one call of
C or while Jinja compiles constants.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import date
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

# states of a reply
OK, SYNTAX, SANDBOX, REFUSED, FAILED, TOO_LARGE = range(6)
COMPILING = 1.5  # CPU seconds; real templates take hundredths
_SHOWN = 1000  # characters of an error
_IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # a preempted run still renders


def failure(error: BaseException) -> tuple[int, str]:
    """Return the state and the message of a template's exception."""
    line = getattr(error, "lineno", None)
    message = f"{str(error)[:_SHOWN]}" + (f" (line {line})" if line else "")
    if isinstance(error, MemoryError):
        return TOO_LARGE, ""
    if isinstance(error, SecurityError):
        return SANDBOX, message
    if isinstance(error, TemplateError):
        return REFUSED, message
    return FAILED, f"{type(error).__name__}: {message}"


def environment(today: date | None) -> ImmutableSandboxedEnvironment:
    """Make transformers' environment of chat templates, without functions that differ between ranks."""

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
            raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__}")

    class Generation(Extension):
        """{% generation %} … {% endgeneration %}, which marks the policy's text: renders its body."""

        tags = {"generation"}  # noqa: RUF012  # jinja2's own way

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        if today is None:
            raise TemplateError(
                "it reads the date, which would change the prompts from one day to the next; set tokenizer.date"
            )
        return today.strftime(form)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Serialise without the HTML escapes of jinja2's own filter."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    del sandbox.filters["random"], sandbox.globals["lipsum"]  # every rank must render the same
    return sandbox


def compiled(source: str, today: date | None) -> tuple[Template | None, int, str]:
    """Compile a template; on failure return a state and a message."""
    try:
        return environment(today).from_string(source), OK, ""
    except TemplateError as error:
        return None, SYNTAX, failure(error)[1]
    except RecursionError:
        return None, SYNTAX, "it nests deeper than Python compiles"
    except SyntaxError as error:  # such as more than 20 blocks
        return None, SYNTAX, f"Python does not compile it: {error.msg}"
    except Exception as error:
        return None, *failure(error)


def rendered(template: Template, variables: Mapping[str, object], largest: int) -> tuple[int, str]:
    """Render a conversation; return a state, and the text or the fault."""
    try:
        text = template.render(variables)
    except Exception as error:  # foreign code may raise anything
        return failure(error)
    return (OK, text) if len(text) <= largest else (TOO_LARGE, "")


def timed(timer: int, seconds: float, work: Callable[..., Any], *arguments: object) -> Any:
    """Call `work`; the kernel ends this process if it takes longer."""
    signal.setitimer(timer, seconds)
    result = work(*arguments)
    signal.setitimer(timer, 0)
    return result


def reply(out: BinaryIO, state: int, text: str) -> None:
    """Write a state, a length and a text, without a flush."""
    data = text.encode("utf-8", "surrogatepass")
    out.write(bytes([state]) + len(data).to_bytes(8, "big"))
    out.write(data)


def main() -> None:
    """Compile the template, then render until the input ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    calls, out = sys.stdin.buffer, sys.stdout.buffer
    source, today, fixed, largest, memory, seconds = pickle.load(calls)  # nosec B301
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    template, state, text = timed(signal.ITIMER_PROF, COMPILING, compiled, source, today)
    reply(out, state, text)
    out.flush()
    while template is not None:
        try:
            conversations = pickle.load(calls)  # nosec B301
        except EOFError:
            return
        for messages, prompt, tools in conversations:
            variables = {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": prompt,
                **fixed,
            }
            state, text = timed(signal.ITIMER_REAL, seconds, rendered, template, variables, largest)
            reply(out, state, text)
            if state != OK:
                break
        out.flush()


if __name__ == "__main__":
    main()
