"""Reports of a run for people: table of metrics, metrics.jsonl, TensorBoard, curves; no state."""
