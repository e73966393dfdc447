"""Reports of a run for people: the table of metrics, metrics.jsonl, TensorBoard, curves.

It holds no state that a run needs to continue.
"""
