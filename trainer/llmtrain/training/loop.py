"""The training loop."""

import time
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import torch
from llmtrain_data import units
from llmtrain_data.domain import validation_warnings
from llmtrain_data.waiting import Waiting
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.cluster.layout import Axis
from llmtrain.comm.device import in_host_memory, start_to_host, synchronize
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import PreemptedError, RunFailedError
from llmtrain.launch.stop import STOPPED_EARLY, StopRequest
from llmtrain.offload.usage import TierUsage
from llmtrain.optim.clipping import step_numbers
from llmtrain.optim.lr_schedule import learning_rate
from llmtrain.optim.spike import is_spike, remember
from llmtrain.plan.plan import Plan
from llmtrain.telemetry.step_record import StepRecord, is_logged
from llmtrain.training.collector import freeze, thawed
from llmtrain.training.evaluate import EvaluationStoppedError, InParts, mean_loss
from llmtrain.training.passes import Passes, decided_on_device, forward_backward
from llmtrain.training.replica_check import compare
from llmtrain.training.rewind import fail, rewind
from llmtrain.training.run import Run, open_run
from llmtrain.training.states import save, start_states


def train(plan: Plan, ranks: Ranks, decisions: list[str], waiting: Waiting | None = None) -> None:
    """Run a plan from its newest checkpoint, or from the start, to its last step. Collective.

    decisions: sentences about resolved values, for the user. waiting: shows what the start waits for; stopped here.
    Raises PreemptedError when asked to stop, RunFailedError when the run cannot continue.
    """
    steps = plan.training.steps
    with thawed(), StopRequest() as stop, open_run(plan, ranks, stop) as run:
        resumes = start_states(run)
        if waiting is not None:
            waiting.stop()
        # The live line, which begins now, must not say that the checkpoint is still being loaded.
        ranks.activity.begin("preparing the first step" if run.progress.step < steps else "")
        changed = [f"{change}, changed since the last start{without_effect(change, run)}" for change in run.changed]
        remarks = [*decisions, *filter(None, [run.origin]), *changed, *unverified(run), *begun_otherwise(run)]
        run.log.start(run.progress.step, remarks, run.progress.tokens)
        warn_of_validation(run)
        if not resumes or run.progress.step == 0:
            begin(run)
        elif evaluation_was_stopped(run) and not evaluate(run):
            raise PreemptedError(stopped_after(run))
        ranks.activity.show(first_step(plan) if run.progress.step < steps else "")
        first = True
        while run.progress.step < steps:
            before = run.progress.step
            stopping = train_step(run, before)
            if first:
                freeze()
                first = False
            # After a rewind, the rest was done at that step before.
            if after_step(run, stopping) if run.progress.step > before else stopping or run.stop.agreed:
                finish_checkpoint(run)
                raise PreemptedError(stopped_after(run))
            ranks.activity.show("")
        finish_checkpoint(run)
        run.log.end({})


def after_step(run: Run, stopping: bool) -> bool:
    """Evaluate, compare replicas and save where it is due; return whether the run ends before its last step, or before
    the last evaluation. stopping: whether a rank was asked to stop in the step. Collective."""
    plan, done, steps = run.plan, run.progress.step, run.plan.training.steps
    cut = _due(done, plan.training.eval_every, steps) and not evaluate(run)
    stopping = stopping or run.stop.agreed
    due = _due(done, plan.checkpoint.every or steps, steps)
    saving = stopping or due
    if saving or _due(done, plan.training.compare_every, steps):
        compare_replicas(run)
    if due:
        run.progress.scheduled = done
    if saving:
        save(run)
    return cut or (stopping and done < steps)


def stopped_after(run: Run) -> str:
    """Return a sentence about a run that was told to stop."""
    return f"stopped after step {run.progress.step} and saved; the same command resumes from there"


def without_effect(change: str, run: Run) -> str:
    """Return words about a change of the recipe that a resumed run ignores; empty for any other."""
    ignored = change.startswith(("checkpoint.resume:", "checkpoint.weights:", "model.hf:"))
    if change.startswith("precision.loss_scale:"):
        ignored = run.progress.loss_scale is not None
    return "; it has no effect, because the run resumes from its own checkpoints" if ignored else ""


def first_step(plan: Plan) -> str:
    """Return a description of the first step, which takes longer than the others."""
    count = plan.batch.microbatches
    text = f"first step, of {count} microbatch{'es' if count > 1 else ''}"
    return f"{text}, for which torch.compile builds kernels" if plan.training.compile else text


def unverified(run: Run) -> list[str]:
    """Return a warning for each data set without checksums."""
    return [
        f"{prefix} has no checksums, so damage to it goes unnoticed; `llmtrain data checksum {prefix}` writes them"
        for prefix in run.train_data.unverified()
    ]


