"""One file per kind of step (supervised, preference, distillation, rl/), the evaluation, and the phases of a run."""
