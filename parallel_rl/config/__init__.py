"""Configs of any part: strict frozen dataclasses from mappings, and YAML files that extend each other.

It knows no option of a loss or of the trainer; those are in the dataclasses of `losses` and `training/config`.
"""
