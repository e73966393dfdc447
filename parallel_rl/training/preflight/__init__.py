"""Checks before a run: sizes against the layout, a dry run over the data, and the gate on all ranks.

Checks of a config alone are in config/, checks of single records in data/.
"""
