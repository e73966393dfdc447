"""The reference trainer on megatron-core: `parallel-rl train CONFIG`.

A user reaches it through the command and YAML. `trainer.py` drives a run; `session.py` is what its steps share; each folder
is one concern. A loss, an advantage estimator or a reward does not belong here: the trainer knows them by their names in
the config.
"""
