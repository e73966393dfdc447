"""The records that a run reads: prompts, demonstrations, pairs, recorded rollouts, parsed and checked.

records/ reads files of any size and knows no kind of record; what a step makes of records is algorithms/'s.
"""
