# The environment of a job: read by train.sbatch on the first node, inherited by every rank. A name holds what slurm/site.conf
# gives it, else what was set at sbatch (NPROC_PER_NODE=4 sbatch ...), else the value below.
# shellcheck shell=bash disable=SC2034,SC2154

site=${SITE_CONF:-$JOB_FILES/site.conf}
[ -r "$site" ] || [ -z "${SITE_CONF:-}" ] || fail "SITE_CONF = $SITE_CONF is not there or cannot be read"
if [ -e "$site" ]; then
  set +euo pipefail # `module load` reads names that are not set, and stumbles over its own tests
  trap 'status=$? line=$LINENO; fail "$site, line $line: $(sed -n "${line}p" "$site") ended with status $status"' ERR
  # shellcheck source=slurm/site.conf
  source "$(realpath "$site")" # a bare name would be looked for in PATH
  trap - ERR
  set -euo pipefail
fi

unset SLURM_EXPORT_ENV # what `sbatch --export=NONE` leaves: srun would keep from the ranks all that is set here
# logs and markers: shared by all nodes, the same at each restart of a job
export PARALLEL_RL_JOB_DIR=${LOG_DIR:-$PWD/runs/slurm}/$SLURM_JOB_ID
[ -z "${CONTAINER_IMAGE:-}" ] || PYTHON=${PYTHON:-python} # the image's
export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
MAX_RESTARTS=${MAX_RESTARTS:-50} # its own and those by Slurm
NOTICE_SECONDS=${NOTICE_SECONDS:-600} # before the time limit: what --signal says, where it says another than the script
export GATE_SECONDS=${GATE_SECONDS:-300} # for what is left to do once the last rank is up

# rendezvous: two jobs that share a host do not meet, nor a job's start and what its last one has left behind there; below the ports
# that the system gives out by itself
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PARALLEL_RL_HOSTS="${hosts[*]}" # names for ranks that do not come up
[ "${MASTER_ADDR:-${hosts[0]}}" = "${hosts[0]}" ] || echo "parallel-rl: warning: the ranks meet at MASTER_ADDR = $MASTER_ADDR, which the\
 shell of sbatch or $site sets, and not at the first node, ${hosts[0]}; unset it unless you mean it"
export MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
export MASTER_PORT=${MASTER_PORT:-$((20000 + (SLURM_JOB_ID + 997 * ${SLURM_RESTART_COUNT:-0}) % 12000))}
gpus=${SLURM_GPUS_ON_NODE:-0}
export NPROC_PER_NODE=${NPROC_PER_NODE:-$gpus}
[[ $NPROC_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE = $NPROC_PER_NODE is not a number of ranks (a node has $gpus GPUs here):\
 NPROC_PER_NODE=N sbatch ..., or sbatch --gpus-per-node=N"
((gpus == 0 || NPROC_PER_NODE <= gpus)) || fail "NPROC_PER_NODE = $NPROC_PER_NODE: a node has $gpus GPUs here, and a rank needs one"

# servers on the nodes of a second component (with_server.sbatch): the shell command of one, which $HOST and $PORT are given to
export SERVER_COMMAND=${SERVER_COMMAND:-}
export SERVER_RESTARTS=${SERVER_RESTARTS:-3} # of a server that ends; then the job is queued again
SERVER_SECONDS=${SERVER_SECONDS:-1200} # for all of them to answer on /health, which they do once their model is loaded
SERVER_KEY=${SERVER_KEY:-rl.server.url} # the config's key that gets their addresses
[ -z "$SERVER_COMMAND" ] || [ "${SLURM_HET_SIZE:-1}" -eq 2 ] || fail "SERVER_COMMAND needs nodes for servers: sbatch slurm/with_server.sbatch"
[ -n "$SERVER_COMMAND" ] || [ "${SLURM_HET_SIZE:-1}" -eq 1 ] || fail "SERVER_COMMAND is empty, and there are nodes for servers:\
 SERVER_COMMAND='vllm serve FOLDER --port \$PORT' sbatch ..."

# one task a node has all its cores, or as many as the node with the fewest ("96(x2),64"); torchrun binds each rank to those near
# its GPU (node, socket, exclusive, core-complex)
CPUS=${SLURM_CPUS_PER_TASK:-$(tr , '\n' <<< "${SLURM_JOB_CPUS_PER_NODE:-$SLURM_CPUS_ON_NODE}" | sort -n | sed 's/(.*//; q')}
export NUMA_BINDING=${NUMA_BINDING-node}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS-1} # right for TP and CP; empty for FSDP2
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_NCCL_AVOID_RECORD_STREAMS=1
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} # collectives that a dump after a hang shows

# pyxis and enroot, where the site has an image: the repository is mounted where it is
CONTAINER=()
if [ -n "${CONTAINER_IMAGE:-}" ]; then
  CONTAINER=("--container-image=$CONTAINER_IMAGE" --no-container-mount-home "--container-workdir=$PWD"
    "--container-mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi
SERVER_CONTAINER=("${CONTAINER[@]}")
[ -z "${SERVER_CONTAINER_IMAGE:-}" ] || SERVER_CONTAINER=("--container-image=$SERVER_CONTAINER_IMAGE" --no-container-mount-home
  "--container-workdir=$PWD" "--container-mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
