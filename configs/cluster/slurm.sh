#!/bin/bash
# Training on several SLURM nodes: sbatch configs/cluster/slurm.sh configs/my_run.yaml [key=value ...]
# One process a node, each with all of the node's GPUs. Lines to adapt are marked with <-.

#SBATCH --job-name=dsjax
#SBATCH --nodes=2                    # <-
#SBATCH --ntasks-per-node=1          # one process a node; or as many as GPUs: each takes its share
#SBATCH --gpus-per-node=8            # <-
#SBATCH --cpus-per-task=32           # <-
#SBATCH --exclusive
#SBATCH --time=24:00:00              # <-
#SBATCH --signal=TERM@120            # SIGTERM to the steps 120 s before the time is up: the run saves and ends with 75
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -u
source .venv/bin/activate            # <- an environment that every node sees
export NCCL_DEBUG=WARN

# --wait: when one process fails the others are ended a minute later, not left waiting for it; those that save
# (exit 75) have that minute too, which --kill-on-bad-exit=1 would not give them.
srun --wait=60 --kill-on-bad-exit=0 dsjax train "$@"
code=$?

# 75: stopped after saving. The same job, queued again, goes on from there.
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
