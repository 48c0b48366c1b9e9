"""What follows a loss that spikes or is not finite: the run rewinds to its newest scheduled checkpoint, or fails."""

from typing import NoReturn

from llmtrain.checkpoint.folder import drop_later, step_folders
from llmtrain.checkpoint.load import load_latest
from llmtrain.errors import RunFailedError
from llmtrain.training.run import Run
from llmtrain.training.run_folder import writing
from llmtrain.training.states import restore_progress, shards_to_read


def rewind(run: Run, loss: float) -> None:
    """Rewind to the newest scheduled checkpoint, and skip the data of the spike. Collective."""
    at = run.progress.step + 1
    if run.progress.rewinds >= run.plan.training.max_skipped:
        fail(run, f"the loss spiked (on_spike) {run.progress.rewinds + 1} times in a row after the same checkpoint")
    rewind_states(run)
    run.log.warn(
        f"the loss of step {at} spiked to {loss:.4f}; the run resumes from step {run.progress.step}, past "
        f"{at - run.progress.step} global batches"
    )


def rewind_states(run: Run) -> None:
    """Load the newest scheduled checkpoint again, and pass over the data of the steps since then and of the current
    step: one that a stop left must not change the curve. If that one is lost, load the newest that is sound.
    Collective."""
    run.ranks.activity.begin("going back to the last checkpoint")
    if failure := run.checkpoints.wait():
        run.log.warn(failure)
    before, own, shards = run.progress, run.folder / "checkpoints", shards_to_read(run)
    saved = load_latest(own, shards, run.ranks, run.log.warn, run.plan.model, before.scheduled)
    if saved is None:
        raise RunFailedError(f"{own} holds no checkpoint to go back to (on_spike.action); start the run anew")
    restore_progress(run, saved)
    run.progress.samples = before.samples + run.plan.batch.sequences
    run.progress.passed = before.passed + before.step + 1 - run.progress.step
    run.progress.rewinds = before.rewinds + 1
    run.engine.update()
    run.compared = min(run.compared, run.progress.step)
    run.log.rewind(run.progress.step, run.progress.tokens)
    if run.ranks.is_main:
        # The run has not reached the steps of later checkpoints.
        with writing(own):
            drop_later(own, run.progress.step)


def fail(run: Run, why: str) -> NoReturn:
    """Fail a run that no longer learns. Collective."""
    run.checkpoints.wait()
    kept = step_folders(run.folder / "checkpoints")
    sound = f"the checkpoints in {run.folder} are sound" if kept else "there is no checkpoint yet"
    raise RunFailedError(
        f"{why} (train.max_skipped), up to step {run.progress.step}; {sound}. Lower optimizer.lr or check the data"
    )
