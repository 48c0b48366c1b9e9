"""Starts at the same instant: exactly one gets the run's folder, on file systems with and without locks."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from llmtrain.launch.run_lock import LOCK, LOOK

# A process that tries to take the lock of each folder on stdin, prints the result, and frees it at the next line.
STARTS = """
import fcntl, sys, time
from pathlib import Path
from llmtrain.launch import lock_holder as holder, run_lock as module

def no_locks(*arguments):
    raise OSError(37, "No locks available")

number, lockless, place, pause = sys.argv[1:]
if int(lockless):
    fcntl.lockf = fcntl.fcntl = no_locks
if int(place):
    holder._place = lambda: f"machine {number}"
module.RENEWAL = 2 * float(pause)
print("ready", flush=True)
for line in sys.stdin:
    lock = module.RunLock(Path(line.strip()))
    print(lock.take(lambda why: time.sleep(float(pause))), flush=True)
    sys.stdin.readline()
    lock.release()
"""


ENDED = {"host": "x", "pid": 1, "started": 0, "user": "x", "job": None, "cluster": None, "since": "y", "place": "z"}


@pytest.mark.parametrize("left", ["nothing", "an old lease"])
@pytest.mark.parametrize("places", [0, 1], ids=["one host", "several hosts"])
@pytest.mark.parametrize("lockless", [0, 1], ids=["locks", "no locks"])
@pytest.mark.parametrize(
    ("rounds", "pause"), [(3, 0.1), pytest.param(20, LOOK, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
)
def test_starts_at_one_instant_have_one_winner(
    tmp_path: Path, lockless: int, places: int, left: str, rounds: int, pause: float
) -> None:
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", STARTS, str(number), str(lockless), str(places), str(pause)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]  # fmt: skip

    def ask(line: str) -> None:
        for start in starts:
            assert start.stdin is not None
            with suppress(BrokenPipeError):
                print(line, file=start.stdin, flush=True)

    def answers() -> list[str]:
        return [start.stdout.readline().strip() for start in starts if start.stdout is not None]

    assert answers() == ["ready"] * 3
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        if left == "an old lease":
            (folder / LOCK).write_text(json.dumps(ENDED))
            os.utime(folder / LOCK, (0, 0))
        ask(str(folder))
        said = answers()
        assert said.count("None") == 1, said
        assert all(f"{folder} is being trained in by " in line for line in said if line != "None")
        assert os.listdir(folder) == [LOCK]
        ask("")
    for start in starts:
        start.communicate()
