#!/bin/bash
#SBATCH --job-name='it'"'"'s 1 run'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --partition=batch
#SBATCH --account=team-a
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@240
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --mem=0

set -uo pipefail

export PATH="$SLURM_SUBMIT_DIR/.venv/bin:$PATH"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
export NCCL_DEBUG=WARN
export NOTE='a $(b) '"'"'c'"'"''
export RENDEZVOUS_HOST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export RENDEZVOUS_PORT=$((20000 + SLURM_JOB_ID % 20000))

on_node=$(cat <<'ON_NODE'
SETUP_RAN=on-$SLURM_NODEID
export SETUP_RAN
exec python -m launch.torchrun \
    --nnodes 2 --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-backend c10d \
    --rdzv-endpoint "$RENDEZVOUS_HOST:$RENDEZVOUS_PORT" \
    --rdzv-conf is_host=$((SLURM_NODEID == 0)) \
    --local-addr "$SLURMD_NODENAME" \
    -m launch.train \
    recipe=h200_small \
    'run.name=it'"'"'s 1 run' \
    'data.train=[/data/$(ls) web]' \
    'run.dir=${oc.env:HOME}/r'
ON_NODE
)

srun --label --kill-on-bad-exit=1 --cpu-bind=none bash -euc "$on_node" &
step=$!
limit_is_near=
trap 'limit_is_near=1; signalled=1; kill -USR1 "$step" 2>/dev/null' USR1

# Every trapped signal ends a wait early; bash keeps the status of a step that has ended for the next one.
signalled=1
while [ -n "$signalled" ]; do
    signalled=
    wait "$step"
    status=$?
done
case "$status" in
    0 | 2 | 3) again= ;;
    75) again=1 ;;
    *) [ -z "$limit_is_near" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] && again=1 || again= ;;
esac
if [ -n "$again" ] && [ ! -d '/scratch/it'"'"'s/checkpoints/step-00000100' ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
