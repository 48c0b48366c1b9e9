"""A run's threads spin briefly while other programs use its cores, also when these come after its start."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import connect
from llmtrain.launch.later_waiting import LaterWaiting
from llmtrain.launch.waiting import CHOSEN
from llmtrain.plan.facts import Facts
from llmtrain.plan.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training import loop
from tiny import write_corpus

# Prints the CPU seconds of 300 parallel loops, between which a thread has nothing to do for a while: first alone, then
# beside a second team, then alone again.
SPINS = """
import os, time, torch
from llmtrain.launch.later_waiting import SecondTeam, loaded_gomp
torch.set_num_threads(2)
values = torch.ones(1 << 16)

def seconds():
    begun = time.process_time()
    for _ in range(300):
        values.tanh()
        time.sleep(0.004)
    return time.process_time() - begun

seconds()
alone = seconds()
team = SecondTeam(loaded_gomp(), len(os.sched_getaffinity(0)))
beside = seconds()
team.end()
print(alone, beside, seconds())
"""


@pytest.fixture(autouse=True)
def _not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core, threads never spin long")
def test_threads_spin_briefly_beside_a_second_team() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", SPINS], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    alone, beside, after = map(float, done.stdout.split())
    assert beside < 0.6 * min(alone, after)


def teams(count: int) -> bool:
    """Whether there come to be so many second teams, of this process's threads."""
    deadline = time.monotonic() + 10
    while (found := sum(one.name == "second team" for one in threading.enumerate())) != count:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return found == count


def test_the_second_team_lives_while_other_programs_use_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    said = list[str]()
    waiting = LaterWaiting(2, 1, said.append)
    torch.ones(1 << 16).tanh()
    threads = len(os.listdir("/proc/self/task"))
    for own, count in ((2.0, 0), (1.1, 1), (1.0, 1), (1.9, 0), (1.0, 1), (2.0, 0)):
        waiting.look([100.0, 100.0], own)
        assert teams(count)
        deadline = time.monotonic() + 10
        # The one that holds the team and the one that is more than cores.
        while len(os.listdir("/proc/self/task")) != threads + 2 * count:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(said) == 1
    assert said[0].startswith("other programs use 0.9 of 2 cores; threads do not spin while they wait")


@pytest.mark.parametrize(
    ("threads", "chosen"), [(1, {}), (2, {"OMP_WAIT_POLICY": "ACTIVE"}), (2, {"GOMP_SPINCOUNT": "9"})]
)
def test_nothing_is_watched_where_it_is_decided(
    threads: int, chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    with LaterWaiting(threads, 1, pytest.fail) as waiting:
        waiting.look([100.0] * 1024, 0.0)
        assert {"waiting", "second team"}.isdisjoint(one.name for one in threading.enumerate())


def test_a_run_on_cpus_watches_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "set", 64)
    Path("tiny.yaml").write_text(
        "model: {family: gpt2, layers: 1, hidden: 32, heads: 4, vocab: 64}\n"
        "data: {path: set, sequence_length: 16, split: [1, 0, 0]}\ntrain: {steps: 2, global_batch: 2, eval_every: 0}\n"
        "optimizer: {lr: 1.0e-2, warmup: 1}\n"
    )
    watched = list[tuple[int, int]]()

    def watch(threads: int, ranks: int, warn: Callable[[str], None]) -> AbstractContextManager[None]:
        watched.append((threads, ranks))
        return nullcontext()

    monkeypatch.setattr("llmtrain.training.run.LaterWaiting", watch)
    plan = check_and_plan(load_recipe("tiny.yaml"), Facts(world=1, device="cpu"))
    loop.train(plan, connect(Layout({Axis.DATA: 1})), [])
    assert watched == [(torch.get_num_threads(), 1)]
