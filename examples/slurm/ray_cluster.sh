# Sourced by the job scripts beside this file: a private Ray cluster inside the job, and the training command on it.
#
#   start_ray ROLE [srun option ...] NODE ...   one Slurm step on each node; the first node of the first call is the head
#   run_driver RECIPE [key=value ...]           trains while all steps run; returns the driver's exit code
#   requeue_if_warned EXIT_CODE                 puts the job into the queue again where it stopped for its time limit
#
# What the environment may set: UNIRL_ROOT (the checkout), UNIRL_PYTHON (its Python), UNIRL_JOBS (where the folder of each
# job goes; every node must see it), UNIRL_RAY_OPTIONS (more options of `ray start`), UNIRL_NET_INTERFACE (the network
# interface of the cluster), UNIRL_START_SECONDS and UNIRL_STOP_SECONDS (the longest start of Ray, the longest save).

set -euo pipefail

INTERRUPTED=130 # the driver's exit code after it was asked to stop and has saved

declare -A node_of=() # process id of a step's srun -> its node
address='' # of Ray's head, HOST:PORT
driver=''  # process id of the training command
asked=''   # why the driver was asked to stop: warning, termination or failure

say() { printf '%(%F %T)T %s\n' -1 "$*"; }

fail() {
  say "error: $*" >&2
  exit 1
}

