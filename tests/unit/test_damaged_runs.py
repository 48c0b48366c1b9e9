"""A damaged file of a run affects only that file: other runs are still shown, a report is drawn, and the run
resumes."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmtrain.cli.main import main
from llmtrain.launch.slurm.record import slurm_folder
from llmtrain.model.config import GPTConfig, ModelConfig
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.logging import LoggingConfig
from llmtrain.recipe.schema import PrecisionConfig, Recipe, TrainConfig
from llmtrain.telemetry.about import RunInfo
from llmtrain.telemetry.logger import RunLogger
from llmtrain.telemetry.metrics import read_metrics
from llmtrain.telemetry.step_record import StepRecord
from llmtrain_data.config import DataConfig

MODEL = GPTConfig(
    family="gpt2", layers=2, hidden=32, heads=2, kv_heads=2, ffn=128, positions=16, vocab=50, tie_embeddings=True,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="gelu_tanh", dropout=0.0,
)  # fmt: skip
RECIPE = Recipe(
    name="tiny",
    model=ModelConfig(family="gpt2", layers=2, hidden=32, heads=2, vocab=50),
    data=DataConfig(path="corpus", sequence_length=16),
    train=TrainConfig(steps=8, global_batch=4),
    precision=PrecisionConfig(compute="fp32"),
    logging=LoggingConfig(every=1),
)


def logger(folder: Path) -> RunLogger:
    device = torch.device("cpu")
    about, facts = RunInfo(device=device, model_state_bytes=77), Facts(world=1, device="cpu")
    return RunLogger(folder, make_plan(RECIPE, facts), about, True)


def record(step: int) -> StepRecord:
    return StepRecord(step=step, tokens=step * 64, loss=5 / step, lr=1e-3, grad_norm=0.5, seconds=0.5)


def leave(folder: Path) -> Path:
    """Leave a run that stopped after step 4 without an end row."""
    folder.mkdir()
    log = logger(folder)
    log.start(0, [])
    for step in range(1, 5):
        log.step(record(step))
    log.evaluation(4, "validation", 2.0)
    return folder


def bytes_of(row: dict[str, Any], **keys: Any) -> bytes:
    return json.dumps({**row, **keys}).encode()


VALUES: dict[str, Any] = {
    "text": "many",
    "an object": {"a": 1},
    "a list": [[]],
    "true": True,
    "below zero": -1,
    "inf": math.inf,
    "nan": math.nan,
    "400 digits": 10**400,
    "1e308": 1e308,
    "2^63": 2**63,
    "nothing": None,
}
HUGE = 4 * 10**8
WHOLE: dict[str, bytes] = {
    "nesting": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "nesting that ends": b"[" * 100_000 + b"]" * 100_000,
    "nesting inside": b'{"step": 2, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "5000 digits": b'{"step": ' + b"1" * 5000 + b', "steps": ' + b"1" * 5000 + b"}",
    "1e400": b'{"step": 1e400, "loss": 1e400, "steps": 1e400}',
    "no UTF-8": b'{"step": 1, "outcome": "\xff", "name": "\xff"}',
    "half a surrogate": b'{"step": 1, "event": "end", "outcome": "\\ud800", "name": "\\ud800"}',
    "a NUL": b"\0",
    "a list": b"[1]",
    "a number": b"7",
    "an end without outcome": b'{"event": "end", "step": 4}',
    "an end without anything": b'{"event": "end"}',
    "an evaluation without anything": b'{"event": "eval"}',
    "nothing in it": b"{}",
    "a long line": b'{"step": 1, "x": "' + b"x" * 20_000_000 + b'"}',
}


def lines() -> dict[str, bytes]:
    """Lines that no version wrote to metrics.jsonl."""
    step = {"step": 3, "loss": 1.0, "step_time_s": 0.5, "elapsed_s": 1.0, "skipped_steps": 0}
    evaluation = {"event": "eval", "step": 3, "split": "validation", "loss": 1.0, "perplexity": 2.7}
    end = {"event": "end", "step": 4, "outcome": "failed", "reason": "x"}
    found = dict(WHOLE)
    for row in (step, evaluation, end):
        for key in (*row, "memory_bytes", "comm_bytes", "link_bytes_per_s", "links", "event"):
            for name, value in VALUES.items():
                found[f"{key} of {row.get('event', 'step')} is {name}"] = bytes_of(row, **{key: value})
    return found


def bytes_read() -> int:
    """Bytes that this process has asked the system to read."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Show all runs as a table and as JSON, and a report of the damaged run; return the JSON."""
    before = bytes_read()
    assert main(["status", str(folder.parent)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1:3] for line in shown.splitlines() if line.startswith("sound")] == [["killed", "4/8"]]
    assert "damaged" in shown.split()
    assert main(["status", str(folder.parent), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found] == ["damaged", "sound"]
    assert main(["report", str(folder)]) in (0, 2)
    assert len(capsys.readouterr().err.splitlines()) <= 1
    assert main(["logs", str(folder)]) in (0, 1, 2)
    capsys.readouterr()
    # A report reads all metrics, once. Nothing else is read without a limit.
    metrics = folder / "metrics.jsonl"
    assert bytes_read() - before < HUGE / 2 + (metrics.stat().st_size if metrics.is_file() else 0)
    return found


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run to damage, and a sound run beside it."""
    # Every start measures the peak.
    monkeypatch.setattr("llmtrain.telemetry.about.measured_peak", lambda *_: 1e11)
    # Figures for each line would take minutes; a test below draws those of all lines together.
    for figure in ("loss", "rate", "memory"):
        monkeypatch.setattr(f"llmtrain.telemetry.report.{figure}_figure", lambda *_: b"")
    leave(tmp_path / "sound")
    return leave(tmp_path / "damaged")


def test_lines_of_metrics(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damaged / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    for name, line in lines().items():
        path.write_bytes(b"".join((first, line, b"\n", *rest, line, b"\n")))
        found = check(damaged, capsys)[0]
        assert found["state"] in ("killed", "stopped", "failed", "finished", "ended", "nan", "many", "true"), name
        if name in WHOLE and not name.startswith("an end without o"):
            assert re.search(
                r"damaged: .* of metrics.jsonl are no rows|damaged: metrics.jsonl has no line", found["detail"]
            ), name
        path.write_bytes(b"".join((first, line, b"\n", *rest, line, b"\n")))
        log = logger(damaged)
        log.start(4, [])
        log.step(record(5))
        log.end({})
        capsys.readouterr()
        # Rows that did not change keep their bytes.
        sound = [first, *rest]
        assert [each for each in path.read_bytes().splitlines(keepends=True) if each in sound] == sound, name
        assert (read_metrics(path)[-1]["outcome"], read_metrics(path)[-1]["step"]) == ("finished", 5)


def test_a_report_of_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = leave(tmp_path / "damaged") / "metrics.jsonl"
    capsys.readouterr()
    path.write_bytes(path.read_bytes() + b"".join(line + b"\n" for line in lines().values()))
    assert main(["report", str(path.parent)]) == 0
    assert capsys.readouterr().err == ""


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe": fifo,
    "a folder": Path.mkdir,
    "a huge file": huge,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: path.write_bytes(b""),
    **{name: lambda path, content=content: path.write_bytes(content) for name, content in WHOLE.items()},  # type: ignore[misc]
    **{
        f"{key} is {name}": lambda path, key=key, value=value: path.write_bytes(bytes_of({"steps": 8}, **{key: value}))  # type: ignore[misc]
        for key in ("steps", "name", "model", "unigram_entropy", "decisions", "world", "measured_peak")
        for name, value in VALUES.items()
    },
}


UNREADABLE = {"a pipe", "a folder", "a huge file", "a link to a device", "nothing", "nesting", "no UTF-8", "a list"}


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "run.json", "lock", "recipe.resolved.yaml", "slurm/jobs", "slurm/7.log"]
)
def test_files(name: str, damaged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_folder(damaged).mkdir()
    (slurm_folder(damaged) / "jobs").write_text("7\n")
    for kind, make in STRANGE.items():
        # A job's log may be of any length.
        if (name, kind) == ("slurm/7.log", "a huge file"):
            continue
        path = damaged / name
        path.unlink(missing_ok=True)
        make(path)
        found = check(damaged, capsys)[0]
        if name == "run.json" and kind in UNREADABLE:
            assert "damaged: run.json cannot be read" in found["detail"], kind
        if name == "run.json" and not path.is_dir():
            logger(damaged).start(4, [])
            assert json.loads(path.read_text())["steps"] == 8, kind
            capsys.readouterr()
        if path.is_dir():
            path.rmdir()
