"""Samplers of the trainer: from its own sharded logits, or from completion servers."""
