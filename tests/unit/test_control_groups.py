"""The memory and the processor time that a control group leaves to a process."""

import math
import os
import sys
from pathlib import Path

import pytest
from llmtrain.cluster.control_groups import Quota, cpu_quota, group_limit, memory_kills, usable_cores

V2 = "0::/system.slice/slurmd/job_7\n"
V1 = "9:name=systemd:/\n4:memory:/job/7\n1:cpu:/\n0::/\n"


def write(folder: Path, own: str, files: dict[str, str]) -> None:
    """Write the file that names a process's groups, and files of the groups."""
    (folder / "own").write_text(own)
    for name, text in files.items():
        (folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        (V2, {"system.slice/slurmd/job_7/memory.max": "max"}, sys.maxsize),
        (V2, {"system.slice/slurmd/job_7/memory.max": "max", "system.slice/slurmd/memory.max": "8192"}, 8192),
        (V2, {"system.slice/slurmd/job_7/memory.max": "4096", "memory.max": "8192"}, 4096),
        # In a container, which sees its group as the top.
        (V2, {"memory.max": "8192"}, 8192),
        (
            V1,
            {"memory/job/7/memory.limit_in_bytes": "4096", "memory/memory.limit_in_bytes": "9223372036854771712"},
            4096,
        ),
        (V1, {"memory/memory.limit_in_bytes": "8192"}, 8192),
        (V1, {"cpu/job/7/memory.limit_in_bytes": "1"}, sys.maxsize),
        ("", {"memory.max": "8192"}, sys.maxsize),
    ],
)
def test_the_least_limit_of_a_group_and_of_those_around_it(
    own: str, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    write(tmp_path, own, limits)
    assert group_limit(tmp_path / "groups", tmp_path / "own") == expected


def test_a_system_without_groups_has_no_limit(tmp_path: Path) -> None:
    assert group_limit(tmp_path / "groups", tmp_path / "own") == sys.maxsize
    assert cpu_quota(tmp_path / "groups", tmp_path / "own") == Quota()


V1_CPU = "4:memory:/job/7\n1:cpu,cpuacct:/job/7\n"


@pytest.mark.parametrize(
    ("own", "files", "cores", "group"),
    [
        (V2, {"cpu.max": "2400000 100000"}, 24.0, ""),
        (V2, {"cpu.max": "max 100000"}, math.inf, None),
        (V2, {"system.slice/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5, "system.slice"),
        (
            V2,
            {"system.slice/slurmd/job_7/cpu.max": "400000 50000", "system.slice/cpu.max": "2400000 100000"},
            8.0,
            "system.slice/slurmd/job_7",
        ),
        (
            V1_CPU,
            {"cpu/job/7/cpu.cfs_quota_us": "50000", "cpu/job/7/cpu.cfs_period_us": "100000"},
            0.5,
            "cpu/job/7",
        ),
        (V1_CPU, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, None),
        (V1_CPU, {"cpuset/job/7/cpu.cfs_quota_us": "1", "cpuset/job/7/cpu.cfs_period_us": "1"}, math.inf, None),
    ],
)
def test_the_least_quota_of_a_group_and_of_those_around_it(
    own: str, files: dict[str, str], cores: float, group: str | None, tmp_path: Path
) -> None:
    """Its number is that of the folder that has it."""
    write(tmp_path, own, files)
    number = 0 if group is None else (tmp_path / "groups" / group).stat().st_ino
    assert cpu_quota(tmp_path / "groups", tmp_path / "own") == Quota(cores, number)


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 8), (100.0, 8), (3.9, 3), (0.5, 1)])
def test_usable_cores(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("llmtrain.cluster.control_groups.cpu_quota", lambda: Quota(quota))
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("own", "files", "kills"),
    [
        # Other jobs around the own group do not count.
        (
            V2,
            {
                "system.slice/slurmd/job_7/memory.events": "oom 5\noom_kill 2\noom_group_kill 0",
                "memory.events": "oom_kill 9",
            },
            2,
        ),
        (V2, {"memory.events": "low 0\noom_kill 3"}, 3),
        (V1, {"memory/job/7/memory.oom_control": "oom_kill_disable 0\nunder_oom 1\noom_kill 4"}, 4),
        # Of the machine.
        (V1, {"memory/job/7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0"}, 8),
        ("", {}, 8),
    ],
)
def test_processes_that_were_killed_as_memory_ran_out(
    own: str, files: dict[str, str], kills: int, tmp_path: Path
) -> None:
    write(tmp_path, own, files)
    (tmp_path / "vmstat").write_text("pgfault 70\noom_kill 8\n")
    assert memory_kills(tmp_path / "groups", tmp_path / "own", tmp_path / "vmstat") == kills
    assert memory_kills(tmp_path / "groups", tmp_path / "absent", tmp_path / "absent") == 0
