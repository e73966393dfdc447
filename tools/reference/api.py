"""The pages of the public names and of the command line, which only the site has."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from importlib import import_module

from parallel_rl.cli import command_parsers
from tools.reference.markdown import page, table

#: packages whose `__all__` is public, in the order of the page
MODULES = (
    "parallel_rl",
    "parallel_rl.losses",
    "parallel_rl.advantages",
    "parallel_rl.megatron",
    "parallel_rl.megatron.hf",
    "parallel_rl.experience",
    "parallel_rl.prefix_tree",
    "parallel_rl.testing",
    "parallel_rl.hosts.nemo_rl",
    "parallel_rl.hosts.slime",
    "parallel_rl.hosts.verl",
    "parallel_rl.compat.nemo_rl",
    "parallel_rl.compat.lightrft",
    "parallel_rl.compat.openrlhf",
    "parallel_rl.compat.trinity",
)
_HEADS = ("Args", "Attributes", "Raises", "Returns", "Yields")


def api_page() -> str:
    """Write every public name with its signature and docstring."""
    parts = ["# Python API", "Every public name, package by package. `help(name)` prints the same text."]
    seen: set[int] = set()
    for package in MODULES:
        module = import_module(package)
        parts += [f"## {package}", markdown(inspect.getdoc(module) or "")]
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) not in seen:
                parts += [f"### {name}", *_about(name, value)]
            seen.add(id(value))
    return page(*parts)


def command_line_page() -> str:
    """Write the arguments of every command."""
    parts = [
        "# Command line",
        "`train`, `check`, `data`, `sample` and `export` also take [any key of a config](../config.md).",
    ]
    for name, parser in command_parsers().items():
        rows = [(_shown(action), action.help or "") for action in parser._actions if action.help != argparse.SUPPRESS]
        parts += [f"## {name}", parser.description or "", table(("argument", "what it does"), rows)]
    return page(*parts)


def markdown(docstring: str) -> str:
    """Turn a docstring into Markdown: examples, indented blocks and lists of arguments.

    >>> markdown("Add.\\n\\nArgs:\\n    x, y: two [B]\\n        numbers.").splitlines()
    ['Add.', '**Args**', '- `x, y`: two [B] numbers.']
    """
    return page(*_blocks(docstring))


def _blocks(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        head, _, rest = block.partition("\n")
        if block.lstrip().startswith(">>>"):
            yield f"```python\n{inspect.cleandoc(block)}\n```"
        elif head.rstrip(":") in _HEADS and head.endswith(":"):
            yield f"**{head.rstrip(':')}**"
            yield "\n".join(_entries(inspect.cleandoc(rest)))
        elif all(line.startswith("    ") for line in block.splitlines()):
            yield f"```text\n{inspect.cleandoc(block)}\n```"
        else:
            yield _plain(" ".join(block.split()))


def _entries(text: str) -> Iterator[str]:
    """Make a list of an argument a line, its further lines indented."""
    for entry in re.split(r"\n(?=\S)", text):
        name, colon, about = " ".join(entry.split()).partition(": ")
        yield f"- `{name}`: {_plain(about)}" if colon and "`" not in name else f"- {_plain(' '.join(entry.split()))}"


def _plain(text: str) -> str:
    """Escape what Markdown would take for markup outside of backticks."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(one if one.startswith("`") else re.sub(r"([*<]|\](?=\())", r"\\\1", one) for one in pieces)


def _about(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value) or inspect.isroutine(value):
        try:
            signature = str(inspect.signature(value))
        except (TypeError, ValueError):
            signature = ""
        yield f"```python\n{name}{re.sub(r'<[^>]*>', '...', signature)}\n```"
        yield markdown(inspect.getdoc(value) or "")
    else:
        yield f"`{type(value).__name__}`"


def _shown(action: argparse.Action) -> str:
    """Write an argument as one types it."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)
