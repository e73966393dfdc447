"""One file per kind of step (supervised, preference, distillation, rl/), the evaluation, and the phases made of them.

A step turns records into rows, has models score them, and updates the policy. How rows become micro-batches is batching/'s,
how a model is run is models/'s.
"""
