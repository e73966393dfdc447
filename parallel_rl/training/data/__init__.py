"""Records of a run: prompts, demonstrations, pairs and recorded rollouts, parsed and checked.

records/ reads files of any size and knows no kind of record; algorithms/ uses the records in steps.
"""
