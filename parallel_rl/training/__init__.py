"""Reference trainer on megatron-core, `parallel-rl train CONFIG`: `trainer.py` drives a run; a folder is a concern."""
