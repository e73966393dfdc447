# Why a job failed: choices among the lines of its logs.
# shellcheck shell=bash disable=SC2154

causes() { # $1: the folder of logs, $2: their ending. Lines that may say why, the likeliest first, those of ranks ended by others last
  {
    for node in "${!hosts[@]}"; do
      [ -e "$1/up/$node" ] || echo "parallel-rl: error: ${hosts[node]} (node $node) did not come up"
    done
    grep -hE 'parallel-rl: error|^[0-9]+: .*[A-Z][a-zA-Z]*Error: |^[0-9]+: .*rank [0-9]+ on .* (is MISSING|FAILED in)' "$1"/node-*"$2" || :
    grep -hE 'parallel-rl: error' "$1"/server-*"$2" || :
    grep -hE '^[0-9]+: .*[A-Z][a-zA-Z]*Error: ' "$1"/server-*"$2" | sed 's/^/server /' || :
  } 2>/dev/null | awk '
    function kind(text) {
      if (text ~ /SIGTERM/) return 7 # ended by others
      if (text ~ /^server /) return 6
      if (text ~ /the nodes did not meet|others wait in a collective|\): waited in |torchrun.s agent .* (is gone|does not answer)/) return 5
      if (text ~ /\/gloo\/|Dist[A-Za-z]*Error|NCCL|onnection (closed|reset) by peer/) return 5 # the peer is the cause
      if (text ~ / on .* (is MISSING|FAILED in)/) return 4
      if (text ~ /\(node [0-9]+\) did not come up$/) return 3
      if (text ~ /rank [0-9]+ (ended with exit code|was killed by)/) return summary(text)
      return text ~ /parallel-rl: error/ ? 0 : 1
    }
    function summary(text) { # of torchrun: says less than the rank itself
      match(text, /rank [0-9]+ (ended|was)/)
      split(substr(text, RSTART), word, " ")
      return word[2] in spoke ? 5 : 2
    }
    { line[NR] = $0 }
    match($0, /error \(rank [0-9]+/) { spoke[substr($0, RSTART + 12, RLENGTH - 12)] = 1 }
    END { for (likely = 0; likely < 8; likely++) for (i = 1; i <= NR; i++) if (kind(line[i]) == likely) print line[i] }'
}
status_of() { # $1: the cause, $2, $3: as above, $4: srun gives 143 where it ended other nodes. The status of the rank that failed
  local rank end
  rank=$(grep -oE '\(rank [0-9]+|rank [0-9]+ (on|ended|was)' <<< "$1" | head -n 1 | tr -cd 0-9) || rank=''
  end=$(grep -hoE "rank ${rank:-[0-9]+} (ended with exit code [0-9]+|was killed by SIG[A-Z0-9]+)" "$2"/node-*"$3" 2>/dev/null |
    grep -v SIGTERM | head -n 1) ||
    end=$(grep -hoE 'rank [0-9]+ (ended with exit code [0-9]+|was killed by SIG[A-Z0-9]+)' "$2"/node-*"$3" 2>/dev/null |
      grep -v SIGTERM | head -n 1) || end=''
  case $end in
    *code*) echo "${end##* }" ;;
    *SIG*) echo "$((128 + $(kill -l "${end##*SIG}")))" ;;
    *) echo "$(($4 == 143 ? 1 : $4))" ;;
  esac
}
cause_of_check() { # $1: its log. Our message or the exception before what srun says of the exit status
  awk -v log_file="$1" '
    /parallel-rl: error/ { if (!ours) ours = $0; next }
    /^[A-Za-z_.]*(Error|Exception): / { raised = $0; next }
    /^srun: error: .*Exited with exit code/ { exited = $0; next }
    /^(srun|slurmstepd): (error|fatal|unrecognized|invalid|unknown)/ { if (!slurm) slurm = $0; next }
    /[^ ]/ && !/^(srun|slurmstepd|pyxis|Try) ?/ { last = $0 }
    END {
      if (slurm ~ /container-/) slurm = slurm " (CONTAINER_IMAGE needs the pyxis plugin of Slurm)"
      cause = ours ? ours : raised ? raised : slurm ? slurm : last ? last : exited
      print cause ? cause : "it printed nothing; see " log_file
    }' "$1"
}
