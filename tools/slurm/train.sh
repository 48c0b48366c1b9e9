# Runs a command as every rank of a Slurm job, has it saved in time, and puts the job back into the queue.
#
# For people who write their own batch script; `llmtrain submit` writes one around these same lines. At its end:
#
#     #SBATCH --nodes=2 --ntasks-per-node=4 --signal=B:USR1@300 --requeue --open-mode=append
#     exec bash tools/slurm/train.sh llmtrain run recipe.yaml
#
# requeue=no in the environment leaves a run that was stopped and saved to the next job of a chain.

cpus=${SLURM_CPUS_PER_TASK:-$((${SLURM_CPUS_ON_NODE:-1} / ${SLURM_NTASKS_PER_NODE:-1}))}
cpus=$((cpus > 0 ? cpus : 1))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus}

# Each rank on cores of its own, next to each other, with memory beside them: where Slurm can bind, and there are
# several memories.
bind=()
if scontrol show config 2> /dev/null | grep -q '^TaskPlugin .*affinity'; then
  bind=(--cpu-bind=cores --distribution=block:block)
  [ -d /sys/devices/system/node/node1 ] && bind+=(--mem-bind=local)
fi

# Ranks take USR1 as a request to finish the step, save and end with 75. srun passes it on; TERM would have it give up.
asked=
ask() {
  asked=yes
  kill -USR1 "$ranks" 2> /dev/null
}
trap ask USR1 TERM
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST begins at $(date '+%F %T'), restart ${SLURM_RESTART_COUNT:-0}"
# The first rank that ends leaves the others a minute to end as well.
srun --wait=60 --kill-on-bad-exit=0 --cpus-per-task="$cpus" "${bind[@]}" "${srun_options[@]}" "$@" &
ranks=$!
until
  wait "$ranks"
  ! kill -0 "$ranks" 2> /dev/null
do :; done
wait "$ranks"
code=$?

# Killed by USR1 or, having been asked, by whatever: it was told to stop before its first step, and has lost nothing.
if [ "$code" = 138 ] || { [ -n "$asked" ] && [ "$code" -gt 128 ]; }; then code=75; fi
if [ "$code" = 75 ] && [ "${requeue:-yes}" = yes ]; then
  # The last task of an array to start has the array's own id, which would name all of its tasks.
  me=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  me=${me:-$SLURM_JOB_ID}
  job=$(scontrol show job --oneliner "$me")
  # A job that was cancelled stays so; one that Slurm itself requeues is in the queue already.
  if [[ $job == *" JobState=RUNNING "* || $job == *" Reason=TimeLimit "* ]]; then
    trap '' USR1 TERM
    scontrol requeue "$me" || echo "Slurm does not requeue job $me: submit it again to go on" >&2
  fi
fi
exit "$code"
