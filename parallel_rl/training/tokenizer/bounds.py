"""Bounds on the time and the size of a template's rendering. Needs jinja2."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

LARGEST = 1 << 24  # product of numbers, or items of a text or a list
SECONDS = 10.0  # a real template takes milliseconds


class Bounds(Extension):
    """Looks at the clock in each turn of a loop and each call of a macro, and at the size of what is put together.

    >>> environment = Environment(extensions=[Bounds])
    >>> environment.extensions[Bounds.identifier].begin()
    >>> environment.from_string("{% for i in range(3) %}{{ i ~ 'a' }}{% endfor %}").render()
    '0a1a2a'
    """

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._deadline, self._size = float("inf"), 0

    def begin(self) -> None:
        """Start a rendering."""
        self._deadline, self._size = time.monotonic() + SECONDS, 0

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """The tree of a template with the looks in it."""
        transformed: nodes.Template = _Looks(self).visit(tree)
        return transformed

    def tick(self) -> None:
        """Look at the clock.

        Raises:
            SecurityError: the rendering has taken too long.
        """
        if time.monotonic() > self._deadline:
            raise SecurityError(f"a rendering of more than {SECONDS:g} seconds")

    def concat(self, *parts: object) -> str:
        """The operator `~`."""
        texts = [str(part) for part in parts]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)

    def check_size(self, size: int) -> None:
        """Look at a size.

        Raises:
            SecurityError: it is too large.
        """
        if size > LARGEST:
            raise SecurityError(f"a text or a list of {size:,} items, which may fill the memory")

    def whole(self, pieces: Iterable[str]) -> str:
        """The output of a template, checked piece by piece."""
        kept = []
        for piece in pieces:
            self.tick()
            self._size += len(piece)
            self.check_size(self._size)
            kept.append(piece)
        return "".join(kept)


class _Looks(NodeTransformer):
    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._bounds.call_method("tick", lineno=node.lineno), lineno=node.lineno))
        changed: nodes.Node = node
        return changed

    visit_For = visit_Macro = visit_CallBlock = _ticking  # jinja2's own names

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._bounds.call_method("concat", node.nodes, lineno=node.lineno)
