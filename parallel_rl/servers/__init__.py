"""HTTP clients of completion and reward servers: requests, retries, answers, weights sent to a server.

Samples and rewards made of the answers belong in `parallel_rl.experience`, when to ask a server in the trainer.
"""
