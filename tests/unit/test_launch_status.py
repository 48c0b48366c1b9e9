"""`llmtrain status` and `llmtrain logs`, from folders and from Slurm."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cli.main import main
from llmtrain.errors import BadInputError
from llmtrain.launch import status
from llmtrain.launch.slurm import queue
from llmtrain.launch.slurm.queue import QueuedJob
from llmtrain.launch.slurm.record import jobs_of, log_of, record_job, slurm_folder
from llmtrain.launch.status import read_log, run_folder, seconds_left, statuses


def row(step: int, **changes: object) -> str:
    return json.dumps({"step": step, "loss": 1.0 / step, "step_time_s": 2.0, **changes}) + "\n"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs in every state; Slurm knows jobs 1 to 5."""
    states = {"1": ("COMPLETED", "n1"), "2": ("PENDING", "Resources"), "3_1": ("RUNNING", "n2"), "5": ("FAILED", "x")}
    known = {number: QueuedJob(number, *state) for number, state in states.items()}
    monkeypatch.setattr(queue, "jobs", lambda numbers: {each: known[each] for each in numbers if each in known})
    for name, jobs in (("done", ["1"]), ("next", ["1", "2"]), ("now", ["3_1"]), ("gone", []), ("bad", ["4", "5"])):
        slurm_folder(tmp_path / name).mkdir(parents=True)
        for number in jobs:
            record_job(tmp_path / name, number)
    end = json.dumps({"event": "end", "step": 4, "outcome": "finished"}) + "\n"
    (tmp_path / "done" / "metrics.jsonl").write_text(row(2) + row(4) + end)
    (tmp_path / "gone" / "metrics.jsonl").write_text(row(2) + '{"step": 4, "lo')
    (tmp_path / "now" / "metrics.jsonl").write_text(row(2) * 3000 + row(5))
    (tmp_path / "now" / "run.json").write_text('{"steps": 10}')
    (tmp_path / "no run").mkdir()
    return tmp_path


def test_states(runs: Path) -> None:
    found = {run.name: run for run in statuses([runs])}
    assert {name: (run.state, run.job, run.detail) for name, run in found.items()} == {
        "bad": ("failed", "5", "x"),
        "done": ("finished", "1", ""),
        "gone": (
            "killed",
            None,
            "killed, or lost with its machine, before a checkpoint was saved; the same command starts at step 0 again",
        ),
        "next": ("pending", "2", "Resources"),
        "now": ("running", "3_1", "n2"),
    }
    assert (found["done"].step, found["done"].loss) == (4, 0.25)
    assert (found["now"].step, found["now"].steps, found["gone"].step) == (5, 10, 2)


def test_a_run_outside_slurm(runs: Path) -> None:
    (runs / "gone" / "run.json").write_text('{"steps": 12}')
    folder = runs / "gone"
    hold = "import sys; from llmtrain.launch.run_lock import RunLock, Path; RunLock(Path(sys.argv[1])).take(print)"
    program = f"{hold}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        (found,) = statuses([folder])
        holder.kill()
    assert (found.state, found.seconds_left) == ("running", 20.0)
    assert found.detail.startswith(f"process {holder.pid} on ")
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    (found,) = statuses([folder])
    assert (found.state, found.detail[:6], found.detail[-11:]) == ("killed", "killed", "from step 3")


def test_a_run_that_was_killed_before_its_first_row_has_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"steps": 12}')
    (found,) = statuses([tmp_path])
    assert (found.state, found.steps) == ("killed", 12)
    assert found.detail.startswith("killed")


def test_time_left_is_at_the_pace_of_all_that_a_run_does() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 10, "elapsed_s": 100.0, "step_time_s": 1.0},
        {"event": "eval", "step": 20},
        {"step": 30, "elapsed_s": 160.0, "step_time_s": 1.0},
        {"event": "eval", "step": 30},
    ]
    assert seconds_left(rows, 40) == 30.0
    assert seconds_left(rows[:1], 40) == 30.0
    assert seconds_left(rows[1:2], 40) is None
    # The run goes on at a quarter of the pace, on fewer ranks.
    slower: list[dict[str, Any]] = [
        {"step": step, "elapsed_s": 160.0 + 4 * (step - 30), "step_time_s": 4.0} for step in (32, 34)
    ]
    assert seconds_left([*rows, *slower], 40) == 24.0
    # Somebody has edited them.
    for first, last in ((50.0, 10.0), (-1e308, 1e308)):
        assert seconds_left([{"step": 1, "elapsed_s": first}, {"step": 5, "elapsed_s": last}], 9) is None


