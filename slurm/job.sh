# How train.sbatch runs its steps, stops and starts again.
# shellcheck shell=bash disable=SC2034,SC2154

again() { # $1: what the ranks left, and how it goes on
  [ "$restarts" -lt "$MAX_RESTARTS" ] || stop "$restarts restarts, MAX_RESTARTS = $MAX_RESTARTS; $1"
  [ -z "$short" ] || [ "${asked:-60}" -ge 60 ] || stop "$short; $1" # it would be asked at each start
  echo "it asked for it itself (${asked:+time limit or USR1: }${1%%;*})" > "$folder/AGAIN"
  scontrol requeue "$job" || stop "scontrol requeue failed; $1"
  became="queued again: ${1%%;*}"
  sleep 10 & wait $! || : # until Slurm, which now ends this start, has said so in the log
  exit 0
}
run() { # srun, in the background: bash runs no trap before a foreground command ends. A signal ends `wait`, not the step.
  srun "$@" &
  local step=$!
  while signal='' status=0; do
    wait "$step" || status=$?
    [ -n "$signal" ] || break
  done
}
show() { # copies the lines of rank 0 from its node's log as they come
  touch "$folder/node-0$log"
  tail -n +1 -s 0.5 -f "$folder/node-0$log" > >(sed -un 's/^0: \[default0\]://p') 2>/dev/null &
  shows=$!
}
shown() { # ends that, once the last lines are through
  sleep 1 || :
  kill "$shows" 2>/dev/null || :
}
too_soon() { # what to add where the time limit is nearer than Slurm's notice of it
  local end left
  end=${SLURM_JOB_END_TIME:-$(squeue -h -j "$job" -o %e | date -f - +%s 2>/dev/null)} || return 0 # no limit
  left=$((end - $(date +%s)))
  [ "$left" -ge "$((NOTICE_SECONDS + 60))" ] || echo "the time limit comes in $left s, and Slurm asks to stop $NOTICE_SECONDS s before" \
    "it, that is at once, unless another notice was given: sbatch --signal=B:USR1@$((left / 4)), or a longer --time"
}
restarted() { # why, as the first line of a restart; Slurm's own count too
  local why down
  why=$(cat "$folder/AGAIN" 2>/dev/null) || why="Slurm requeued it (a node failed, preemption, scontrol requeue)"
  down=$(sinfo -h -N -n "$(cat "$folder/HOSTS" 2>/dev/null)" -t down,drain,fail,no_respond -o '%N (%T)' | sort -u | paste -sd ' ') || :
  echo "restart $restarts of job $SLURM_JOB_ID: $why; of its last hosts down now: ${down:-none}"
  [ "$restarts" -le "$MAX_RESTARTS" ] || fail "$restarts restarts, MAX_RESTARTS = $MAX_RESTARTS; the last: $why"
}
