"""Ranks, groups and shares."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmtrain.cluster.environment import first_host, launched
from llmtrain.cluster.layout import Axis, Layout, even_share
from llmtrain.errors import BadInputError


@given(st.integers(1, 64))
def test_groups_partition_the_ranks(world: int) -> None:
    layout = Layout({Axis.DATA: world})
    groups = layout.groups(Axis.DATA)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    for group in groups:
        assert [layout.coordinate(rank, Axis.DATA) for rank in group] == list(range(world))


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_even_shares_tile_the_range(numel: int, parts: int) -> None:
    shares = [even_share(numel, parts, index) for index in range(parts)]
    assert shares[0][0] == 0
    assert shares[-1][1] == numel
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    sizes = [end - start for start, end in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("node1", "node1"), ("gpu[003-007,12],login1", "gpu003"), ("a1,b2", "a1"), ("r[1-2]n", "r1n"), ("", "localhost")],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_launched_by_nobody() -> None:
    assert launched({}) is None
    # An interactive allocation runs one task: that is not a launch.
    assert launched({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_launched_by_torchrun() -> None:
    found = launched({"RANK": "1", "WORLD_SIZE": "4"})
    assert found is not None
    assert (found.by, found.rank, found.world) == ("torchrun", 1, 4)


def test_launched_by_srun() -> None:
    environment = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "42",
    }
    found = launched(environment)
    assert found is not None
    assert found.by == "srun"
    assert dict(found.variables) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "20042",
    }


@pytest.mark.parametrize(("rank", "world"), [("4", "4"), ("x", "2"), ("-1", "2")])
def test_contradicting_environment_is_refused(rank: str, world: str) -> None:
    with pytest.raises(BadInputError, match="WORLD_SIZE"):
        launched({"RANK": rank, "WORLD_SIZE": world})
