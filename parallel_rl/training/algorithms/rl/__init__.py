"""One step of RL in the trainer: which prompts and records a rank takes, requests ahead of a server, recording, updates.

What any trainer would do with samples (dynamic sampling, KL, shaping, advantages) belongs in `parallel_rl.experience`.
"""
