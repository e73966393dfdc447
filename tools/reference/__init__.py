"""Generated pages of the reference: `python -m tools.reference` writes them."""
