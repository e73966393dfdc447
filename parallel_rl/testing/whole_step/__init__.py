"""Compare one optimizer step of a user's Megatron model, on every layout, with one process."""
