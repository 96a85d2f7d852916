#!/usr/bin/env bash
# Turns what this node has into a torchrun command, and becomes it.
set -euo pipefail

usage() {
  cat <<'END'
usage: launch.sh [--nproc N] [--nnodes N --head HOST[:PORT]] [--wait SECONDS] RECIPE [recipe options]
       launch.sh --setup-only

Runs RECIPE under torchrun: one process per visible GPU, or 2 on a CPU; a single
process if the recipe drives all devices itself. The first run installs
requirements.txt into .venv beside this script, unless the python3 on PATH
(a virtual environment, conda, a module) has torch: that one is used as it is.

  --nproc N           processes on this node
  --nnodes N          nodes; give the same command on each of them, in any order
  --head HOST[:PORT]  the node that the others meet at (port 29400 or the next free one)
  --wait SECONDS      how long nodes wait for each other before they give up (300)
  --setup-only        install, and run nothing
  -h, --help          this text; for a recipe's own: launch.sh RECIPE --help

Inside a Slurm step (srun launch.sh ..., once per node) nodes and meeting place
come from Slurm. OMP_NUM_THREADS is cores / processes unless you set it. Other
torchrun options go into its variables: PET_MAX_RESTARTS=3 ./launch.sh ...
END
}

say() { printf 'launch.sh: %s\n' "$*" >&2; }
refuse() {
  say "$*"
  exit 2
}

# torchrun's agent would die of the SIGUSR1 by which Slurm announces a time limit, and leave its
# workers behind. What is ignored here stays ignored in it; the workers install their own handler.
trap '' USR1

root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

# ---- options -------------------------------------------------------------------------------
nproc='' nnodes='' head='' wait=300 setup_only=''
while [[ ${1-} == -* ]]; do
  if [[ $1 == --*=* ]]; then set -- "${1%%=*}" "${1#*=}" "${@:2}"; fi
  case $1 in
    -h | --help) usage && exit ;;
    --setup-only) setup_only=yes ;;
    --nproc | --nnodes | --head | --wait)
      [[ -n ${2-} ]] || refuse "$1 needs a value"
      [[ $1 == --head || $2 =~ ^[1-9][0-9]{0,5}$ ]] || refuse "$1 takes a positive number, not '$2'"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    *) refuse "unknown option $1; options of the recipe go after its name (launch.sh -h explains)" ;;
  esac
  shift
done

if [[ -z $setup_only ]]; then
  [[ $# -gt 0 ]] || refuse "which recipe? For example: launch.sh recipes/ddp_resnet.py (launch.sh -h explains)"
  recipe=$1
  shift
  [[ -f $recipe ]] || refuse "no such recipe: $recipe"

  in_step='' # srun sets SLURM_STEP_NODELIST; a batch script or an salloc shell has none
  if [[ -n ${SLURM_STEP_NODELIST-} && -z $nnodes ]]; then
    in_step=yes
    nnodes=${SLURM_STEP_NUM_NODES:-1}
  fi
  nnodes=${nnodes:-1}
  if [[ ${SLURM_JOB_NUM_NODES:-1} -gt $nnodes ]]; then
    say "note: this uses $nnodes of the job's $SLURM_JOB_NUM_NODES nodes; srun --ntasks-per-node=1 $0 uses all"
  fi
  [[ $nnodes -eq 1 || -n $in_step || -n $head ]] || refuse "--nnodes $nnodes needs --head HOST, the node to meet at"
  [[ $nnodes -gt 1 || -z $head ]] || refuse "--head needs --nnodes, how many nodes there are"

  if head -n 40 -- "$recipe" | grep -q '^# Processes: one drives all devices\.'; then
    [[ $nnodes -eq 1 ]] || refuse "$recipe drives the devices of one node from one process; it cannot use $nnodes nodes"
    [[ ${nproc:-1} -eq 1 ]] || refuse "$recipe drives all devices from one process; leave --nproc out"
    nproc=1
  fi
fi

# ---- environment ---------------------------------------------------------------------------
venv=$root/.venv
requirements=$root/requirements.txt
# What was installed is a copy of the requirements, written last. The lock file holds a word while
# pip is at work, so that an environment that an interrupted set-up left is known and made anew.
lock=$root/.venv.lock
installed() { [[ ! -s $lock ]] && cmp -s -- "$requirements" "$venv/requirements.txt"; }

has_torch() {
  "$1" - "$requirements" <<'END' 2>/dev/null
import re, sys
from importlib import metadata, util
if util.find_spec("torch") is None:
    sys.exit(1)
for name, least in re.findall(r"^([\w-]+)(?:>=([\d.]+))?", open(sys.argv[1]).read(), re.M):
    number = lambda version: [int(n) for n in re.findall(r"\d+", version)[:2]]
    try:
        found = metadata.version(name)
        if number(found) < number(least):
            print(f"{name} {found} (>= {least} is asked for)")
    except metadata.PackageNotFoundError:
        print(f"no {name}")
END
}

install() {
  if command -v flock >/dev/null; then flock 9; fi
  if installed; then return; fi # another process did it while this one waited
  say "installing requirements.txt into $venv (once; torch is large)"
  if [[ -s $lock ]]; then rm -rf -- "$venv"; fi
  echo installing >"$lock"
  rm -f -- "$venv/requirements.txt"
  if command -v uv >/dev/null; then
    [[ -x $venv/bin/python ]] || uv venv --quiet "$venv"
    uv pip install --quiet --python "$venv/bin/python" -r "$requirements"
  else
    [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
  fi
  cp -- "$requirements" "$venv/requirements.txt"
  : >"$lock"
}

active=$(type -p python3 || true)
if [[ -n $active && $(dirname -- "$active") -ef $venv/bin ]]; then active=''; fi
if [[ -n $active ]] && shortfalls=$(has_torch "$active"); then
  python=$active
  if [[ -n $shortfalls ]]; then say "note: $active has ${shortfalls//$'\n'/, }"; fi
else
  python=$venv/bin/python
  if installed; then
    :
  elif [[ -w $root ]]; then
    exec 9>>"$lock"
    trap 'say "set-up failed (see above); the next run begins it anew"; exit 1' EXIT
    install
    trap - EXIT
    exec 9>&-
  elif [[ ! -x $python ]]; then
    refuse "$root is read-only and has no .venv: activate an environment that has torch"
  fi
fi
if [[ -n $setup_only ]]; then
  say "ready: $python"
  exit
fi

# ---- devices -------------------------------------------------------------------------------
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU ' || true)
# Slurm sets this to what the job got of the node; nodes of one job may differ.
if [[ -v CUDA_VISIBLE_DEVICES ]]; then
  case $CUDA_VISIBLE_DEVICES in
    '' | -1 | NoDevFiles) visible=0 ;;
    *) visible=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l) ;;
  esac
  if [[ $visible -lt $gpus ]] || ! command -v nvidia-smi >/dev/null; then gpus=$visible; fi
