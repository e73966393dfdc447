"""Megatron models in their layout: built, scored, and trained one optimizer step at a time (`Learner`).

What is general about Megatron is in parallel_rl.megatron; what is here reads the trainer's config and micro-batches.
"""
