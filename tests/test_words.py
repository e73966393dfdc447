"""Words of the package: a docstring begins with a verb, in one line of at most 100 characters."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parallel_rl"
# folders and files whose docstrings were read; the aim is the whole package
READ = (
    "advantages", "agreement", "cli", "cluster", "compat", "config", "counts", "doctor", "explain", "functional", "groups",
    "hosts", "labels", "layout", "losses", "metrics", "packing", "plan", "prefix_tree", "recipes", "replicated", "schema",
    "segments", "statistics", "validation", "verify", "vocab",
)  # fmt: skip
NO_VERB = re.compile(
    "A|All|An|And|Any|As|Both|By|Each|Every|Everything|For|From|How|If|In|Its|Of|On|One|Same|Some|Such|That|The|These|This|Those"
    "|To|What|Whatever|When|Where|Whether|Which|Who|Whose|With|Without"
)
LONGEST = 100


def docstrings(path: Path) -> list[tuple[str, str]]:
    """List (place, docstring) of the functions and classes of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)]
    return [
        (
            f"{'class ' * isinstance(node, ast.ClassDef)}{path.relative_to(PACKAGE)}:{node.lineno} {node.name}",
            ast.get_docstring(node) or "",
        )
        for node in nodes
    ]


def fault(place: str, text: str) -> str:
    """Name what is wrong with the first line of a docstring, or return ""."""
    first = text.splitlines()[0]
    word = first.split()[0].rstrip(".,:")
    if len(first) > LONGEST:
        return f"{len(first)} characters in the first line; at most {LONGEST}"
    if not first.rstrip().endswith((".", "?", ":")):
        return "the first line does not end its sentence"
    if not place.startswith("class ") and NO_VERB.fullmatch(word):
        return f"begins with {word!r}; begin with a verb"
    return ""


@pytest.mark.parametrize("name", READ)
def test_docstrings_begin_with_a_verb(name: str) -> None:
    paths = sorted((PACKAGE / name).rglob("*.py")) if (PACKAGE / name).is_dir() else [PACKAGE / f"{name}.py"]
    faults = [f"{place}: {said}" for path in paths for place, text in docstrings(path) if (said := fault(place, text))]
    assert not faults, "\n".join(faults)


def test_no_docstring_begins_with_a_relative_clause() -> None:
    clause = re.compile(r'^ *"""(?:What|Where|Which|Who|Whose|Of|Those|That) .*', re.M)
    lines = {str(path): clause.findall(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: some for path, some in lines.items() if some} == {}
