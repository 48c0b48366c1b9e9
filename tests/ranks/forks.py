"""Programs that fork the ranks of a test: the program's part, and the test's part, which starts it."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest


def fork_ranks(world: int, rank_main: Callable[[int], None]) -> int:
    """Run `rank_main` as every rank, each in a process of its own, and return 0 if all succeed."""
    pids = []
    for rank in range(world):
        pids.append(os.fork())
        if not pids[-1]:
            try:
                rank_main(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def answers_by_world(program: str, folders: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """Return what each of a number of ranks answers; `program` runs once for each number."""

    @cache
    def run(world: int) -> list[Any]:
        return answers(program, world, folders.mktemp(f"{Path(program).stem}-{world}"))

    return run


def answers(program: str, world: int, folder: Path, timeout: float = 300) -> list[Any]:
    """Run `program WORLD FOLDER` of this folder, and return the content of each rank's `rank-N.json` in that folder."""
    command = [sys.executable, str(Path(__file__).with_name(program)), str(world), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment())
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


def environment() -> dict[str, str]:
    """Return the environment of a program of this folder, which imports its modules as `tests.ranks`."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