(($# > 0)) || fail "no recipe given: sbatch [options] TEMPLATE RECIPE [key=value ...]" # arguments of the job script

job_nodes() { # job_nodes [GROUP]: the node names of the job, or of one component of a heterogeneous job, in order
  local list=SLURM_JOB_NODELIST${1:+_HET_GROUP_$1}
  scontrol show hostnames "${!list}"
}

start_ray() {
  local role=$1 options=() node
  shift
  while [[ ${1:-} == --* ]]; do
    options+=("$1")
    shift
  done
  for node in "$@"; do
    if [[ -n $address ]]; then
      start_node "$node" worker "$role" "${options[@]}"
    else
      prepare_job
      start_node "$node" head "$role" "${options[@]}"
      wait_for_head "$node"
    fi
  done
}

prepare_job() {
  local python=${UNIRL_PYTHON:-$UNIRL_ROOT/.venv/bin/python}
  [[ -x $python ]] || fail "no Python at $python: run 'make venv' in $UNIRL_ROOT, or export UNIRL_PYTHON=/path/to/python"
  # The processes that Ray starts on the other nodes inherit this environment, and so run the code of this checkout.
  export PATH=${python%/*}:$PATH UNIRL_ROOT
  [[ ! -d $UNIRL_ROOT/unirl ]] || export PYTHONPATH=$UNIRL_ROOT${PYTHONPATH:+:$PYTHONPATH}
  export UNIRL_JOB_DIR=${UNIRL_JOBS:-$SLURM_SUBMIT_DIR/runs/slurm}/$SLURM_JOB_ID
  mkdir -p "$UNIRL_JOB_DIR"
  chmod 700 "$UNIRL_JOB_DIR"
  rm -f "$UNIRL_JOB_DIR"/{address,token}
  # Who can reach Ray's ports could run any code as this user: only this job's processes know the token.
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$UNIRL_JOB_DIR/token RAY_USAGE_STATS_ENABLED=0
  (umask 077 && od -An -vtx1 -N32 /dev/urandom | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")
  trap stop_ray EXIT
  trap 'ask_driver warning' USR1 # from #SBATCH --signal=B:USR1@SECONDS
  trap 'asked=termination' TERM  # scancel or preemption: Slurm sends it to the driver and to Ray as well
  say "job $SLURM_JOB_ID: logs of its nodes are in $UNIRL_JOB_DIR"
}

start_node() { # start_node NODE head|worker ROLE [srun option ...]
  srun --nodes=1 --ntasks=1 --nodelist="$1" "${@:4}" --overlap --cpu-bind=none --input=none \
    --output="$UNIRL_JOB_DIR/$1.log" --open-mode=append \
    bash "$UNIRL_ROOT/examples/slurm/ray_node.sh" "$2" "$3" "$address" &
  node_of[$!]=$1
}

wait_for_head() {
  local seconds=${UNIRL_START_SECONDS:-180}
  local deadline=$((SECONDS + seconds))
  until [[ -s $UNIRL_JOB_DIR/address ]] && answers "$(< "$UNIRL_JOB_DIR/address")"; do
    check_nodes || exit 1
    ((SECONDS < deadline)) || fail "Ray's head on $1 did not answer within $seconds s; its log: $UNIRL_JOB_DIR/$1.log"
    sleep 0.5
  done
  address=$(< "$UNIRL_JOB_DIR/address")
  say "Ray's head is $address on $1"
}

answers() { (exec 3<> "/dev/tcp/${1%:*}/${1##*:}") 2> /dev/null; }

run_driver() {
  local gpus=${SLURM_GPUS_ON_NODE:-0} status=0
  ((gpus > 0)) || fail "SLURM_GPUS_ON_NODE is not set: ask for GPUs with sbatch --gpus-per-node=N"
  [[ -z $asked ]] || return $INTERRUPTED
  python -m unirl.train_ar --config-name="$1" num_devices=$((gpus * ${#node_of[@]})) devices_per_node="$gpus" \
    cluster.mode=ray cluster.address="$address" "${@:2}" &
  driver=$!
  while is_running "$driver"; do
    wait -n || true # until the driver or a step ends, or a signal comes
    if [[ $asked == termination ]]; then
      end_process "$driver" ''
    elif ! check_nodes && is_running "$driver"; then
      ask_driver failure
      end_process "$driver" ''
      return 1
    fi
  done
  wait "$driver" || status=$?
  say "the driver ended with exit code $status"
  return $status
}

ask_driver() { # once: a second SIGTERM would stop it without saving
  say "the driver is asked to save and stop ($1)"
  [[ -n $asked || -z $driver ]] || kill -TERM "$driver" 2> /dev/null || true
  asked=$1
}

is_running() { kill -0 "$1" 2> /dev/null; }

check_nodes() { # whether the steps of all nodes run; says which does not
  local step status
  for step in "${!node_of[@]}"; do
    if ! is_running "$step"; then
      status=0
      wait "$step" || status=$?
      say "error: Ray on ${node_of[$step]} ended with exit code $status; its log: $UNIRL_JOB_DIR/${node_of[$step]}.log" >&2
      return 1
    fi
  done
}

end_process() { # end_process PID SIGNAL: sends the signal, if one is given; SIGKILL where it has not helped in time
  local deadline=$((SECONDS + ${UNIRL_STOP_SECONDS:-120}))
  [[ -z $2 ]] || kill "-$2" "$1" 2> /dev/null || true
  while is_running "$1" && ((SECONDS < deadline)); do
    sleep 0.2
  done
  ! is_running "$1" || kill -KILL "$1" || true
}

stop_ray() { # at the end of the script, however it ends
  trap '' TERM USR1
  [[ -z $driver ]] || end_process "$driver" TERM
  # SIGTERM to all steps; srun itself would answer a SIGTERM with SIGKILL to its step.
  ((${#node_of[@]} == 0)) || scancel --quiet --signal=TERM "$SLURM_JOB_ID" || true
  local step
  for step in "${!node_of[@]}"; do
    end_process "$step" ''
  done
  node_of=() driver=''
  rm -f "$UNIRL_JOB_DIR"/{address,token}
}

requeue_if_warned() {
  # Above 128 it ended by the signal: 130 after it has saved, others before it had begun to train.
  [[ $asked == warning ]] && (($1 > 128)) || exit "$1"
  stop_ray
  say "the job goes back into the queue and will resume"
  scontrol requeue "$SLURM_JOB_ID"
  exit "$1"
}