def test_the_command_line(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    assert main(["status", "."]) == 0
    shown = capsys.readouterr().out
    assert ["now", "running", "5/10", "0.2000", "-", "3_1", "n2"] in [line.split() for line in shown.splitlines()]
    assert main(["status", "done", "--json"]) == 0
    assert [run["state"] for run in json.loads(capsys.readouterr().out)] == ["finished"]
    assert main(["status"]) == 2
    assert "there is no folder runs here; give the folder of a run, or of runs (logging.dir)" in capsys.readouterr().err


def test_an_end_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    end = {"event": "end", "step": 4, "outcome": "finished", "links": {"0": {"eth0": "x" * 300_000}}}
    (tmp_path / "metrics.jsonl").write_text(row(4) + json.dumps(end) + "\n")
    (found,) = statuses([tmp_path])
    assert (found.state, found.step, found.loss) == ("finished", 4, 0.25)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(end) + "\n")
    assert statuses([tmp_path])[0].state == "finished"


def test_the_step_at_which_a_run_stopped(tmp_path: Path) -> None:
    reason = "stopped after step 42 and saved; the same command resumes from there"
    end = {"event": "end", "step": 42, "outcome": "stopped", "reason": reason}
    (tmp_path / "metrics.jsonl").write_text(row(40) + json.dumps(end) + "\n")
    (found,) = statuses([tmp_path])
    assert (found.state, found.step, found.loss, found.detail) == ("stopped", 42, 1 / 40, reason)


def test_names_and_reasons_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = {"event": "end", "step": 4, "outcome": "failed", "reason": "[/__w/pytorch/gloo] Read error :x:"}
    (tmp_path / "x[small]").mkdir()
    (tmp_path / "x[small]" / "metrics.jsonl").write_text(row(4) + json.dumps(end) + "\n")
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("x[small] ")
    assert "[/__w/pytorch/gloo] Read error :x:" in shown


def test_logs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_of(runs / "next", "1").write_text("one\n")
    assert main(["logs", str(runs / "next")]) == 0
    assert capsys.readouterr().out == "one\n"
    log_of(runs / "next", "2").write_text("two\n")
    assert main(["logs", str(runs / "next")]) == 0
    assert capsys.readouterr().out == "two\n"
    assert "".join(read_log(runs / "next", "1", follow=False)) == "one\n"
    assert jobs_of(runs / "next") == ["1", "2"]


def test_logs_are_followed_past_a_silent_slurm(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_POLL", 0.0)
    monkeypatch.setattr(status, "_QUERY", -1.0)
    log = log_of(runs / "next", "2")
    log.write_text("one\n")
    answers = iter((True, None, False))

    def answer(number: str) -> bool | None:
        with log.open("a") as file:
            file.write("more\n")
        return next(answers)

    monkeypatch.setattr(queue, "still_active", answer)
    assert "".join(read_log(runs / "next", "2", follow=True)) == "one\n" + "more\n" * 3


def test_logs_that_are_not_there(runs: Path) -> None:
    with pytest.raises(BadInputError, match="was not submitted to Slurm"):
        list(read_log(runs / "gone", None, follow=False))
    with pytest.raises(
        BadInputError, match=r"job 2 of .* has written nothing; Slurm says PENDING, Resources; add --follow to wait"
    ):
        list(read_log(runs / "next", None, follow=False))
    with pytest.raises(BadInputError, match="expected one of 1, 2"):
        list(read_log(runs / "next", "9", follow=False))
    with pytest.raises(BadInputError, match=r"in runs; give its path \(logging\.dir/name\)"):
        run_folder(runs / "no run")
    with pytest.raises(BadInputError, match=r"holds none; give a run's folder, or logging\.dir"):
        statuses([runs / "next" / "slurm"])


def test_a_loss_that_is_no_loss_leaves_the_table_narrow(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "huge").mkdir()
    (runs / "huge" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.7e308}\n')
    assert main(["status", str(runs / "huge")]) == 0
    assert "1.7e+308" in capsys.readouterr().out
