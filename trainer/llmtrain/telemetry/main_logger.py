"""What the main rank logs: rows of the metrics file and of wandb, and lines of the console."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from llmtrain_data import units

from llmtrain.errors import RESUMES, PreemptedError, RunFailedError
from llmtrain.plan.plan import Plan
from llmtrain.telemetry.about import RunInfo, describe
from llmtrain.telemetry.console import RunConsole
from llmtrain.telemetry.link_usage import LinkSampler
from llmtrain.telemetry.meters import memory_bytes
from llmtrain.telemetry.metrics import MetricsFile, Row, perplexity_of
from llmtrain.telemetry.mfu import Utilization
from llmtrain.telemetry.planned import measured_figures, planned_and_measured
from llmtrain.telemetry.run_file import facts, read_run_file, write_run_file
from llmtrain.telemetry.step_record import StepRecord, is_logged
from llmtrain.telemetry.stragglers import Stragglers
from llmtrain.telemetry.wandb_sink import WandbSink

# A run that will take longer than a day, in seconds, warns after this many steps.
FIRST_STEPS, DAY = 5, 86_400


class MainLogger:
    """The main rank's part of RunLogger."""

    def __init__(self, run_dir: Path, plan: Plan, about: RunInfo, links: LinkSampler | None) -> None:
        self.console = RunConsole(plan.training.steps, doing=about.doing)
        self._run_dir, self._plan, self._about, self._links = run_dir, plan, about, links
        self._metrics: MetricsFile | None = None
        self._wandb: WandbSink | None = None
        self._window: list[float] = []
        self._utilization = Utilization()
        self._first_seconds: deque[float] = deque(maxlen=FIRST_STEPS + 1)
        self._stragglers = Stragglers(plan.grid)
        self._evaluations: list[Row] = []
        # Of the last step; empty before the first one of this start.
        self._comm_bytes: Row = {}
        self._save_held = 0.0
        self._offload: Mapping[str, Any] | None = None
        # What a run that had finished before this start has measured.
        self._finished: Row = {}

    def start(self, resumed_step: int, decisions: list[str], tokens: int) -> None:
        self._metrics = MetricsFile(self._run_dir / "metrics.jsonl", self.console.warn)
        kept, ended = self._metrics.rewind(resumed_step)
        before, steps = read_run_file(self._run_dir), self._plan.training.steps
        self._run = describe(self._plan, self._about, before)
        self._run["total_tokens"] = tokens + self._run["tokens_per_step"] * max(0, steps - resumed_step)
        if ended is not None and resumed_step >= steps:
            self._run |= before
            self._finished = {key: ended[key] for key in ("planned", "measured", "links") if key in ended}
        else:
            write_run_file(self._run_dir, {**self._run, "decisions": decisions})
        # The row of the end has the time since the last row of a step.
        self._restore(resumed_step, kept, (ended or {}).get("elapsed_s") or 0.0)
        self._tokens = tokens
        self._start_wandb()
        shown = [*facts(self._run), ("folder", str(self._run_dir))]
        if resumed_step:
            whole = f", and train.steps is {steps}: nothing is left to train; raise train.steps to train on"
            shown.append(("continues after", f"step {resumed_step}{whole if resumed_step >= steps else ''}"))
        self.console.start(self._plan.name, shown, decisions, resumed_step, self._elapsed())

    def rewind(self, step: int, tokens: int) -> None:
        # If reopening fails, the run stops with that error and there is no open file to log it in.
        metrics, self._metrics = self._open_metrics(), None
        kept, _ = metrics.rewind(step)
        self._metrics = metrics
        self._window.clear()
        # The time of the discarded steps has passed.
        self._restore(step, kept, self._elapsed())
        self._tokens = tokens

    def _restore(self, step: int, kept: list[Row], elapsed: float) -> None:
        """Resume after `step`, with the totals of the rows of earlier starts. elapsed: seconds of the run so far,
        as far as they are known; the time between starts does not count."""
        self._first = self._last = step
        self._started = self._warm = time.monotonic()
        self._evaluations = [row for row in kept if row.get("event") == "eval"]
        steps = [row for row in kept if "event" not in row]
        last = steps[-1] if steps else {"step": 0}
        # Another version may have written a row, so only its step is certain.
        self._elapsed_before, self._skipped = max(last.get("elapsed_s") or 0.0, elapsed), last.get("skipped_steps", 0)
        # A row's step time is the mean since the row before.
        before = [0, *(row["step"] for row in steps)]
        pairs = zip(steps, before, strict=False)
        self._seconds = sum((row.get("step_time_s") or 0.0) * (row["step"] - b) for row, b in pairs)
        self._timed_tokens = last.get("tokens", last["step"] * self._run["tokens_per_step"])

    def _start_wandb(self) -> None:
        logging = self._plan.logging
        if logging.wandb == "off":
            return
        self._wandb = WandbSink(
            self._run_dir,
            mode=logging.wandb,
            project=logging.wandb_project,
            name=self._plan.name,
            config=dict(self._plan.record),
            warn=self.console.warn,
        )

    def step(self, record: StepRecord, sent: Row) -> None:
        self._timed_tokens += record.tokens - self._tokens
        self._last, self._tokens, self._skipped = record.step, record.tokens, record.skipped_steps
        self._window.append(record.seconds)
        self._comm_bytes = sent["comm_bytes"]
        self._seconds += record.seconds
        self._save_held = max(self._save_held, record.save_held)
        self._warn_if_long(record.seconds)
        left = self._left()
        self.console.progress(record.step, self._elapsed(), left)
        if not is_logged(self._plan, record.step):
            return
        row = self._row(record, sent)
        # Only the rows of logged steps have all of what their step moved.
        self._offload = record.offload
        self._window.clear()
        self._write(row)
        self.console.logged(row, left)

    def _warn_if_long(self, seconds: float) -> None:
        """After FIRST_STEPS steps, warn when a long run will end; the median leaves out the slow first step."""
        self._first_seconds.append(seconds)
        left = self._plan.training.steps - self._last
        if len(self._first_seconds) == FIRST_STEPS and (needed := median(self._first_seconds) * left) > DAY:
            until = ""
            # Dates end with the year 9999.
            with suppress(OverflowError):
                until = f", until {datetime.now() + timedelta(seconds=needed):%A %d %B %Y}"
            self.console.warn(
                f"the remaining {left} steps take {units.duration(needed)} at the pace of the first steps{until}; use "
                "more ranks or fewer train.steps to take less"
            )

    def _row(self, record: StepRecord, sent: Row) -> Row:
        # Average over all steps since the last row, so that every slow step counts.
        seconds = max(sum(self._window) / len(self._window), 1e-9)
        row = {
            "step": record.step,
            "tokens": record.tokens,
            "loss": record.loss,
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "step_time_s": seconds,
            **self._utilization.row(self._run, seconds),
            "memory_bytes": memory_bytes(self._about.device, self._about.model_state_bytes),
            **sent,
            "link_bytes_per_s": self._links.busiest() if self._links else {},
            "skipped_steps": record.skipped_steps,
            "passed_batches": record.passed_batches,
            "elapsed_s": self._elapsed(),
        }
        if len(record.rank_seconds) > 1:
            row["rank_compute_s"] = self._rank_compute(record.rank_seconds)
        if record.offload is not None:
            row["offload"] = record.offload
        return row if record.loss_scale is None else {**row, "loss_scale": record.loss_scale}

    def _rank_compute(self, seconds: Sequence[float]) -> Row:
        row, slow = self._stragglers.take(seconds)
        by_host: dict[str, list[int]] = {}
        for rank in slow:
            by_host.setdefault(self._about.host_of(rank), []).append(rank)
        for host, ranks in by_host.items():
            who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} on {host}"
            longer = f"{max(slow[rank] for rank in ranks):.2f} times as long as ranks with the same work"
            self.console.warn(f"{who} {'computes' if len(ranks) == 1 else 'compute up to'} {longer}")
        return row

    def evaluation(self, step: int, split: str, loss: float) -> None:
        perplexity = perplexity_of(loss)
        row = {"event": "eval", "step": step, "split": split, "loss": loss, "perplexity": perplexity}
        self._evaluations.append(row)
        self._write(row)
        self.console.evaluation(step, split, loss, perplexity)

    def evaluated(self, step: int) -> bool:
        return any(row["step"] == step for row in self._evaluations)

    def end(self, summary: dict[str, Any], exit_code: int) -> None:
        row = {"event": "end", **self._summary(), **summary}
        if self._links is not None:
            self._links.stop()
            row["links"] = {str(node): links for node, links in sorted(self._links.nodes().items())}
        row |= self._finished
        self._write(row)
        if row["outcome"] == "finished":
            self.console.end([*_end_facts(row), ("folder", str(self._run_dir))])
        self._close_all(row, exit_code)

    def close(self, error: BaseException | None) -> None:
        # First: the live line must not be printed after the reason.
        self.console.close()
        if self._metrics is not None and error is not None:
            asked_to_stop = isinstance(error, PreemptedError | KeyboardInterrupt)
            reason = f"interrupted; {RESUMES}" if isinstance(error, KeyboardInterrupt) else str(error)
            try:
                outcome = "stopped" if asked_to_stop else "failed"
                # A run that was asked to stop goes on later: to wandb it has not failed.
                exit_code = 0 if asked_to_stop else 1
                self.end({"outcome": outcome, "reason": reason or type(error).__name__}, exit_code)
            except RunFailedError as failure:
                # A full disk must not hide why the run stopped.
                self.console.warn(str(failure))
        self._close_all({}, exit_code=1)

    def _close_all(self, summary: Row, exit_code: int) -> None:
        """Close what is open; closing twice is harmless."""
        self.console.close()
        if self._wandb is not None:
            self._wandb.finish(summary, exit_code)
            self._wandb = None
        if self._metrics is not None:
            metrics, self._metrics = self._metrics, None
            if lost := metrics.close():
                self.console.warn(lost)

    def _open_metrics(self) -> MetricsFile:
        if self._metrics is None:
            raise RuntimeError("RunLogger has not started; call RunLogger.start first")
        return self._metrics

    def _write(self, row: Row) -> None:
        self._open_metrics().write(row)
        if self._wandb is not None and row.get("event") == "eval":
            split = row["split"]
            self._wandb.log(row["step"], {f"{split}/loss": row["loss"], f"{split}/perplexity": row["perplexity"]})
        elif self._wandb is not None and "event" not in row:
            self._wandb.log(row["step"], row)

    def _summary(self) -> Row:
        run = self._run
        losses = [row.get("loss") for row in self._evaluations if row.get("split") == "validation"]
        # The file holds null for numbers that are not finite.
        validation = [nan if loss is None else loss for loss in losses]
        first, last = (validation[0], validation[-1]) if validation else (None, None)
        entropy = run["unigram_entropy"]
        return {
            "step": self._last,
            "tokens": self._tokens,
            "elapsed_s": self._elapsed(),
            # This leaves out the time of evaluations and checkpoints.
            "tokens_per_s": self._timed_tokens / self._seconds if self._seconds else None,
            "first_validation_loss": first,
            "last_validation_loss": last,
            "unigram_entropy": entropy,
            "validation_over_unigram": last / entropy if last is not None and entropy else None,
            "skipped_steps": self._skipped,
            "planned": run["planned"],
            "measured": measured_figures(
                memory_bytes(self._about.device, self._about.model_state_bytes),
                self._comm_bytes,
                self._save_held,
                self._offload,
            ),
        }

    def _elapsed(self) -> float:
        """Return the seconds of training, evaluations and checkpoints so far, over all starts of the run."""
        return self._elapsed_before + time.monotonic() - self._started

    def _left(self) -> float | None:
        """Return the seconds until the last step at the pace since this start's first step, which is slow; None until
        a second step is done."""
        done = self._last - self._first - 1
        if done < 1:
            self._warm = time.monotonic()
            return None
        return (time.monotonic() - self._warm) / done * (self._plan.training.steps - self._last)


def _end_facts(row: Row) -> list[tuple[str, str]]:
    found = []
    if row["last_validation_loss"] is not None:
        losses = f"{row['first_validation_loss']:.4f} first, {row['last_validation_loss']:.4f} last"
        found.append(("validation loss", losses))
    if row["unigram_entropy"] is not None:
        found.append(("unigram entropy", f"{row['unigram_entropy']:.4f} (validation tokens)"))
    if row["validation_over_unigram"] is not None:
        found.append(("validation / entropy", f"{row['validation_over_unigram']:.3f} (last loss)"))
    found.append(("tokens", units.number(row["tokens"])))
    found.append(("time", units.duration(row["elapsed_s"])))
    if row["tokens_per_s"] is not None:
        found.append(("tokens/s in steps", units.number(row["tokens_per_s"])))
    if row["skipped_steps"]:
        found.append(("skipped steps", str(row["skipped_steps"])))
    for name, planned, measured in planned_and_measured(row["planned"], row["measured"]):
        found.append((name, f"{planned} planned, {measured} measured"))
    return found