fi
# nproc(1) would answer with OMP_NUM_THREADS where that is set.
cores=${SLURM_CPUS_ON_NODE:-$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)}
if [[ -z $nproc ]]; then
  if [[ $gpus -gt 0 ]]; then
    nproc=$gpus
  else
    nproc=$((cores > 1 ? 2 : 1))
  fi
fi
threads=$((cores / nproc))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# ---- rendezvous ----------------------------------------------------------------------------
options=(--nnodes="$nnodes" --nproc-per-node="$nproc" --rdzv-backend=c10d)
if [[ $nnodes -eq 1 ]]; then
  # Port 0: the system picks a free one, so two jobs on one machine cannot meet by mistake.
  id=${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)-$$}
  options+=(--rdzv-endpoint=localhost:0 --rdzv-id="$id" --local-addr=127.0.0.1)
  address=127.0.0.1 interface=lo
else
  if [[ -n $in_step ]]; then
    # The id is new at every requeue: processes of the former start must not be taken for ours.
    id=$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}
    nodes=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | paste -sd,)
    head=${nodes%%,*}
    if ! getent hosts "$head" >/dev/null; then
      head=$(scontrol --oneliner show node "$head" | grep -o ' NodeAddr=[^ ]*')
      head=${head#*=}
    fi
    # Each job has 16 ports of its own, below those that the system hands out.
    port=$((20000 + 16 * ((SLURM_JOB_ID + SLURM_STEP_ID) % 750)))
    who=(--node "$SLURMD_NODENAME" --nodes "$nodes" --index "$SLURM_NODEID")
  else
    id=$head
    port=29400
    if [[ $head =~ ^(.*[^:]):([0-9]+)$ ]]; then head=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}; fi
    who=(--node "$(uname -n)")
  fi
  found=$("$python" "$root/slurm/rollcall.py" --job "$id" --nnodes "$nnodes" --head "$head" --port "$port" \
    --wait "$wait" "${who[@]}") || exit
  read -r is_host endpoint id address interface <<<"$found"
  options+=(--rdzv-endpoint="$endpoint" --rdzv-id="$id" --local-addr="$address"
    --rdzv-conf="is_host=$is_host,join_timeout=$wait,read_timeout=$wait")
fi
# torchrun 2.14 keeps its store over a restart, with the addresses of dead workers: make a new one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# gloo would look its address up by host name, which Debian maps to 127.0.1.1 on every node.
if [[ -e /sys/class/net/$interface ]]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}; fi

if [[ -n $in_step ]]; then
  # Slurm kills KillWait seconds after SIGTERM: the agent, which waits for its workers' save, goes first.
  kill_wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\) sec.*/\1/p')
  options+=(--shutdown-timeout=$((kill_wait > 4 ? kill_wait - 2 : 2)))
fi

# Where another node falls silent, torchrun waits for an answer of its store without end, long after
# its workers gave up. This ends it: no workers any more, for longer than any wait of its own.
end_when_stuck() {
  local torchrun=$$ me=$BASHPID had_workers='' alone=0 workers
  while sleep 1 && kill -0 "$torchrun" 2>/dev/null; do
    # A worker that ended is a zombie until torchrun looks at it, which it does not when it is stuck.
    workers=$(ps -o pid=,stat= --ppid "$torchrun" | awk -v me="$me" '$1 != me && $2 !~ /^Z/')
    if [[ -n $workers ]]; then
      had_workers=yes alone=0
    elif [[ -n $had_workers && $((alone += 1)) -gt $((wait + 10)) ]]; then
      say "torchrun has no workers any more and hears nothing from the other nodes: ending it"
      kill -KILL "$torchrun"
    fi
  done
}
if [[ $nnodes -gt 1 ]] && command -v ps >/dev/null; then end_when_stuck & fi

torchrun=("$(dirname -- "$python")/torchrun")
[[ -x ${torchrun[0]} ]] || torchrun=("$python" -m torch.distributed.run)
printf 'launch.sh: OMP_NUM_THREADS=%s' "$OMP_NUM_THREADS" >&2
printf ' %q' ${GLOO_SOCKET_IFNAME:+"GLOO_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME"} \
  "${torchrun[@]}" "${options[@]}" "$recipe" "$@" >&2
echo >&2
exec "${torchrun[@]}" "${options[@]}" "$recipe" "$@"
