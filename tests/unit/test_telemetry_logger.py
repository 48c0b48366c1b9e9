"""A run's metrics and console output, through the logger that the loop uses."""

import json
import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmtrain.errors import PreemptedError, RunFailedError
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.traffic import Traffic
from llmtrain.telemetry import main_logger
from llmtrain.telemetry.about import RunInfo, describe, mixed_devices
from llmtrain.telemetry.console import RunConsole
from llmtrain.telemetry.logger import RunLogger
from llmtrain.telemetry.run_file import checked_run_file, facts

from tests.logged import logger, recipe, record, rows, train


def test_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logger(tmp_path, recipe()) as log:
        log.start(0, [])
        train(log, 0, 10)
        log.end({"note": "x"})
    found = rows(tmp_path)
    assert [(row.get("event"), row["step"]) for row in found] == [
        (None, 1), ("eval", 3), (None, 4), ("eval", 7), (None, 8), (None, 10), ("end", 10),
    ]  # fmt: skip
    step, run = found[4], json.loads((tmp_path / "run.json").read_text())
    assert step["tokens"] == 8 * 4 * 16
    assert step["step_time_s"] == 0.5
    assert step["tokens_per_s"] == 128.0
    assert step["tflops_per_rank"] == pytest.approx(128 / 2 * run["flops_per_token"] / 1e12)
    assert step["mfu"] is None
    assert step["mfu_measured"] == pytest.approx(step["tflops_per_rank"] * 1e12 / run["measured_peak"])
    assert step["memory_bytes"]["model_states"] == 77
    # The bytes of this step only, without those of the steps before it and of the evaluation.
    assert step["comm_bytes"] == {"weights": {"all_gather": 1000}, "gradients": {"all_to_all": 2000}}
    assert step["comm_sent_bytes"] == {"node": 500, "all": 1500}
    assert step["comm_quantized_share"] == 0.75
    assert found[1]["perplexity"] == pytest.approx(math.exp(6 / 3))
    end = found[-1]
    assert (end["outcome"], end["note"], end["tokens"]) == ("finished", "x", 640)
    assert (end["first_validation_loss"], end["last_validation_loss"]) == (6 / 3, 6 / 7)
    assert end["validation_over_unigram"] == pytest.approx(6 / 7 / 4)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"validation / entropy {6 / 7 / 4:.3f} (last loss)" in said
    assert end["tokens_per_s"] == 128.0


def test_a_folder_whose_name_is_no_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(folder)
    with logger(tmp_path, recipe()) as log:
        log.start(0, [])
    assert checked_run_file(tmp_path)["cwd"] == f"{tmp_path}/caf\ufffd"


@pytest.mark.parametrize(
    ("steps", "seconds", "told"),
    [
        (1000, 90.0, "the remaining 995 steps take 1d 00:52:30 at the pace of the first steps, until "),
        (1000, 86.0, None),
        # The end is after the last date that Python can represent.
        (10**9, 300.0, "at the pace of the first steps; use more ranks"),
    ],
)
def test_a_run_of_more_than_a_day_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, seconds: float, told: str | None
) -> None:
    with logger(tmp_path, recipe(steps=steps)) as log:
        log.start(0, [])
        for step in range(1, 12):
            # The first step compiles.
            log.step(record(step, seconds=5000.0 if step == 1 else seconds))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == (told is not None)
    assert told is None or told in warnings[0]


def test_step_time_is_the_mean_since_the_row_before(tmp_path: Path) -> None:
    with logger(tmp_path, recipe()) as log:
        log.start(0, [])
        for step, seconds in enumerate((9.0, 1.0, 1.0, 4.0), start=1):
            log.step(record(step, seconds=seconds))
    assert [row["step_time_s"] for row in rows(tmp_path)[:2]] == [9.0, 2.0]


def test_resumed_run_logs_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, parts in ((whole, [(0, 10)]), (cut, [(0, 9), (6, 10)])):
        folder.mkdir()
        for first, last in parts:
            with logger(folder, recipe()) as log:
                log.start(first, [], 64 * first)
                train(log, first, last)
                if last == 10:
                    log.end({})
    times = {"elapsed_s", "memory_bytes", "mfu_measured"}
    for ours, theirs in zip(rows(cut), rows(whole), strict=True):
        for row in (ours, theirs):
            row.get("measured", {}).pop("memory_bytes", None)
        assert {k: v for k, v in ours.items() if k not in times} == {k: v for k, v in theirs.items() if k not in times}
    elapsed = [row["elapsed_s"] for row in rows(cut) if "elapsed_s" in row]
    assert elapsed == sorted(elapsed)


