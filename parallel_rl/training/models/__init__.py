"""Megatron models in their layout: built, scored, and trained one optimizer step at a time (`Learner`)."""
