"""python -m tools.reference: write the generated pages that the checkout has."""

from tools.reference.pages import COMMITTED, write

write(COMMITTED)
