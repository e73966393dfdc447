"""Questions to the installed stack before a GPU hour is spent: packages, Megatron's contracts, the job's ranks and groups."""
