"""Faults of a script's #SBATCH lines that `sbatch --test-only` does not see: `python -m tools.lint_sbatch SCRIPT ...`.

sbatch reads directives up to the first command, knows no shell, and says nothing about what it skips.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_rl.cluster.submit import seconds

# "# sbatch --nodes=2 script" in small letters is a remark on how to use the script
_LIKE_DIRECTIVE = re.compile(r"\s*#(\s*SBATCH\b|(?i:sbatch)\s+-)")
_SHELL = re.compile(r"\$|`|(?:^|[=\s])~")
_SHORT = {
    "-A": "--account",
    "-a": "--array",
    "-c": "--cpus-per-task",
    "-e": "--error",
    "-G": "--gpus",
    "-J": "--job-name",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-o": "--output",
    "-p": "--partition",
    "-t": "--time",
}
_FILES = ("--output", "--error")


@dataclass(frozen=True)
class Option:
    """One option of a directive, by its long name."""

    line: int
    name: str
    value: str


def lint(text: str, folder: Path) -> list[tuple[int, str]]:
    """(line, what is wrong) for each finding in a script that is submitted from `folder`."""
    lines = text.splitlines()
    end = _first_command(lines)
    found = list(_misread(lines, end))
    options = [
        option
        for number, line in enumerate(lines[:end], 1)
        if line.startswith("#SBATCH")
        for option in _options(number, line.removeprefix("#SBATCH"))
    ]
    parts: list[list[Option]] = [[]]  # of a job with several kinds of nodes
    for option in options:
        parts += [[]] if option.name == "hetjob" else []
        parts[-1].append(option)
    for part in parts:
        found += _twice(part)
    found += _files(options, folder)
    found += _together(parts[0], text + _sourced(text, folder))
    return sorted(set(found))


def main(arguments: Sequence[str]) -> int:
    """Prints the findings in the scripts; 1 where there are any."""
    failed = False
    for name in arguments:
        for line, what in lint(Path(name).read_text(encoding="utf-8"), Path.cwd()):
            failed = True
            print(f"{name}:{line}: {what}", file=sys.stderr)
    return int(failed)


def _sourced(text: str, folder: Path) -> str:
    """What a script sources, as it tells shellcheck."""
    names = re.findall(r"^# shellcheck source=(\S+)\nsource ", text, re.MULTILINE)
    return "".join((folder / name).read_text(encoding="utf-8") for name in names if (folder / name).is_file())


def _first_command(lines: Sequence[str]) -> int:
    """Number of lines before the first that is neither blank nor a comment."""
    return next((index for index, line in enumerate(lines) if line.strip() and line.strip()[0] != "#"), len(lines))


def _misread(lines: Sequence[str], end: int) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, 1):
        if not _LIKE_DIRECTIVE.match(line):
            continue
        text = line.removeprefix("#SBATCH")
        if text == line or text[:1].strip():
            yield number, f"{line.rstrip()!r} is a mere comment for sbatch; write '#SBATCH ' from the first column on"
        elif number > end:
            yield number, f"sbatch stops reading at the first command (line {end + 1}); move the directive above it"
        elif not text.strip():
            yield number, "the directive is empty"
        elif _SHELL.search(text):
            yield number, f"sbatch expands no variable, command or tilde: {text.strip()!r} is taken as it stands"


def _options(number: int, text: str) -> Iterator[Option]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # a quote that is not closed: sbatch says so
        return
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name[:1] == "-" and name[1:2] != "-" and len(name) > 2:
            name, equals, value = name[:2], "=", name[2:] + equals + value
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        yield Option(number, _SHORT.get(name, name), value)


def _twice(options: Sequence[Option]) -> Iterator[tuple[int, str]]:
    seen: dict[str, int] = {}
    for option in options:
        if option.name in seen:
            yield option.line, f"{option.name} stands in line {seen[option.name]} too; the last one silently wins"
        seen.setdefault(option.name, option.line)


def _files(options: Sequence[Option], folder: Path) -> Iterator[tuple[int, str]]:
    for option in options:
        if option.name not in _FILES or option.value.startswith("/dev/"):
            continue
        parent = Path(option.value).parent
        if "%" in str(parent):
            yield (
                option.line,
                f"{option.name}={option.value}: sbatch makes no folder, and {parent} is another for each job",
            )
        elif not (folder / parent).is_dir() and not _SHELL.search(option.value):
            yield (
                option.line,
                f"{option.name}={option.value}: the folder {parent} does not exist; the job would fail silently",
            )
        if not re.search(r"%\d*[jA]", option.value):
            yield (
                option.line,
                f"{option.name}={option.value}: two jobs write to one file; put %j (arrays: %A_%a) into its name",
            )


def _together(options: Sequence[Option], text: str) -> Iterator[tuple[int, str]]:
    by_name = {option.name: option for option in options}
    requeue, mode, signal = (by_name.get(name) for name in ("--requeue", "--open-mode", "--signal"))
    if requeue is not None and (mode is None or mode.value != "append"):
        yield requeue.line, "--requeue without --open-mode=append: each restart empties the job's log"
    if signal is None:
        return
    to, _, what = signal.value.rpartition(":")
    what, _, notice = what.partition("@")
    name = what.upper().removeprefix("SIG")
    traps = re.search(rf"^\s*trap\s.*\b(SIG)?{re.escape(name)}\b", text, re.MULTILINE)
    if "B" not in to and traps:
        yield (
            signal.line,
            f"--signal={signal.value} does not reach the script, which traps {name}: write B:{signal.value}",
        )
    if "B" in to and not traps:
        yield signal.line, f"--signal={signal.value} reaches the script, which has no trap for {name} and dies of it"
    if (time := by_name.get("--time")) is not None and 0 < _minutes(time.value) * 60 <= int(notice or "60"):
        yield signal.line, f"--signal={signal.value} comes at once: --time={time.value} is no longer than its notice"


def _minutes(time: str) -> int:
    """0 where there is no limit; sbatch itself refuses what cannot be read."""
    try:
        return (seconds(time) or 0) // 60
    except ValueError:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
