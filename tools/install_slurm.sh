#!/usr/bin/env bash
# Slurm and munge from Debian's packages, for the private cluster of tests/slurm (called by `make test-slurm`).
set -euo pipefail
# shellcheck source=tools/apt.sh
source "$(dirname "$0")/apt.sh"

PATH=$PATH:/usr/sbin:/sbin
for program in slurmctld slurmd munged sbatch; do
  command -v "$program" >/dev/null && continue
  apt_install slurmctld slurmd slurm-client munge
  break
done
