"""The reference trainer on megatron-core: `parallel-rl train CONFIG`.

`trainer.py` drives a run, `session.py` holds what its steps share, each folder is one concern. Losses, estimators and rewards
are registered elsewhere and named in the config.
"""
