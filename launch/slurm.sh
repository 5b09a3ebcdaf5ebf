#!/usr/bin/env bash
# A Slurm job on any number of nodes; nodes and GPUs are those of the allocation.
#
#     sbatch --nodes 4 --gpus-per-node 8 --time 24:00:00 launch/slurm.sh --config my.toml run.dir=/shared/runs/mine
#
# Five minutes before the time limit the run saves and ends, and the job is queued again. It is queued
# again after a failure too, and in both cases only if it has made a checkpoint: a job that cannot train
# ends. A node that fails is Slurm's affair: it queues the job again (--requeue). A job that is
# cancelled stays so. --nodes 2-4 takes as many nodes as there are, each time the job starts.
#SBATCH --job-name=dtron
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
job() { squeue --noheader --job "$SLURM_JOB_ID" --format "$1"; }
end=9999999999 # of waiting for the run, in seconds since 1970
stop() {
    scancel --signal=USR1 "$SLURM_JOB_ID" # to all steps, not to this script
    due=$(job %e)
    [ -z "$due" ] || end=$(($(date -d "$due" +%s) - 20))
}
trap stop USR1
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
if [ -z "$ranks" ]; then
    echo "error: the job has no GPUs; give sbatch --gpus-per-node=N, or RANKS_PER_NODE=N" >&2
    exit 2
fi
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun asks for it
# In what is left of the time: five minutes, of which Slurm may take one.
set -- train.py faults.stop_seconds=200 run.wait_seconds=300 "$@"
newest() { python3 launch/progress.py "$@"; }

before=$(newest "$@")
# shellcheck disable=SC2016
srun --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 --kill-on-bad-exit=1 \
    bash -c 'exec python3 launch/host.py --node-rank "$SLURM_NODEID" "$@"' host \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" --id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --head "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" \
    --port $((20000 + SLURM_JOB_ID % 10000)) ${NUMA_BINDING:+"--numa-binding=$NUMA_BINDING"} "$@" &
run=$!
# After USR1 the run saves; should that hang, what was saved before remains.
while kill -0 "$run" 2>/dev/null && [ "$(date +%s)" -lt "$end" ]; do
    sleep 1 &
    wait "$!" # a signal ends it; one that comes just before it waits a second
done
code=1
kill -0 "$run" 2>/dev/null || { wait "$run"; code=$?; }
step=$(newest "$@")
if [ "$code" = 0 ]; then
    exit 0
elif [ "$(job %T)" != RUNNING ]; then # cancelled, or queued by another hand
    echo "slurm.sh: stopped at step $step"
elif [ "$step" -gt "$before" ]; then
    echo "slurm.sh: queued again at step $step (began at $before)"
    scontrol requeue "$SLURM_JOB_ID"
else
    echo "slurm.sh: no checkpoint after step $before; not queued again"
fi
exit "$code"
