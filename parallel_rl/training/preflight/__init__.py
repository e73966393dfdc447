"""Checks before a run: sizes against the layout, a dry run over the data, the gate that meets every rank.

Checks of a config alone are in config/, of single records in data/.
"""