def begun_otherwise(run: Run) -> list[str]:
    """Return a warning if not all sets of a blend begin their documents alike."""
    (first, begins_with), *others = run.train_data.begins().items()
    return [
        f"{first} and {prefix} do not begin their documents with the same id (`llmtrain data inspect` shows which); "
        "prepare both with the beginning-of-text id, or both with --no-bos"
        for prefix, other in others
        if other != begins_with
    ][:1]


def warn_of_validation(run: Run) -> None:
    """Warn if the validation split of the training data says little about it."""
    if run.valid_data is not None and run.plan.data.validation is None and run.ranks.is_main:
        for sentence in validation_warnings(run.train_data, run.valid_data):
            run.log.warn(sentence)


def begin(run: Run) -> None:
    """Evaluate the initial weights, and save them if a spike may rewind to them. Collective.

    Raises PreemptedError or KeyboardInterrupt when asked to stop in the evaluation: there is nothing to save yet.
    """
    if run.progress.step == 0:
        evaluate(run)
        if run.stop.agreed:
            raise KeyboardInterrupt if run.stop.interrupted else PreemptedError(STOPPED_EARLY)
    if run.plan.spikes.rewinds:
        run.progress.scheduled = run.progress.step
        save(run)


def train_step(run: Run, step: int) -> bool:
    """Do one optimizer step, counted from 0. Return whether any rank was asked to stop. Collective."""
    plan, started, moved = run.plan, time.perf_counter(), usage(run)
    run.ranks.activity.begin_step(step)
    if is_logged(plan, step + 1) and run.ranks.layout.world > 1:
        run.ranks.activity.start_timing()
    if run.plan.model.dropout:
        # Seeded by the step, so that a resumed run draws the same numbers. Tensor-parallel ranks draw the same numbers
        # unless each has its own part of the sequence.
        offset = 0 if plan.sequence_parallel else run.ranks.layout.coordinate(run.ranks.rank, Axis.TENSOR)
        torch.manual_seed(((plan.seed * 1_000_003 + step) * 1_000_003 + run.ranks.rank - offset) % 2**63)
    lr = learning_rate(plan.optimizer, step, plan.training.steps)
    begin_step(run, lr)
    passes = forward_backward(run, step)
    coming, on_device = start_to_host(passes.sums), decided_on_device(plan)
    # The host launches the optimizer step before it waits for the norm.
    hold_seconds = optimizer_step(run, lr, passes) if on_device else 0.0
    ended = Passes(coming())
    loss, norm_value = float(ended.loss), float(ended.norm) / run.scale.value
    finite = isfinite(loss) and isfinite(norm_value)
    spike = finite and is_spike(plan.spikes, run.progress.losses, loss)
    if finite and not spike:
        if not on_device:
            hold_seconds = optimizer_step(run, lr, ended)
        run.progress.applied += 1
        remember(plan.spikes, run.progress.losses, loss)
    elif not on_device:
        run.engine.skip_step()
    if spike and plan.spikes.action == "rewind":
        rewind(run, loss)
        if run.progress.step == 0:
            evaluate(run)
        return ended.stopping
    run.progress.step = step + 1
    run.progress.samples += plan.batch.sequences
    run.progress.tokens += plan.batch.tokens
    note_skipped(run, finite, spike)
    run.lock.check()
    # First: it waits for the steps of offloaded states, which take their time of this step.
    offloaded = offload_usage(run, step, moved)
    run.log.step(
        StepRecord(
            step=step + 1,
            tokens=run.progress.tokens,
            loss=loss,
            lr=lr,
            grad_norm=norm_value,
            seconds=time.perf_counter() - started,
            skipped_steps=run.progress.skipped,
            passed_batches=run.progress.passed,
            rank_seconds=ended.rank_seconds,
            loss_scale=run.scale.value if plan.compute == "fp16" else None,
            offload=offloaded,
            save_held=hold_seconds,
        )
    )
    return ended.stopping


def begin_step(run: Run, lr: float) -> None:
    """Let offloaded states be stepped as their gradients arrive, with the numbers of a step that does not clip.

    After a step that clipped, they wait for the norm: the next step clips as well, most likely, and what was stepped
    ahead would be discarded.
    """
    run.engine.begin_step(None if run.clips else _numbers(run, lr, torch.tensor(run.scale.value)))


def optimizer_step(run: Run, lr: float, passes: Passes) -> float:
    """Step every unit. passes: on the device if that decides whether it steps, else on the host. Return the seconds for
    which a checkpoint held this up."""
    divisor = passes.divisor(run.scale.value, run.plan.optimizer.clip)
    if in_host_memory(divisor):
        run.clips = float(divisor) != run.scale.value
    hold_seconds = run.checkpoints.wait_until_taken()
    run.engine.step(_numbers(run, lr, divisor))
    return hold_seconds


