"""Checkpoints: what is in one, how it is written whole, verified, found again and removed.

Which moments of a run are saved is the trainer's decision.
"""
