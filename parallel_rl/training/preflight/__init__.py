"""Checks before a run that need more than its config: sizes on the layout, a dry run over the data, the gate."""
