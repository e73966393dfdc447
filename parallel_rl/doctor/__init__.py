"""Checks of the installed stack before a run: packages, megatron-core's contracts, the job's ranks and groups."""
