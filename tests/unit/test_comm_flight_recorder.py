"""A hang of GPUs is put down to the rank that has not queued what the others wait in."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from llmtrain.comm.flight_recorder import (
    FlightRecorder,
    GroupProgress,
    groups_of,
    late_rank,
    nccl_has_failed,
    queued_by_all,
    recorder_of,
)

DONE, WAITING, EARLIER = GroupProgress(4, 4, ""), GroupProgress(5, 4, "all_gather"), GroupProgress(3, 3, "")
HANGING = """
import json, time
import torch.distributed as dist
from llmtrain.comm.activity import Activity
from llmtrain.comm.flight_recorder import FlightRecorder
from llmtrain.comm.watchdog import Watchdog

def entry(number, state):
    return {"process_group": ["7", "data"], "is_p2p": False, "collective_seq_id": number, "retired": False,
            "state": state, "profiling_name": "nccl:reduce_scatter"}

def recorder(entries, moving=0):
    began = time.monotonic()
    def dump(collectives, active):
        # A collective completes now and then for as long as `moving` says.
        number = int(min(moving, time.monotonic() - began) * 20)
        return json.dumps({"pg_status": number, "entries": entries})
    return FlightRecorder(dump, lambda: False)

store, moving = dist.HashStore(), MOVING
queued = recorder([entry(1, "completed"), entry(2, "scheduled")], moving), recorder([entry(1, "completed")])
# The host of rank 1 is the last that began something.
activities = [Activity(rank) for rank in (0, 1)]
watchdogs = [Watchdog(activities[rank], store, 2, 2.0, True, queued[rank]) for rank in (1, 0)]
# The sentence is printed before it is told: the other rank ends this process as soon as it reads the reason.
watchdogs[1].on_failure = lambda sentence: time.sleep(9)
time.sleep(0.1)
activities[1].record("computing", 3)
activities[0].record("all_reduce", 3)
time.sleep(moving + 0.5)
print("alive", flush=True)
time.sleep(60)
"""


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_reads_what_torch_records(gloo: None) -> None:
    """Torch records gloo's collectives in the form of NCCL's."""
    # torch's types leave it out.
    dump = vars(torch._C._distributed_c10d)["_dump_fr_trace_json"]
    recorder = FlightRecorder(dump, lambda: False)
    before = recorder.numbers()
    group = dist.new_group([0])
    known = recorder.groups()
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    assert recorder.numbers() != before
    (name,) = recorder.groups().keys() - known.keys()
    # A thread of torch's notes that one is complete.
    while (found := recorder.groups()[name]).completed < 3:
        assert found.queued == 3
        time.sleep(0.01)
    assert found == GroupProgress(3, 3, "")


def test_other_backends_need_none() -> None:
    assert recorder_of("gloo") is None


def test_counts_each_group_and_its_messages_apart() -> None:
    def entry(number: int, state: str, p2p: bool = False, retired: bool = False) -> dict[str, object]:
        key = "p2p_seq_id" if p2p else "collective_seq_id"
        numbers = {"p2p_seq_id": 0, "collective_seq_id": 0, key: number}
        name = "nccl:send 0->1" if p2p else "nccl:all_gather"
        return {"process_group": ["3", ""], "is_p2p": p2p, "state": state, "retired": retired, "profiling_name": name,
                **numbers}  # fmt: skip

    entries = [
        entry(7, "completed"),
        entry(8, "scheduled", retired=True),
        entry(9, "started"),
        entry(10, "scheduled"),
        entry(2, "scheduled", p2p=True),
    ]
    assert groups_of(entries) == {
        "3": GroupProgress(10, 8, "all_gather"), "3 messages": GroupProgress(2, 0, "send 0->1")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        ([WAITING, WAITING, DONE], (2, "all_gather")),
        ([WAITING, EARLIER, DONE], (1, "all_gather")),
        # All have queued the same, and the records do not tell whose GPU is late.
        ([WAITING, WAITING, WAITING], None),
        ([DONE, DONE, DONE], None),
    ],
    ids=["one", "two", "none", "all done"],
)
def test_one_group(ranks: list[GroupProgress], late: tuple[int, str] | None) -> None:
    assert late_rank({rank: {"0": progress} for rank, progress in enumerate(ranks)}) == late


def test_follows_who_waits_for_whom() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 in another group."""
    reduce = GroupProgress(2, 1, "reduce_scatter")
    ranks = {0: {"a": WAITING}, 1: {"a": DONE, "b": reduce}, 2: {"b": GroupProgress(1, 1, "")}}
    assert late_rank(ranks) == (2, "reduce_scatter")