def test_a_finished_run_started_again_ends_as_before(tmp_path: Path) -> None:
    """Also on other ranks: what the run has measured and where it ran stays."""
    found, texts = [], []
    for first, world in ((0, 2), (10, 4)):
        with logger(tmp_path, recipe(), world=world) as log:
            log.start(first, [], 64 * first)
            train(log, first, 10)
            log.end({})
        *_, end = rows(tmp_path)
        found.append({key: value for key, value in end.items() if key != "elapsed_s"})
        texts.append((tmp_path / "run.json").read_text())
    assert [row.get("event") for row in rows(tmp_path)].count("end") == 1
    assert found[0] == found[1]
    assert texts[0] == texts[1]
    assert found[1]["tokens_per_s"] == pytest.approx(128.0)
    assert found[1]["first_validation_loss"] == 6 / 3
    assert found[1]["measured"]["comm_bytes"] == {"weights": {"all_gather": 1000}, "gradients": {"all_to_all": 2000}}


def test_time_counts_of_discarded_steps_and_since_the_last_row_before_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(main_logger, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def train_until(log: RunLogger, first: int, last: int) -> None:
        for step in range(first + 1, last + 1):
            clock.now += 1
            log.step(record(step))

    with suppress(PreemptedError), logger(tmp_path, recipe()) as log:
        log.start(0, [])
        train_until(log, 0, 7)
        log.rewind(4, 64 * 4)
        train_until(log, 4, 7)
        raise PreemptedError
    assert rows(tmp_path)[-1]["elapsed_s"] == 10
    # The time until the next start does not count.
    clock.now += 100
    with logger(tmp_path, recipe()) as log:
        log.start(7, [], 64 * 7)
        train_until(log, 7, 10)
        log.end({})
    assert [row["elapsed_s"] for row in rows(tmp_path)] == [1, 4, 11, 13, 13]


def test_bytes_of_no_step_are_in_no_row(tmp_path: Path) -> None:
    """Those that prepare a run or another start of it, and those of discarded steps."""
    with logger(tmp_path, recipe(every=1)) as log:
        for begin in (log.start, lambda *_: log.rewind(0, 0)):
            log.comm.add([Traffic("update", "all_gather", "node", 9, 9, packed=False)])
            begin(0, [])
            train(log, 0, 1)
    assert rows(tmp_path)[0]["comm_bytes"] == {"weights": {"all_gather": 1000}, "gradients": {"all_to_all": 2000}}


def test_totals_are_of_the_batches_that_a_run_had(tmp_path: Path) -> None:
    """After 4 steps, the batch is four times as large."""
    with logger(tmp_path, recipe()) as log:
        log.start(0, [])
        train(log, 0, 4)
    larger = recipe()
    larger = replace(larger, train=replace(larger.train, global_batch=16))
    with logger(tmp_path, larger) as log:
        log.start(4, [], 64 * 4)
        for step in range(5, 11):
            log.step(record(step, tokens=64 * 4 + 256 * (step - 4)))
        log.end({})
    total = 64 * 4 + 256 * 6
    assert json.loads((tmp_path / "run.json").read_text())["total_tokens"] == total
    assert rows(tmp_path)[-1]["tokens_per_s"] == total / 5


def test_devices_of_several_kinds_share_one_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"]
    plan = replace(make_plan(recipe(), Facts(world=2, device="cpu")), compute="bf16")
    monkeypatch.setattr("llmtrain.telemetry.about.measured_peak", lambda device, dtype: 1e12)

    def run_on(*names: str) -> dict[str, Any]:
        gathered: list[list[int]] = []
        for name in (*names, *names):
            monkeypatch.setattr("llmtrain.telemetry.about.device_name", lambda device, name=name: name)
            ranks = SimpleNamespace(device=None, gather_all=lambda values: gathered.append(values) or gathered)
            mixed = mixed_devices(plan, ranks)  # type: ignore[arg-type]
        return describe(plan, RunInfo(device=torch.device("cpu"), model_state_bytes=0, mixed=mixed))

    run = run_on(*cards)
    assert (run["device"], run["datasheet_peak"], run["measured_peak"]) == (f"{cards[1]} and others", 650.75e12, None)
    assert ("peak per rank", "651 TFLOP/s by data sheet") in facts(run)
    run = run_on(cards[1])
    assert (run["device"], run["datasheet_peak"], run["measured_peak"]) == (cards[1], 989.5e12, 1e12)
    run = run_on(cards[0], "a new card")
    assert (run["datasheet_peak"], run["measured_peak"]) == (None, None)
    assert ("peak per rank", "unknown") in facts(run)


def test_a_resumed_run_shows_the_step_that_it_continues_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(RunConsole, "start", lambda self, name, facts, decisions, step, elapsed: shown.append(step))
    for first in (0, 1):
        with logger(tmp_path, recipe()) as log:
            log.start(first, [])
            log.step(record(first + 1))
    assert shown == [0, 1]


def test_a_resumed_run_whose_first_loss_was_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logger(tmp_path, recipe()) as log:
        log.start(0, [])
        log.step(record(1))
        log.evaluation(1, "validation", math.nan)
    with logger(tmp_path, recipe()) as log:
        log.start(1, [])
        log.evaluation(1, "validation", 2.0)
        log.end({})
    end = rows(tmp_path)[-1]
    assert (end["outcome"], end["first_validation_loss"], end["last_validation_loss"]) == ("finished", None, 2.0)
    assert "nan first, 2.0000 last" in capsys.readouterr().out


def test_a_file_that_cannot_be_opened_at_a_rewind_is_why_the_run_ends(tmp_path: Path) -> None:
    def run() -> None:
        with logger(tmp_path, recipe()) as log:
            log.start(0, [])
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").mkdir()
            log.rewind(0, 0)

    with pytest.raises(RunFailedError, match=r"metrics\.jsonl cannot be written \(it is not a regular file\)"):
        run()


@pytest.mark.parametrize("error", [PreemptedError("told to stop"), ValueError("broken"), KeyboardInterrupt()])
def test_a_stopped_run_says_why(tmp_path: Path, error: BaseException) -> None:
    def run() -> None:
        with logger(tmp_path, recipe()) as log:
            log.start(0, [])
            log.step(record(1))
            raise error

    with pytest.raises(type(error)):
        run()
    end = rows(tmp_path)[-1]
    assert (end["event"], end["outcome"]) == ("end", "failed" if isinstance(error, ValueError) else "stopped")
    assert end["reason"].startswith(str(error) or "interrupted; the same command resumes")


def test_other_ranks_write_and_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logger(tmp_path, recipe(wandb="offline"), enabled=False) as log:
        log.start(0, ["decided"])
        train(log, 0, 10)
        log.warn("careful")
        log.end({})
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_skipped_steps_and_loss_scale_are_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logger(tmp_path, recipe()) as log:
        log.start(0, [])
        log.step(record(1, loss=math.nan, grad_norm=math.inf, skipped_steps=1, loss_scale=32768.0))
        log.evaluation(1, "validation", 1e6)
        log.end({})
    step, evaluation, end = rows(tmp_path)
    assert (step["loss"], step["grad_norm"], step["skipped_steps"], step["loss_scale"]) == (None, None, 1, 32768.0)
    assert evaluation["perplexity"] is None
    assert end["skipped_steps"] == 1
    assert "loss nan" in capsys.readouterr().out


def test_no_utilisation_is_logged_from_a_step_on_that_was_faster_than_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtrain.telemetry.about.measured_peak", lambda device, dtype: 1e6)
    with logger(tmp_path, recipe()) as log:
        log.start(0, [])
        # Half the measured peak; then twice the peak, as other processes have stopped; then half again.
        rate = json.loads((tmp_path / "run.json").read_text())["flops_per_token"] * 64 / 2
        for step, share in ((1, 0.5), (4, 2.0), (8, 0.5)):
            log.step(record(step, seconds=rate / (share * 1e6)))
    assert [row["mfu_measured"] for row in rows(tmp_path)[:3]] == [pytest.approx(0.5), None, None]


def test_the_best_measured_peak_of_all_starts_on_a_device_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    for peak, name in ((2e9, "CPU, 2 threads"), (1e9, "CPU, 2 threads"), (3e9, "CPU, 2 threads"), (1e9, "another")):
        monkeypatch.setattr("llmtrain.telemetry.about.measured_peak", lambda device, dtype, peak=peak: peak)
        monkeypatch.setattr("llmtrain.telemetry.about.device_name", lambda device, name=name: name)
        with logger(tmp_path, recipe()) as log:
            log.start(0, [])
        kept.append(json.loads((tmp_path / "run.json").read_text())["measured_peak"])
    assert kept == [2e9, 2e9, 3e9, 1e9]
