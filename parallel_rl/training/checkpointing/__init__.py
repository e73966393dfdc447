"""Checkpoints: contents, atomic writes, verification, recovery and removal; the trainer decides when to save."""