def test_a_circle_has_no_late_rank() -> None:
    ranks = {0: {"a": WAITING, "b": DONE}, 1: {"a": DONE, "b": WAITING}}
    assert late_rank(ranks) is None


def test_the_watchdog_names_the_late_rank() -> None:
    """The host of rank 0 began nothing for longer than that of rank 1, which is the one that is late."""
    ended = subprocess.run([sys.executable, "-c", HANGING.replace("MOVING", "0")], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "the others wait in reduce_scatter for rank 1 on" in ended.stderr
    assert "which stopped after step 3, in computing" in ended.stderr
    assert ended.stderr.endswith("; the same command resumes from the newest checkpoint, if there is one\n")


def test_a_gpu_that_stands_still_blames_no_host() -> None:
    """All hosts have queued the collective that does not complete: none of them is killed for it."""
    hanging = HANGING.replace("MOVING", "0").replace(
        'recorder([entry(1, "completed")])', 'recorder([entry(1, "completed"), entry(2, "scheduled")])'
    )
    ended = subprocess.run([sys.executable, "-c", hanging], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ranks wait in reduce_scatter, and all of them have queued it, so a GPU or the network" in ended.stderr
    assert "rank 1" not in ended.stderr


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        ([WAITING, WAITING, WAITING], "all_gather"),
        ([WAITING, WAITING, DONE], None),
        ([DONE, DONE, DONE], None),
        ([WAITING], None),
    ],
)
def test_what_all_have_queued(ranks: list[GroupProgress], what: str | None) -> None:
    assert queued_by_all({rank: {"0": progress} for rank, progress in enumerate(ranks)}) == what


def test_ranks_that_do_not_connect_blame_none_of_them() -> None:
    hanging = (
        HANGING.replace("MOVING", "0").replace('"computing", 3', "CONNECTING").replace('"all_reduce", 3', "CONNECTING")
    )
    hanging = hanging.replace("import json", "from llmtrain.comm.standstill import CONNECTING\nimport json")
    ended = subprocess.run([sys.executable, "-c", hanging], capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.search(r"the ranks have not connected for [\d.]+ s; NCCL_DEBUG=INFO shows where NCCL", ended.stderr)
    assert "rank 1" not in ended.stderr


def test_a_step_whose_collectives_complete_does_not_hang() -> None:
    """Nothing is judged for three timeouts in which hosts begin nothing and collectives go on."""
    ended = subprocess.run([sys.executable, "-c", HANGING.replace("MOVING", "6")], capture_output=True, text=True)
    assert ended.stdout == "alive\n"
    assert "the others wait in reduce_scatter for rank 1 on" in ended.stderr


@pytest.mark.parametrize(("error", "failed"), [("SUCCESS", False), ("TIMEOUT", False), ("REMOTE_ERROR", True)])
def test_a_failed_collective_is_found_while_the_host_waits(
    error: str, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of other backends are not asked."""
    over_nccl, over_gloo = Mock(), Mock(spec=[])
    over_nccl._get_backend.return_value.get_error.return_value = SimpleNamespace(name=error)
    groups = {over_nccl: ("nccl", None), over_gloo: ("gloo", None)}
    monkeypatch.setattr(dist.distributed_c10d, "_pg_map", groups)
    assert nccl_has_failed() is failed


def test_a_group_that_the_run_leaves_ends_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Mock()
    left._get_backend.side_effect = RuntimeError
    monkeypatch.setattr(dist.distributed_c10d, "_pg_map", {left: ("nccl", None)})
    assert nccl_has_failed() is False
