# Runs a command on every rank of a Slurm job, makes it save before the time limit, and requeues the job.
#
# For your own batch scripts; the scripts of `llmtrain submit` contain the same lines. Your script begins with these
# options, as sbatch reads none after the first command, and ends with the exec line:
#
#     #SBATCH --nodes=2 --ntasks-per-node=4 --signal=B:USR1@300 --requeue --open-mode=append
#     exec bash tools/slurm/train_and_requeue.sh llmtrain run recipe.yaml
#
# With requeue=no in the environment, the next job of a chain resumes the run instead. With margin=300, the seconds of
# --signal, a job that has no more time than that ends at once. With restarts=3, ranks that fail are started again, up to
# three times in a row without a new checkpoint in the folder that `checkpoints` names.

# The tasks of the first node, of a list such as 4(x2),3.
tasks=${SLURM_TASKS_PER_NODE%%[(,]*}
cpus=${SLURM_CPUS_PER_TASK:-$((${SLURM_CPUS_ON_NODE:-1} / ${tasks:-1}))}
cpus=$((cpus > 0 ? cpus : 1))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus}

if [ "${1##*/}" = torchrun ]; then
  echo "leave out torchrun: Slurm starts a rank for each task, and torchrun does not pass on the signal to save" >&2
  exit 2
fi

# Neighbouring ranks are on one node. Bind each to its own adjacent cores if Slurm can. A rank is bound before it
# allocates, so that its memory is local as far as there is any: --mem-bind would end it where there is none.
bind=(--distribution=block)
if scontrol show config 2> /dev/null | grep -q '^TaskPlugin .*affinity'; then
  bind=(--cpu-bind=cores --distribution=block:block)
fi

# Slurm signals a job at once if its time is not longer than the margin.
left=$((${SLURM_JOB_END_TIME:-0} - $(date +%s)))
if [ "${margin:-0}" -gt 0 ] && [ "${SLURM_JOB_END_TIME:-0}" -gt 0 ] && [ "$left" -le "$margin" ]; then
  echo "job $SLURM_JOB_ID has $left s, and margin is $margin: it would save and end before its first step" >&2
  echo "give it more time, or lower margin" >&2
  exit 2
fi

# On USR1, ranks finish the step, save and exit with 75. srun forwards USR1; on TERM, it would kill the job step.
asked= late=
ask() {
  asked=yes
  # Slurm signals up to a minute early.
  [ "${SLURM_JOB_END_TIME:-0}" -le 0 ] || [ $((SLURM_JOB_END_TIME - $(date +%s))) -gt $((${margin:-0} + 60)) ] || late=yes
  kill -USR1 "$ranks" 2> /dev/null
}
trap ask USR1 TERM

# SLURM_JOB_ID of an array's last task is the id of the array, which stands for all tasks.
me=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
me=${me:-$SLURM_JOB_ID}
newest() { ls "${checkpoints:-/dev/null}" 2> /dev/null | grep -x 'step-[0-9]*' | sort -V | tail -n 1; }
# What Slurm says of this job. Its controller may just be starting again.
job() {
  local pause found
  for pause in 0 1 5 20; do
    sleep "$pause"
    if found=$(scontrol show job --oneliner "$me") && [ -n "$found" ]; then break; fi
  done
  echo "$found"
}
# At a preemption with a grace time, Slurm sends TERM to the ranks alone.
preempted() { [[ $(job) == *" PreemptTime="[0-9]* ]]; }
# Whether ranks that ended with an exit code may do better once more: neither bad input nor a request to stop was why.
failed() {
  [ -z "$asked" ] && [[ $1 != @(0|2|75|130|138) ]] && [[ $(job) == *" JobState=RUNNING "* ]] && ! preempted
}

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST begins at $(date '+%F %T'), restart ${SLURM_RESTART_COUNT:-0}"
tried=0 before=$(newest) begun=$before
while :; do
  # After the first rank ends, the others have a minute to end.
  # The ranks have this script's environment, also where SBATCH_EXPORT=NONE would keep it from them.
  srun --export=ALL --wait=60 --kill-on-bad-exit=0 --cpus-per-task="$cpus" "${bind[@]}" "${srun_options[@]}" "$@" &
  ranks=$!
  [ -z "$asked" ] || kill -USR1 "$ranks"
  until
    wait "$ranks"
    ! kill -0 "$ranks" 2> /dev/null
  do :; done
  wait "$ranks"
  code=$?
  after=$(newest)
  [ "$after" = "$before" ] || tried=0 before=$after
  [ "$tried" -lt "${restarts:-0}" ] && failed "$code" || break
  tried=$((tried + 1))
  echo "the ranks ended with exit code $code; restart $tried of $restarts from ${after:-the start}" >&2
done

# USR1 or TERM ended the ranks before their first step: nothing is lost. Another signal after a request to stop may have
# ended ranks that were late to exit after they had saved; a rank that runs out of memory as it saves would do so again.
if [ "$code" = 143 ] && preempted; then asked=yes; fi
if [ "$code" = 138 ] || { [ -n "$asked" ] && [ "$code" = 143 ]; }; then code=75; fi
if [ -n "$asked" ] && [ "$code" -gt 128 ] && { [ -z "$checkpoints" ] || [ "$after" != "$begun" ]; }; then code=75; fi
# A run whose start takes all of its job's time would be queued for ever.
if [ -n "$checkpoints" ] && [ "$after" != "$begun" ]; then rm -f "$checkpoints.late"; fi
if [ "$code" = 75 ] && [ -n "$late" ] && [ -n "$checkpoints" ] && [ "$after" = "$begun" ]; then
  echo "$SLURM_JOB_ID" >> "$checkpoints.late"
  if [ "$(wc -l < "$checkpoints.late")" -ge 3 ]; then
    rm -f "$checkpoints.late"
    echo "the time of three jobs in a row has ended before the run's first step; give it more time, or lower margin" >&2
    exit 2
  fi
fi
if [ "$code" = 75 ] && [ "${requeue:-yes}" = yes ]; then
  found=$(job)
  [ -n "$found" ] || echo "Slurm does not say how job $me is: submit it again to resume" >&2
  # Do not requeue a cancelled job, or one that Slurm has already requeued.
  if [[ $found == *" JobState=RUNNING "* || $found == *" Reason=TimeLimit "* ]]; then
    trap '' USR1 TERM
    scontrol requeue "$me" || echo "Slurm cannot requeue job $me: submit it again to resume" >&2
  fi
fi
exit "$code"
