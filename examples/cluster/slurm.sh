#!/usr/bin/env bash
# Submit it where the repository is, with the options of examples/mnist.py:
#
#   FOLDER=/shared/runs/mnist sbatch examples/cluster/slurm.sh --epochs 5
#
# One task is one torchrun, which starts a process for each GPU of its node.
#SBATCH --job-name=mnist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
# B: to this script alone, two minutes before the time is over. It passes the signal on, and so knows of it.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

told=
trap 'told=yes; kill -USR1 "$step"' USR1

# --cpus-per-task again: srun takes it from no #SBATCH line. --wait: no node waits longer for what another has lost.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --wait=60 \
    torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node auto \
    --rdzv-backend c10d \
    --rdzv-endpoint "${nodes[0]}:${PORT:-29400}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-conf read_timeout=600 \
    --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    examples/mnist.py --resume "${FOLDER:-runs/slurm}" "$@" &
step=$!

status=0
wait "$step" || status=$?
if [[ -n $told ]]; then # which has cut the waiting short
    status=0
    wait "$step" || status=$?
fi

# torchrun ends with 0 when the run is finished, with 1 after a signal, and with 1 after an error: that one is not for a retry.
if [[ -n $told && $status != 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
