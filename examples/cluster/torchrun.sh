#!/usr/bin/env bash
# One node's part of a run over several: give the same command on each of them.
#
#   NODES=2 HOST=node0 FOLDER=/shared/runs/mnist bash examples/cluster/torchrun.sh --epochs 5
#
#   NODES      how many nodes; 1:2 starts with one or two, and goes on with one when the other dies (default: 1)
#   HOST       where the nodes meet: the name or address of one of them, as the others reach it
#   PORT       a port that is free there (default: 29400)
#   PROCESSES  processes on this node (default: auto, which is one for each GPU, or for each core where there is none)
#   CONF       more for --rdzv-conf, such as last_call_timeout=5
#   FOLDER     logs and checkpoints, on storage that every node sees (default: runs/cluster)
#   SCRIPT     what runs; it must take --resume FOLDER (default: examples/mnist.py)
set -euo pipefail

NODES=${NODES:-1}
if [[ $NODES == 1 ]]; then
    HOST=${HOST:-127.0.0.1}
fi
: "${HOST:?name the node where all of them meet}"
FOLDER=${FOLDER:-runs/cluster}
SCRIPT=${SCRIPT:-$(dirname "${BASH_SOURCE[0]}")/../mnist.py}

conf=read_timeout=600${CONF:+,$CONF} # seconds that HOST may come later than the others
if [[ ${HOST%%.*} == "${HOSTNAME%%.*}" ]]; then
    conf+=,is_host=1 # torchrun would look that up, which can fail while a name is new
fi

# Without it a node that comes later, or comes back, makes all of them wait for ever (seen with torch 2.14.1 and any script).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# exec: a signal to this script is one to torchrun, which passes it on to its processes
exec torchrun \
    --nnodes "$NODES" \
    --nproc-per-node "${PROCESSES:-auto}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HOST:${PORT:-29400}" \
    --rdzv-id "$(basename "$FOLDER")" \
    --rdzv-conf "$conf" \
    --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "$SCRIPT" --resume "$FOLDER" "$@"
