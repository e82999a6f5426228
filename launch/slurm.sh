#!/bin/sh
#SBATCH --job-name=ulysses
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# One launcher a node, in a Slurm job; each starts that node's share of sp * tp * dp processes.
#
#   sbatch --nodes=2 --gres=gpu:8 launch/slurm.sh configs/qwen3_32b.yaml train.py
#   NPROC=8 sbatch --nodes=2 ...                                  # where a degree is auto
#
# A launcher that fails ends the job on all nodes at once (--kill-on-bad-exit). The port comes from
# the job's number, so that two jobs on one node don't meet.
set -eu
config=$1
shift
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RENDEZVOUS="$first:$((20000 + SLURM_JOB_ID % 10000))"
# shellcheck disable=SC2016  # the node's own number is known on the node only
exec srun --kill-on-bad-exit=1 sh -c '
    config=$1
    shift
    exec "${PYTHON:-python}" -m ulysses.launch launch --config "$config" \
        --nnodes "$SLURM_NNODES" --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "$SLURM_JOB_ID" \
        --node-rank "$SLURM_NODEID" ${NPROC:+--nproc "$NPROC"} "$@"
' launcher "$config" "$@"
