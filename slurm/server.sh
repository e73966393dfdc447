#!/bin/bash
# The server of one node: it has an address of its own, is started again where it ends, and ends with the job.
set -uo pipefail
set -m # a group of processes for each start: what a server leaves behind ends with it
unset MASTER_ADDR MASTER_PORT # the trainer's

export HOST=$SLURMD_NODENAME
PORT=$((32000 + (SLURM_JOB_ID * 31 + ${SLURM_RESTART_COUNT:-0} * 97 + SLURM_NODEID) % 768)) # below what the system gives out
while (exec 3<> "/dev/tcp/$HOST/$PORT") 2>/dev/null; do PORT=$((32000 + (PORT + 1) % 768)); done
export PORT
url=http://$HOST:$PORT
echo "$url" > "$PARALLEL_RL_JOB_DIR/servers/.$SLURM_NODEID"
mv "$PARALLEL_RL_JOB_DIR/servers/.$SLURM_NODEID" "$PARALLEL_RL_JOB_DIR/servers/$SLURM_NODEID.url"

ended='' server=''
trap 'ended=1; kill -- "-$server" 2>/dev/null' TERM
(until [ -e "$PARALLEL_RL_JOB_DIR/servers/END" ]; do sleep 1; done && kill "$$") &
looks=$!
trap 'kill -- "-$looks" 2>/dev/null' EXIT
for ((restart = 0; ; restart++)); do
  bash -c "$SERVER_COMMAND" &
  server=$!
  while signal=$ended status=0; do
    wait "$server" || status=$?
    [ "$signal" != "$ended" ] || break
  done
  kill -9 -- "-$server" 2>/dev/null
  [ -z "$ended" ] || exit 0
  [ "$restart" -lt "$SERVER_RESTARTS" ] || break
  echo "parallel-rl: the server $url ended with status $status; it is started again ($((restart + 1)) of $SERVER_RESTARTS times)"
  sleep $((restart * 5))
done
echo "parallel-rl: error: the server $url ended with status $status, after $SERVER_RESTARTS restarts"
exit 1
