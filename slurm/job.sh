# How train.sbatch runs its steps, stops and starts again.
# shellcheck shell=bash disable=SC2034,SC2154

again() { # $1: what the ranks left, and how it goes on
  [ "$restarts" -lt "$MAX_RESTARTS" ] || stop "$restarts restarts, MAX_RESTARTS = $MAX_RESTARTS; $1"
  [ -z "$short" ] || [ "${asked:-60}" -ge 60 ] || stop "$short; $1" # it would be asked at each start
  echo "it asked for it itself (${asked:+time limit or USR1: }${1%%;*})" > "$folder/AGAIN"
  (trap '' TERM && exec scontrol requeue "$job") || stop "scontrol requeue failed; $1" # Slurm's TERM may come before its answer
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
nothing() { # where the run had all its steps before, says so
  local line
  line=$(grep -m 1 -o 'nothing is left to do: .*' "$folder/node-0$log" 2>/dev/null) || return 0
  echo ": $line"
}
too_soon() { # what to add where the time limit is nearer than Slurm's notice of it
  local end left
  end=${SLURM_JOB_END_TIME:-$(squeue -h -j "$job" -o %e | head -n 1 | date -f - +%s 2>/dev/null)} || return 0 # no limit
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
serve() { # starts the servers, and learns their addresses; where they all end before the ranks do, the ranks stop
  local all=$SLURM_JOB_NUM_NODES_HET_GROUP_1
  rm -rf "$folder/servers"
  mkdir "$folder/servers"
  srun --het-group=1 --nodes="$all" --ntasks-per-node=1 --kill-on-bad-exit=1 --label --open-mode=append \
    --output="$folder/server-%n$log" "${SERVER_CONTAINER[@]}" bash "$JOB_FILES/server.sh" &
  serving=$!
  (trap '' USR1 && while kill -0 "$serving"; do sleep 1; done && touch "$folder/STOP") 2>/dev/null &
  until mapfile -t urls < <(cat "$folder"/servers/*.url 2>/dev/null) && [ "${#urls[@]}" -eq "$all" ]; do
    served || fail "$(gone)"
    [ -z "$asked$ended" ] || return 0
    sleep 0.2
  done
  export PARALLEL_RL_SERVERS="${urls[*]}"
}
served() { kill -0 "$serving" 2>/dev/null; }
answering() { # waits until each server is well
  local url from=$SECONDS told=$SECONDS
  for url in "${urls[@]}"; do
    until well "$url"; do
      [ -z "$asked$ended" ] || return 0
      served || fail "$(gone)"
      [ "$((SECONDS - from))" -lt "$SERVER_SECONDS" ] || fail "the server $url did not answer in $SERVER_SECONDS s: see $folder/server-*$log"
      [ "$((SECONDS - told))" -lt 60 ] || { told=$SECONDS; echo "waiting for the server $url: $((from + SERVER_SECONDS - SECONDS)) s left"; }
      sleep 0.5
    done
  done
  echo "servers: ${urls[*]}"
}
well() { # whether a server answers on /health
  local address=${1#http://}
  # shellcheck disable=SC2016 # they expand in there
  timeout 10 bash -c 'exec 3<> "/dev/tcp/$1/$2" && printf "GET /health HTTP/1.0\r\n\r\n" >&3 && read -r line <&3 && [[ $line = *" 200"* ]]' \
    bash "${address%:*}" "${address#*:}" 2>/dev/null
}
gone() { # which server ended for good
  local line
  line=$(grep -oh 'the server http://.*after .* restarts' "$folder"/server-*"$log" | sort | head -n 1) || :
  echo "${line:-the servers ended: see $folder/server-*$log}"
}
unserve() { # ends the servers; what takes longer than half a minute is killed
  local from=$SECONDS
  touch "$folder/servers/END"
  while served && [ "$((SECONDS - from))" -lt 30 ]; do sleep 0.5; done
  kill "$serving" 2>/dev/null || :
  wait "$serving" || :
}
