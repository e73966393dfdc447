"""The life of a process on a cluster: submission to Slurm, preemption, hangs, heartbeats and exit codes."""
