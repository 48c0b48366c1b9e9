"""The training loop's logger, which writes the metrics file, the console and wandb.

The loop gives raw numbers; the logger computes rates, utilisation and time left. On ranks other than the main one
every call is a no-op.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llmtrain.errors import RunFailedError
from llmtrain.plan.plan import Plan
from llmtrain.telemetry.about import RunInfo
from llmtrain.telemetry.link_usage import LinkSampler
from llmtrain.telemetry.main_logger import MainLogger
from llmtrain.telemetry.meters import CommMeter
from llmtrain.telemetry.step_record import StepRecord


class RunLogger:
    """Logs a run into its folder: `start`, then `step` for every step and `evaluation`, then `end`.

    As a context manager it also logs the end of a run that an exception stopped.
    """

    def __init__(
        self,
        run_dir: Path,
        plan: Plan,
        about: RunInfo,
        enabled: bool,
        comm: CommMeter | None = None,
        links: LinkSampler | None = None,
    ) -> None:
        """Log into `run_dir`, which exists. enabled: whether this is the main rank.

        comm: counter that this rank's collectives add to. links: sampler of the nodes' links.
        """
        self.comm = comm or CommMeter()
        self._main = MainLogger(run_dir, plan, about, links) if enabled else None

    def start(self, resumed_step: int, decisions: list[str], tokens: int = 0) -> None:
        """Resume after `resumed_step` (0: start from the beginning), and drop later rows.

        decisions: sentences on the values that were resolved for the user. tokens: trained on so far.
        """
        # What has been sent to prepare the run belongs to no step.
        self.comm.take()
        if self._main is not None:
            self._main.start(resumed_step, decisions, tokens)

    def step(self, record: StepRecord) -> None:
        """Record a step; logs the first, the last and every `logging.every`-th."""
        sent = self.comm.take()
        if self._main is not None:
            self._main.step(record, sent)

    def evaluation(self, step: int, split: str, loss: float) -> None:
        """Log an evaluation after `step`. loss: in nats per token."""
        # The evaluation's bytes do not belong to the next step.
        self.comm.take()
        if self._main is not None:
            self._main.evaluation(step, split, loss)

    def evaluated(self, step: int) -> bool:
        """Return whether the metrics file has an evaluation after `step`; False on other ranks than the main one."""
        return self._main is not None and self._main.evaluated(step)

    def rewind(self, step: int, tokens: int) -> None:
        """Resume after `step`, and drop later rows. tokens: of all steps until then."""
        # The bytes of a discarded step do not belong to the next one.
        self.comm.take()
        if self._main is not None:
            self._main.rewind(step, tokens)

    def warn(self, sentence: str) -> None:
        """Print a warning."""
        if self._main is not None:
            self._main.console.warn(sentence)

    def end(self, summary: dict[str, Any]) -> None:
        """Log the end of a run that reached its last step. summary: further keys for the end's row."""
        if self._main is not None:
            self._main.end({"outcome": "finished", **summary}, exit_code=0)

    def fail(self, sentence: str) -> None:
        """Log the end of a run that another thread is about to end."""
        if self._main is not None:
            self._main.close(RunFailedError(sentence))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main is not None:
            self._main.close(error)
