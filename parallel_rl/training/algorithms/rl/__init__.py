"""One RL step in the trainer: prompts and records of a rank, requests ahead to servers, recording, updates."""
