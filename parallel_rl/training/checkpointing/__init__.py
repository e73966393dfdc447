"""Checkpoints: contents, atomic writes, verification, recovery, removal and export; the folder of a run and its lock."""
