"""The run of a loss: its requirements, the call, checks, the model's output, and the batch that its objective sees.

What a loss computes is in the files beside this folder, one each; how token statistics are computed is in `parallel_rl.vocab`.
"""
