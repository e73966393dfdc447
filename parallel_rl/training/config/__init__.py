"""Dataclasses of a run's YAML, with every check that needs no file, world or model."""
