"""The memory that a control group leaves to a process."""

import sys
from pathlib import Path

import pytest
from llmtrain.cluster.memory import group_limit

V2 = "0::/system.slice/slurmd/job_7\n"
V1 = "9:name=systemd:/\n4:memory:/job/7\n1:cpu:/\n0::/\n"


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
    (tmp_path / "own").write_text(own)
    for name, limit in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{limit}\n")
    assert group_limit(tmp_path / "groups", tmp_path / "own") == expected


def test_a_system_without_groups_has_no_limit(tmp_path: Path) -> None:
    assert group_limit(tmp_path / "groups", tmp_path / "own") == sys.maxsize
