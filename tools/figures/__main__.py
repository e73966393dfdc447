"""python -m tools.figures: write the drawings."""

from tools.figures.files import write

write()
