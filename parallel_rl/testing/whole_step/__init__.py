"""One optimizer step of a user's own Megatron model on every layout, against one process: `check_step` and its parts."""
