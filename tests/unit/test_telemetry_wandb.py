"""A run's log in Weights & Biases, which can neither fail nor delay the run."""

import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from llmtrain.errors import PreemptedError, RunFailedError
from llmtrain.telemetry import wandb_sink

from tests.logged import logger, recipe, rows, train


def wandb_reads(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what wandb's own reader of transaction logs finds: the run's summary, and all its records."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    texts = [
        subprocess.run(
            [*command, *more, str(folder)], capture_output=True, text=True, check=True, env=environment
        ).stdout
        for more in (["--summary"], [])
    ]
    return json.loads(texts[0]), [json.loads(line) for line in texts[1].splitlines()]


def _item(record: dict[str, Any]) -> dict[str, Any]:
    item: dict[str, Any] = record.get("history", {}).get("item", {})
    return item


def test_wandb_reads_its_offline_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    with logger(tmp_path, recipe(wandb="offline", wandb_project="shelf")) as log:
        log.start(0, [])
        train(log, 0, 10)
        log.end({})
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    summary, records = wandb_reads(folder)
    assert summary["config"]["train"]["global_batch"] == 4
    assert summary["config"]["checkpoint"]["async"] is True
    history = [item for item in map(_item, records) if item]
    losses = {item["step"]: item for item in history if "loss" in item}
    logged = {row["step"]: row["loss"] for row in rows(tmp_path) if "event" not in row}
    assert {step: item["loss"] for step, item in losses.items()} == logged
    assert losses[8]["comm_bytes.weights.all_gather"] == 1000
    validations = {item["step"]: item["validation/loss"] for item in history if "validation/loss" in item}
    assert validations == {3: 6 / 3, 7: 6 / 7}
    assert summary["summary"]["outcome"] == "finished"
    assert "wandb failed" not in capsys.readouterr().out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(secret.encode() in path.read_bytes() for path in files)


@contextmanager
def pretended_wandb(monkeypatch: pytest.MonkeyPatch, init: Any) -> Iterator[None]:
    module = types.ModuleType("wandb")
    module.Settings = lambda **keys: keys  # type: ignore[attr-defined]
    module.setup = lambda settings: None  # type: ignore[attr-defined]
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(wandb_sink, "_WAIT_AT_END", 0.2)
    yield


class _BrokenRun:
    def define_metric(self, name: str, step_metric: str = "") -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        raise RuntimeError("connection lost\nlong story")


def _hangs(**arguments: Any) -> None:
    threading.Event().wait(20)


def _refuses(**arguments: Any) -> None:
    raise SystemExit("bad key topsecret")


@pytest.mark.parametrize(
    ("init", "reason"),
    [
        (_refuses, "bad key [key]"),
        (lambda **_: _BrokenRun(), "connection lost"),
        (_hangs, "it did not finish in time"),
    ],
)
def test_wandb_failing_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], init: Any, reason: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "topsecret")
    with pretended_wandb(monkeypatch, init), logger(tmp_path, recipe(wandb="online")) as log:
        log.start(0, [])
        train(log, 0, 10)
        log.end({})
    printed = capsys.readouterr().out
    assert printed.count("warning:") == 1
    assert f"warning: wandb failed ({reason}); the run continues without it" in printed
    assert rows(tmp_path)[-1]["outcome"] == "finished"


def test_a_resumed_run_stays_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class Run:
        def __init__(self) -> None:
            self.summary: dict[str, Any] = {}

        def define_metric(self, name: str, step_metric: str = "") -> None: ...

        def log(self, values: dict[str, Any]) -> None: ...

        def finish(self, exit_code: int) -> None:
            seen[-1]["exit_code"] = exit_code

    def init(**arguments: Any) -> Run:
        seen.append(arguments)
        return Run()

    for first in (0, 4):
        with pretended_wandb(monkeypatch, init), logger(tmp_path, recipe(wandb="online")) as log:
            log.start(first, [])
            train(log, first, 10)
            log.end({})
    assert seen[0]["id"] == seen[1]["id"] == (tmp_path / "wandb" / "run-id").read_text().strip()
    other = tmp_path / "other"
    other.mkdir()
    with pretended_wandb(monkeypatch, init), logger(other, recipe(wandb="online")) as log:
        log.start(0, [])
        log.end({})
    assert seen.pop()["id"] != seen[0]["id"]
    assert [(run["mode"], run["resume"], run["exit_code"]) for run in seen] == [("online", "allow", 0)] * 2
    # A run that was told to stop goes on later, so it has not failed.
    for error, code in ((PreemptedError(), 0), (KeyboardInterrupt(), 0), (RunFailedError("a rank died"), 1)):
        with pretended_wandb(monkeypatch, init), suppress(type(error)), logger(other, recipe(wandb="online")) as log:
            log.start(0, [])
            raise error
        assert seen[-1]["exit_code"] == code
