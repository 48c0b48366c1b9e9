"""Weights & Biases, kept at arm's length: it can neither break a run nor hold it up.

Everything wandb does happens in one daemon thread, fed by a bounded queue. The loop only puts numbers into
the queue; when wandb fails or falls behind, the run prints one warning and goes on without it.
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

# Seconds given to wandb for starting, for sending the rest when the run ends, and that the run waits for it.
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
    """One wandb run, fed from the main rank.

    The run's id is kept in `run_dir/wandb/run-id`, so that a resumed run goes on in the same wandb run.
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

        config: what the run shows as its configuration. warn: called, perhaps from another thread, with one
        sentence when wandb fails.
        """
        self._warn = warn
        self._given_up = threading.Event()
        self._queue: queue.Queue[_Log | _Finish] = queue.Queue(_QUEUE_LENGTH)
        arguments = {"mode": mode, "project": project, "name": name, "config": config}
        self._worker = threading.Thread(target=self._work, args=(run_dir, arguments), name="wandb", daemon=True)
        self._worker.start()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Log the values, which may be nested, at a step. Returns at once."""
        self._put(_Log(step, values))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Write the summary and close the run; waits for wandb half a minute at most."""
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
        # Whatever wandb raises, SystemExit included, ends in a sentence: a run must not fail because of it.
        try:
            run = _open(run_dir, arguments)
            while isinstance(message := self._queue.get(), _Log):
                run.log(_finite(message.values), step=message.step)
            run.summary.update(_finite(message.summary))
            run.finish(exit_code=message.exit_code)
        except BaseException as error:
            self._give_up(_one_line(error))

    def _give_up(self, reason: str) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            self._warn(f"wandb failed ({reason}); the run goes on without it")


def _open(run_dir: Path, arguments: dict[str, Any]) -> Any:
    # Imported here, in the thread, as it takes half a second.
    import wandb

    settings = wandb.Settings(
        # Standard output stays the run's own.
        console="off",
        silent=True,
        init_timeout=_START_TIMEOUT,
        finish_timeout=_FINISH_TIMEOUT,
        finish_timeout_raises=True,
    )
    # init applies `silent` only after logging in, which would ask a person at the terminal for a key.
    wandb.setup(settings)
    return wandb.init(id=_run_id(run_dir / "wandb"), resume="allow", dir=run_dir, settings=settings, **arguments)


def _run_id(folder: Path) -> str:
    """Return the wandb run id kept in the folder, made at the first call."""
    path = folder / "run-id"
    # One that is damaged is made anew.
    with suppress(UnreadableError):
        if _RUN_ID.fullmatch(kept := read_text(path, 100).strip()):
            return kept
    folder.mkdir(parents=True, exist_ok=True)
    made = secrets.token_hex(4)
    path.write_text(made + "\n", encoding="ascii")
    return made


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what has no value: wandb would show it as text."""
    return {key: value for key, value in values.items() if value is not None}


def _one_line(error: BaseException) -> str:
    """Return the first line of an error, without the key that it might quote."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    key = os.environ.get("WANDB_API_KEY")
    return text.replace(key, "[key]") if key else text
