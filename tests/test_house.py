"""The plan of the house: imports, type-only and late ones too, run downwards, without a circle; rooms and files are small."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

Graph = Mapping[str, set[str]]

PACKAGE = Path(__file__).parents[1] / "parallel_rl"
# From the ground up. A room may import those of lower floors and no other; one that is new takes its place here.
FLOORS = (
    ("cluster", "config", "groups", "labels", "replicated", "segments", "validation"),
    ("agreement", "functional", "layout", "schema"),
    ("counts", "metrics", "prefix_tree", "statistics", "vocab"),
    ("advantages", "losses", "servers"),
    ("experience", "explain", "packing", "plan", "recipes"),
    ("compat", "hosts", "megatron"),
    ("port", "testing"),
    ("doctor", "training", "verify"),
    ("cli",),
)
TRAINING = (
    ("reporting", "tokenizer"),
    ("config",),
    ("batching", "data"),
    ("models",),
    ("rollouts",),
    ("session",),
    ("checkpointing",),
    ("algorithms",),
    ("preflight",),
    ("trainer",),
)
MOST_FLOORS, MOST_ROOMS, MOST_ARROWS, MOST_LINES = 9, 13, 50, 320


class House:
    """The modules of a package and what each imports; a name that an `__init__` only hands on counts as its own module's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
        self.lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items()}
        trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}
        found = {name: list(_imports(tree, root.name, set(paths))) for name, tree in trees.items()}
        makes = (ast.FunctionDef, ast.ClassDef)
        faces = {
            name
            for name, path in paths.items()
            if path.name == "__init__.py" and not any(isinstance(node, makes) for node in ast.walk(trees[name]))
        }

        def home(module: str, name: str) -> str:
            if module in faces:
                for further, handed_on in found[module]:
                    if handed_on == name:
                        return home(further, name)
            return module

        self.graph: Graph = {
            module: {home(*one) for one in found[module]} - {module} for module in paths if module not in faces
        }

    def rooms(self, below: str) -> Graph:
        """The rooms right below a package, and the other ones there that each imports."""
        rooms: dict[str, set[str]] = {}
        for module, others in self.graph.items():
            if module.startswith(f"{below}."):
                room = rooms.setdefault(_room(module, below), set())
                room |= {_room(other, below) for other in others if other.startswith(f"{below}.")} - {
                    _room(module, below)
                }
        return rooms

    def climbs(self, below: str, floors: Sequence[Sequence[str]]) -> list[str]:
        """The imports that do not run to a lower floor, and the rooms that stand on none."""
        floor = {room: number for number, rooms in enumerate(floors, 1) for room in rooms}
        wrong = [f"{below}.{room} has no floor" for room in self.rooms(below) if room not in floor]
        for module, others in self.graph.items():
            for other in sorted(others):
                if not (module.startswith(f"{below}.") and other.startswith(f"{below}.")):
                    continue
                here, there = _room(module, below), _room(other, below)
                if here != there and here in floor and there in floor and floor[there] >= floor[here]:
                    wrong.append(f"{module} (floor {floor[here]}) imports {other} (floor {floor[there]})")
        return wrong


def circles(graph: Graph) -> list[str]:
    """The names of each set of nodes that reach one another."""
    reach: dict[str, set[str]] = {node: set(others) for node, others in graph.items()}
    for middle in reach:
        for others in reach.values():
            if middle in others:
                others |= reach[middle]
    around = {node: frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in reach}
    return sorted({", ".join(sorted(names)) for names in around.values() if names})


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str, below: str) -> str:
    return module.removeprefix(f"{below}.").partition(".")[0]


def _imports(tree: ast.AST, package: str, modules: set[str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules:
                    yield whole, ""
                elif node.module in modules:
                    yield node.module, alias.name
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in modules)


@pytest.fixture(scope="module")
def house() -> House:
    return House(PACKAGE)


def test_imports_run_to_lower_floors(house: House) -> None:
    assert house.climbs("parallel_rl", FLOORS) == [] and len(FLOORS) <= MOST_FLOORS
    assert house.climbs("parallel_rl.training", TRAINING) == []
    users = {module for module, others in house.graph.items() if "parallel_rl" in others}
    assert users == {"parallel_rl.cli"}, "the public face is for users, its version for the command"


def test_contributing_lists_the_same_floors() -> None:
    rows = re.findall(r"^  \| (`.+?`) \| ", (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    assert [tuple(re.findall(r"`(\w+)`", row)) for row in rows] == list(FLOORS)


def test_there_is_no_circle(house: House) -> None:
    assert circles(house.graph) == []


def test_rooms_arrows_and_files_stay_few_and_small(house: House) -> None:
    rooms = house.rooms("parallel_rl.training")
    assert len(rooms) <= MOST_ROOMS and sum(map(len, rooms.values())) <= MOST_ARROWS
    assert {name: lines for name, lines in house.lines.items() if lines > MOST_LINES} == {}


def test_losses_call_public_members_of_other_objects_alone() -> None:
    """A protocol of private methods once said what a loss overrides, so that nobody could read it."""
    assert _private_calls("loss._read(call), self._own(), super()._own(), x._replace(y=1)") == ["loss._read"]
    paths = [*(PACKAGE / "losses").rglob("*.py"), PACKAGE / "testing/alone.py", PACKAGE / "testing/on_logprobs.py"]
    found = {str(path): _private_calls(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: calls for path, calls in found.items() if calls} == {}


def _private_calls(text: str) -> list[str]:
    """Calls of another object's private members; `_replace` is a named tuple's public one."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    private = [call for call in calls if isinstance(call, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", call.attr)]
    return [
        text
        for text in map(ast.unparse, (call for call in private if call.attr != "_replace"))
        if not re.match(r"(self|cls|super\(\))\._", text)
    ]


def test_a_planted_climb_and_a_planted_circle_are_found(tmp_path: Path) -> None:
    files = {
        "__init__": "",
        "low/__init__": "from house.low.deep import thing as thing\n",
        "low/deep": "def thing():\n    from house.high import roof\n",  # late
        "low/other": "import house.low.deep\n",
        "high": "from house.low import thing\nroof = 1\n",  # through the face
        "new": "",
    }
    for name, text in files.items():
        path = tmp_path / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    planted = House(tmp_path / "house")
    assert planted.climbs("house", (("low",), ("high",))) == [
        "house.new has no floor",
        "house.low.deep (floor 1) imports house.high (floor 2)",
    ]
    assert circles(planted.graph) == ["house.high, house.low.deep"]
    assert planted.rooms("house") == {"low": {"high"}, "high": {"low"}, "new": set()}
    (tmp_path / "house/low/deep.py").write_text("if TYPE_CHECKING:\n    import house.high\n")
    assert circles(House(tmp_path / "house").graph) == ["house.high, house.low.deep"]
    (tmp_path / "house/low/deep.py").write_text("thing = 1\n")
    assert circles(House(tmp_path / "house").graph) == []
