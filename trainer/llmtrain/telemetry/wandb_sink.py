"""Log to Weights & Biases in the background, so that wandb can neither fail nor delay a run.

One daemon thread makes all calls to wandb. The loop only puts numbers into the thread's bounded queue; if wandb fails
or falls behind, the run prints one warning and continues without it.
"""

import os
import queue
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmtrain_data.untrusted import UnreadableError, read_text

# Most seconds for wandb to start, for wandb to finish, and for the end of the run to wait for the worker thread.
_START_TIMEOUT = 30.0
_FINISH_TIMEOUT = 20.0
_WAIT_AT_END = 25.0
_QUEUE_LENGTH = 10_000
_RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True)
class _Log:
    step: int
    values: dict[str, Any]


@dataclass(frozen=True)
class _Finish:
    summary: dict[str, Any]
    exit_code: int


class WandbSink:
    """One wandb run, logged by the main rank.

    `run_dir/wandb/run-id` holds the run's id, so that a resumed run logs to the same wandb run.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        mode: Literal["offline", "online"],
        project: str,
        name: str,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        """Start wandb in the background.

        config: the run's configuration in wandb. warn: called with one sentence if wandb fails, possibly from another
        thread.
        """
        self._warn = warn
        self._given_up = threading.Event()
        self._queue: queue.Queue[_Log | _Finish] = queue.Queue(_QUEUE_LENGTH)
        arguments = {"mode": mode, "project": project, "name": name, "config": config}
        self._worker = threading.Thread(target=self._work, args=(run_dir, arguments), name="wandb", daemon=True)
        self._worker.start()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Log the values, which may be nested, at a step. Returns immediately."""
        self._put(_Log(step, values))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Write the summary and close the run; waits for wandb for half a minute at most."""
        self._put(_Finish(summary, exit_code))
        if not self._given_up.is_set():
            self._worker.join(_WAIT_AT_END)
            if self._worker.is_alive():
                self._give_up("it did not finish in time")

    def _put(self, message: _Log | _Finish) -> None:
        if self._given_up.is_set():
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._give_up("it fell behind")

    def _work(self, run_dir: Path, arguments: dict[str, Any]) -> None:
        # A run must not fail because of wandb, so turn anything it raises, also SystemExit, into a warning.
        try:
            run = _open(run_dir, arguments)
            while isinstance(message := self._queue.get(), _Log):
                # Without wandb's own step, which may only grow: after a rewind, steps come again.
                run.log({"step": message.step, **_finite(message.values)})
            run.summary.update(_finite(message.summary))
            run.finish(exit_code=message.exit_code)
        except BaseException as error:
            self._give_up(_one_line(error))

    def _give_up(self, reason: str) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            self._warn(f"wandb failed ({reason}); the run continues without it")


def _open(run_dir: Path, arguments: dict[str, Any]) -> Any:
    # The import takes half a second, so the thread does it.
    import wandb

    settings = wandb.Settings(
        # wandb must not capture standard output.
        console="off",
        silent=True,
        init_timeout=_START_TIMEOUT,
        finish_timeout=_FINISH_TIMEOUT,
        finish_timeout_raises=True,
    )
    # init applies `silent` only after the login, which would ask for a key at the terminal.
    wandb.setup(settings)
    run = wandb.init(id=_run_id(run_dir / "wandb"), resume="allow", dir=run_dir, settings=settings, **arguments)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _run_id(folder: Path) -> str:
    """Return the wandb run id in the folder; the first call makes it."""
    path = folder / "run-id"
    # A damaged id is replaced.
    with suppress(UnreadableError):
        if _RUN_ID.fullmatch(kept := read_text(path, 100).strip()):
            return kept
    folder.mkdir(parents=True, exist_ok=True)
    made = secrets.token_hex(4)
    path.write_text(made + "\n", encoding="ascii")
    return made


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out None: wandb would show it as text."""
    return {key: value for key, value in values.items() if value is not None}


def _one_line(error: BaseException) -> str:
    """Return the first line of an error, without the API key that it might contain."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    key = os.environ.get("WANDB_API_KEY")
    return text.replace(key, "[key]") if key else text
