"""Messages for command-line words that no option takes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from parallel_rl.config.strict import closest
from parallel_rl.recipes import recipes

# launchers' names for the number of ranks
_RANKS = ("--nproc", "--nproc-per-node", "--nproc_per_node", "--world-size", "--ranks", "--gpus")


class Parser(argparse.ArgumentParser):
    """Parser that names the nearest command, and unknown options before missing ones."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        self.words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "are required" in message:
            overrides = "--section.key" in self.format_usage()
            unknown = unknown_option(self.words, options_of(self), self.prog, _sections() if overrides else ())
            message = unknown or message
        elif choice := re.match(r"argument command: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            name, known = choice[1], re.findall(r"[\w-]+", choice[2])
            message = f"there is no command {name!r}; {_alike(name, known) or 'choose ' + ', '.join(known)}"
        super().error(message)


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    return [name for name in parser._option_string_actions if name.startswith("--")]


def check_options(rest: Sequence[str], options: Iterable[str], command: str, has_config: bool) -> None:
    """Refuse an option that is like one of the command's; ValueError names the nearest one."""
    unknown = unknown_option(rest, options, f"parallel-rl {command}", _sections())
    if "; " in unknown or (unknown and not has_config):
        raise ValueError(unknown)


def unknown_option(words: Sequence[str], options: Iterable[str], command: str, sections: Sequence[str]) -> str:
    """Describe the first word that is neither an option nor a key of `sections`; "" without any.

    >>> unknown_option(["--tokns", "8"], ["--tokens"], "parallel-rl plan", ())
    "--tokns is not an option of `parallel-rl plan`; did you mean '--tokens'?"
    """
    options = [*options, *(f"--{section}" for section in sections)]
    for word in words[: words.index("--")] if "--" in words else words:
        name = word.partition("=")[0]
        if (
            not re.fullmatch(r"--[A-Za-z][\w-]*", name) or name in options
        ):  # a dotted one is a key, which the config judges
            continue
        hint = _alike(name, options)
        if name in _RANKS:
            hint = "did you mean '--world'?" if "--world" in options else "torchrun --nproc-per-node N starts ranks"
        return f"{name} is not an option of `{command}`" + (f"; {hint}" if hint else "")
    return ""


def surplus(word: str, command: str, options: Iterable[str]) -> str:
    """Describe a surplus word of a command without a config, and the option that takes it."""
    name = word.partition("=")[0]
    hint = _alike(name, options) if word.startswith("-") else _taken_by(word, command)
    return f"{word!r} is not an argument of `parallel-rl {command}`" + (f"; {hint}" if hint else "")


def _taken_by(word: str, command: str) -> str:
    if command == "recipes":
        return f"for this recipe write parallel-rl train --recipe {word}" if word in recipes() else ""
    if command in ("verify", "doctor") and word.endswith((".yaml", ".yml")):
        return f"write --config {word}"
    if command != "verify":
        return ""
    if word.endswith(".py"):
        return f"for a loss of that file write --loss {Path(word).stem}:NAME"
    if word in recipes():
        return f"for the loss of this recipe write --config {recipes()[word]}"
    return f"for a loss write --loss {word}"


def _alike(word: str, known: Iterable[str]) -> str:
    near = closest(word, known, cutoff=0.7)
    return "" if near is None else f"did you mean {near!r}?"


def _sections() -> list[str]:
    from parallel_rl.training.config.train import TrainConfig

    return [field.name for field in fields(TrainConfig)]
