"""Arithmetic before a run: bytes of the loss stage and of the states of a rank, and lower bounds of a step's time."""
