"""Drawings of the pages: `python -m tools.figures` writes them as SVG into docs/explanation."""
