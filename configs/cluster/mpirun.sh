#!/bin/bash
# Training on several hosts with Open MPI: configs/cluster/mpirun.sh HOSTS CONFIG [key=value ...]
# HOSTS as in host-a,host-b: one process a host, each with all of its GPUs. The directory and the Python
# environment have to be the same on every host.
set -eu
hosts=$1
shift
# Rank 0 runs on the first host.
exec mpirun --host "$hosts" --map-by ppr:1:node --bind-to none \
  -x PATH -x DSJAX_COORDINATOR="${hosts%%[,:]*}:61217" \
  dsjax train "$@"
