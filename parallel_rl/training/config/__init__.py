"""The dataclasses of a run's YAML, with every check that needs no file, world or model.

Checks against the data, the disk or the number of ranks are in preflight/ and data/.
"""
