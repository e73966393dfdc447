"""Token rows: their distribution over data ranks, and padded or packed micro-batches; no model, no file."""
