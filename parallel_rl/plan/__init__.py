"""Arithmetic before a run: memory of a rank, and lower bounds of a step's time."""
