"""Chat templates of Hugging Face folders: Jinja, in a sandbox, with nothing in it that a resumed run could not repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, NoReturn

from parallel_rl.training.tokenizer.protocol import Message, Tools

if TYPE_CHECKING:
    from jinja2.nodes import Node, Template
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from parallel_rl.training.tokenizer.bounds import Bounds

# what `render` gives a template itself
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class ChatOptions:
    """Variables of a template beside the conversation.

    Attributes:
        template: which of several templates a folder has; None: the one that is named "default", or the only one.
        variables: by the names that the template has for them, such as enable_thinking.
        today: the date that `strftime_now` tells; None: a template that asks is an error.
    """

    template: str | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    today: date | None = None


class ChatTemplate:
    """A compiled template.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "this example")
    >>> template.render([{"role": "user", "content": "hi"}], answered=True)
    '<user>hi'

    Args:
        source: of the template.
        where: it comes from, for messages.
        variables: the tokenizer's special tokens, by their names.
        options: the run's.

    Raises:
        ValueError: it is no template.
    """

    def __init__(
        self,
        source: str,
        where: str,
        variables: Mapping[str, object] | None = None,
        options: ChatOptions | None = None,
    ) -> None:
        from jinja2 import TemplateError

        options = ChatOptions() if options is None else options
        self.where = f"the chat template of {where}"
        self._variables = {**(variables or {}), **options.variables}
        try:
            environment, self._bounds = _environment(options.today)
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ValueError(
                f"{self.where} is no Jinja template: {error}" + (f" (line {line})" if line else "")
            ) from None

    def render(self, messages: Sequence[Message], *, answered: bool, tools: Tools = None) -> str:
        """The text of a conversation; unless it is answered, up to where the answer begins.

        Raises:
            ValueError: the template refuses the conversation, fails, reaches out of the sandbox, or grows without end.
        """
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError

        try:
            self._bounds.begin()
            return self._bounds.whole(
                self._template.generate(
                    messages=list(messages),
                    tools=tools,
                    documents=None,
                    add_generation_prompt=not answered,
                    **self._variables,
                )
            )
        except SecurityError as error:
            raise ValueError(f"{self.where} tries what the sandbox forbids: {error}") from None
        except TemplateError as error:
            raise ValueError(f"{self.where} refuses the conversation: {error}") from None
        except Exception as error:  # whatever foreign code does
            raise ValueError(f"{self.where} fails: {type(error).__name__}: {error}") from None


def _environment(today: date | None) -> tuple[ImmutableSandboxedEnvironment, Bounds]:
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from parallel_rl.training.tokenizer.bounds import LARGEST, Bounds

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> Template:
            return bounds.bounded(super()._parse(source, name, filename))

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            many = [isinstance(side, (str, list, tuple)) for side in (left, right)]
            if operator != "+":
                sizes = [len(side) if counted else abs(side) for side, counted in zip((left, right), many, strict=True)]
                if operator == "**" or sizes[0] * sizes[1] > LARGEST:
                    raise SecurityError(f"a {operator} that may fill the memory")
            elif all(many):
                bounds.check_size(len(left) + len(right))
            return super().call_binop(context, operator, left, right)

        def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
            raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__}")

    class Generation(Extension):
        """{% generation %} … {% endgeneration %}, which marks what the policy says: its body."""

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
        """Without the escapes that jinja2's own filter has for HTML."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    bounds = Bounds(environment)
    environment.extensions[Bounds.identifier] = bounds  # a compiled template finds it by this name
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    del environment.filters["random"], environment.globals["lipsum"]  # every rank must render the same
    return environment, bounds