def _numbers(run: Run, lr: float, divisor: Tensor) -> AdamWStep:
    return step_numbers(run.plan.optimizer, lr, run.progress.applied + 1, divisor)


def offload_usage(run: Run, step: int, before: dict[str, TierUsage]) -> dict[str, Any] | None:
    """Return what this rank moved between its device, the host and files in a step: model states, and `activations`;
    None where nothing is offloaded. step: counted from 0. before: `usage` when it began."""
    if run.offloaded.moving and (is_logged(run.plan, step + 1) or is_logged(run.plan, step + 2)):
        # A row has all of what its step moved, and how long it waited for that, and nothing of the step before.
        run.engine.finish_steps()
        synchronize(run.ranks.device)
    found = {name: moved.since(before[name]) for name, moved in usage(run).items()}
    return {**found.pop("states", {}), **found} or None


def usage(run: Run) -> dict[str, TierUsage]:
    """Return what this rank has moved since its start: its `states`, and `activations`, of those that it offloads."""
    movers = {"states": run.offloaded if run.offloaded.moving else None, "activations": run.activations}
    return {name: mover.usage() for name, mover in movers.items() if mover is not None}


def note_skipped(run: Run, finite: bool, spike: bool) -> None:
    """Count skipped steps; fail after too many in a row."""
    progress, dynamic, before = run.progress, run.plan.compute == "fp16", run.scale.value
    run.scale.update(finite, dynamic)
    progress.loss_scale, progress.good_steps = run.scale.value if dynamic else None, run.scale.good_steps
    if finite and not spike:
        progress.skipped_in_row = 0
        return
    progress.skipped += 1
    if run.scale.value < before:
        run.log.warn(f"step {progress.step} overflowed and was skipped; the loss scale is now {run.scale.value:g}")
        return
    progress.skipped_in_row += 1
    what = "a loss that spiked (on_spike)" if spike else "a non-finite loss or gradient"
    run.log.warn(f"step {progress.step} had {what} and was skipped")
    if progress.skipped_in_row >= run.plan.training.max_skipped:
        fail(run, f"there was {what} for {units.count(progress.skipped_in_row, 'step')} in a row")


def evaluate(run: Run) -> bool:
    """Log the validation loss, if there is a validation split; return False if a request to stop has cut it short.
    Afterwards `run.stop.agreed` tells whether there was one. Collective."""
    if run.valid_data is None:
        return True
    count = run.plan.training.eval_batches * run.plan.batch.sequences
    schedule = run.plan.pipeline.schedule
    checked = InParts(run.ranks, run.stop, schedule.evaluated_together if schedule.ranks > 1 else 1)

    def losses_of(batches: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        counts = run.ranks.layout.coordinate(run.ranks.rank, Axis.TENSOR) == 0
        for part in checked.parts(batches):
            for passed, losses in run.executor.evaluate(part):
                yield passed, losses if counts else []

    try:
        loss = sum(
            part.share * mean_loss(run.model, losses_of, part.samples, part.count, run.plan.batch.microbatch, run.ranks)
            for part in run.valid_data.without_repeats(count)
        )
    except EvaluationStoppedError:
        run.model.train()
        return False
    run.log.evaluation(run.progress.step, "validation", loss)
    checked.stopping()
    return True


def evaluation_was_stopped(run: Run) -> bool:
    """Return whether the evaluation after the last step is due, but not logged: a request to stop cut it short.
    Collective."""
    step, training = run.progress.step, run.plan.training
    if not _due(step, training.eval_every, training.steps) or run.valid_data is None:
        return False
    return run.ranks.sum_all([float(run.log.evaluated(step))])[0] == 0


def compare_replicas(run: Run) -> None:
    """Check that replicas are equal. Collective."""
    if run.plan.training.compare_every:
        compare(run.engine, run.ranks, run.progress.step, run.compared)
        run.compared = run.progress.step


def finish_checkpoint(run: Run) -> None:
    """Wait until the last checkpoint is on disk. Collective."""
    if run.checkpoints.saving:
        run.ranks.activity.begin("waiting for the checkpoint to be on disk")
    failure = run.checkpoints.wait()
    if warning := run.checkpoints.warning():
        run.log.warn(warning)
    if failure:
        raise RunFailedError(failure)


def _due(step: int, every: int, steps: int) -> bool:
    """Whether an action is due after `step` steps. every: its interval in steps, 0 for never; the last step counts."""
    return every > 0 and (step % every == 0 or step == steps)
