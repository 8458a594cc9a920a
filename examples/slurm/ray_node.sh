#!/usr/bin/env bash
# One node of a job's Ray cluster; runs until it is told to stop, and leaves nothing behind.
#
#   ray_node.sh head ROLE              writes its address, HOST:PORT, to $UNIRL_JOB_DIR/address
#   ray_node.sh worker ROLE HOST:PORT  joins the head
#
# The node gets the Ray label unirl-role=ROLE: train, rollout or all.

set -euo pipefail

FIRST_PORT=10000 BLOCK=200 BLOCKS=110 # below 32768, where Linux takes the ports of outgoing connections from

JOB=${SLURM_JOB_ID:-$PPID}
say() { printf '%(%F %T)T %s\n' -1 "$*"; }

fail() {
  say "error: $*" >&2
  exit 1
}

node_address() { # the IPv4 address that other nodes reach this one by
  local host=127.0.0.1
  if [[ -n ${UNIRL_NET_INTERFACE:-} ]]; then
    host=$(ip -4 -o addr show dev "$UNIRL_NET_INTERFACE" | sed -nE '1s|.* inet ([0-9.]+).*|\1|p')
  elif [[ -n ${SLURMD_NODENAME:-} ]]; then
    host=$(scontrol show node -o "$SLURMD_NODENAME" | grep -o ' NodeAddr=[^ ]*')
    host=$(getent ahostsv4 "${host#*=}" | sed -n '1s/ .*//p')
  fi
  [[ -n $host ]] || fail "no IPv4 address of this node found; name its network interface in UNIRL_NET_INTERFACE"
  echo "$host"
}

# Ports of a block are this node's alone: its first block is derived from the job id, and a block that another job (or,
# where several nodes are one machine, another node) holds or listens in is passed over. The lock ends with this script.
claim_ports() {
  local try lock lock_fd busy
  busy=$(listening_ports)
  for ((try = 0; try < BLOCKS; try++)); do
    port=$((FIRST_PORT + (JOB + try) % BLOCKS * BLOCK))
    lock=/tmp/unirl-ports-$port.lock
    (umask 022 && : >> "$lock") 2> /dev/null || true # another user's file is locked just as well
    [[ -r $lock ]] || continue
    exec {lock_fd}< "$lock"
    if flock --nonblock "$lock_fd" && block_is_free "$busy"; then
      return
    fi
    exec {lock_fd}<&-
  done
  fail "no free block of $BLOCK ports between $FIRST_PORT and $((FIRST_PORT + BLOCKS * BLOCK)) on $HOSTNAME"
}

listening_ports() {
  local local_address state _
  while read -r _ local_address _ state _; do
    [[ $state != 0A ]] || echo $((16#${local_address##*:}))
  done < <(cat /proc/net/tcp /proc/net/tcp6 2> /dev/null)
}

block_is_free() {
  local busy
  for busy in $1; do
    ((busy < port || busy >= port + BLOCK)) || return 1
  done
}

processes_of_ray() { # whatever has a file of this node's Ray open: its own processes, and what they have started
  { find /proc/[0-9]*/fd -lname "$folder/*" 2> /dev/null || true; } | cut -d/ -f3 | sort -u # processes come and go
}

end_processes() {
  local signal pids
  for signal in TERM KILL KILL; do
    pids=$(processes_of_ray)
    [[ -n $pids ]] || return 0
    kill "-$signal" $pids 2> /dev/null || true
    sleep 1
  done
  pids=$(processes_of_ray)
  [[ -z $pids ]] || fail "processes of Ray are left on $HOSTNAME: $(echo $pids)"
}

mode=$1 role=$2 head=${3:-}
host=$(node_address)
claim_ports
folder=$(mktemp -d "/tmp/unirl-$JOB-XXXXXX") # short: it holds sockets, whose paths may have 107 characters

options=(
  --node-ip-address="$host" --temp-dir="$folder" --labels="unirl-role=$role"
  --num-gpus="${SLURM_GPUS_ON_NODE:-${UNIRL_GPUS:-0}}" --num-cpus="${SLURM_CPUS_ON_NODE:-$(nproc)}"
  --node-manager-port=$((port + 1)) --object-manager-port=$((port + 2)) --runtime-env-agent-port=$((port + 3))
  --dashboard-agent-listen-port=$((port + 4)) --dashboard-agent-grpc-port=$((port + 5))
  --metrics-export-port=$((port + 6)) --min-worker-port=$((port + 20)) --max-worker-port=$((port + BLOCK - 1))
)
if [[ $mode == head ]]; then
  options+=(
    --head --port="$port" --ray-client-server-port=$((port + 7)) --dashboard-port=$((port + 8))
    --dashboard-host=127.0.0.1 --include-dashboard=false
  )
  echo "$host:$port" > "$UNIRL_JOB_DIR/address"
else
  options+=(--address="$head")
fi

say "Ray $mode of job $JOB on ${SLURMD_NODENAME:-$HOSTNAME} ($host, ports $port to $((port + BLOCK - 1)), $folder)"
# By then the driver has ended: nobody has anything left to hand over, which Ray would wait for.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
ray start --block --disable-usage-stats "${options[@]}" ${UNIRL_RAY_OPTIONS:-} &
ray=$!
told=''
trap 'told=1; kill -TERM "$ray" 2> /dev/null || true' TERM INT HUP
status=0
while kill -0 "$ray" 2> /dev/null; do
  wait "$ray" || status=$?
done
end_processes
rm -rf "$folder"
[[ -z $told ]] || status=0
say "Ray ended${told:+ as it was told to} with exit code $status"
exit "$status"
