"""Ranks run on the socket of their card, and use the volumes of that socket first: rehearsed with a made-up sysfs."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmtrain.cluster.load import load_cluster
from llmtrain.cluster.sockets import cores_by_socket, device_socket, volume_socket
from llmtrain.comm.cores import Bound, bind, bind_to_socket
from llmtrain.errors import BadInputError
from llmtrain.plan.cost.lane_times import lane_times
from llmtrain.plan.cost.least_time import least_time, step_threads
from llmtrain.plan.cost.volume_traffic import moved_of
from llmtrain.plan.facts import Device, Facts
from llmtrain.plan.per_rank.near_volumes import for_rank, socket_of, volume_shares
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import parse_recipe

CARDS = [f"0000:{bus:02x}:00.0" for bus in (0x10, 0x20, 0x90, 0xA0)]


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Two sockets of four cores; two cards and a drive on each; a file system on the second drive."""
    for core in range(8):
        write(tmp_path / f"devices/system/cpu/cpu{core}/topology/physical_package_id", str(core // 4))
    for place, address in enumerate(CARDS):
        write(tmp_path / f"bus/pci/devices/{address}/local_cpulist", "0-3" if place < 2 else "4-7")
    drive = tmp_path / "devices/pci0000:80/0000:81:00.0"
    write(drive / "local_cpulist", "4-7")
    write(drive / "nvme/nvme1/nvme1n1/nvme1n1p1/partition", "1")
    number = os.stat(tmp_path).st_dev
    link = tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(drive / "nvme/nvme1/nvme1n1/nvme1n1p1")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What this process is bound to; it may run on eight cores."""
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.append(set(cores)))
    return found


def test_what_is_attached_to_which_socket(sys: Path) -> None:
    cores = cores_by_socket(sys)
    assert cores == {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    assert [device_socket(sys / "bus/pci/devices" / card, cores) for card in CARDS] == [0, 0, 1, 1]
    assert device_socket(sys / "bus/pci/devices/none", cores) is None
    assert volume_socket(str(sys), cores, sys) == 1
    # A file system in memory is on no drive, and so is one whose folder is not there.
    assert volume_socket("/proc", cores, sys) is None
    assert volume_socket("/not/there", cores, sys) is None


@pytest.mark.parametrize(
    ("place", "cards", "expected"),
    [
        # The card decides, whatever the place; ranks of one socket share its cores.
        ((0, 4), CARDS, Bound(0, 2)),
        ((3, 4), CARDS, Bound(1, 2)),
        ((0, 4), CARDS[::-1], Bound(1, 2)),
        ((2, 3), CARDS, Bound(1, 4)),
        # A launcher gives each rank its own card.
        ((1, 4), CARDS[3:], Bound(1, 2)),
        ((0, 1), CARDS[2:3], Bound(1, 4)),
        # A card whose socket is unknown binds nothing.
        ((0, 1), ["0000:ff:00.0"], None),
        # CPUs: neighbours share a socket; one rank on two sockets uses all cores.
        ((1, 4), [], Bound(0, 2)),
        ((2, 4), [], Bound(1, 2)),
        ((2, 3), [], Bound(1, 2)),
        ((0, 1), [], None),
    ],
)
def test_a_rank_is_bound_to_the_socket_of_its_card(
    place: tuple[int, int], cards: list[str], expected: Bound | None, sys: Path, bound: list[set[int]]
) -> None:
    assert bind_to_socket(place, cards, sys) == expected
    cores = set() if expected is None else set(range(4 * expected.socket, 4 * expected.socket + 4))
    assert all(one == cores for one in bound)
    assert bool(bound) == (expected is not None)


def test_a_rank_that_its_launcher_has_bound_stays(
    sys: Path, bound: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last two are on both sockets.
    for cores, ranks in (({5, 6}, 4), ({3, 4}, 4), ({2, 3, 4, 5}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        assert bind_to_socket((0, ranks), CARDS[:ranks], sys) is None
    assert bound == []


def test_a_machine_of_one_socket_or_without_sysfs(tmp_path: Path, bound: list[set[int]]) -> None:
    assert bind_to_socket((0, 2), [], tmp_path) is None
    for core in range(8):
        write(tmp_path / f"devices/system/cpu/cpu{core}/topology/physical_package_id", "0")
    assert bind_to_socket((0, 2), [], tmp_path) is None
    assert bound == []


def test_all_threads_of_a_process_are_bound() -> None:
    before = frozenset(os.sched_getaffinity(0))
    if len(before) < 2:
        pytest.skip("there is one core")
    one = frozenset({min(before)})
    try:
        assert bind(one, before)
        assert {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")} == {one}
        assert not bind(before, one)
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)


def node(*volumes: tuple[float, int | None], ranks: int = 4, **host: Any) -> dict[str, Any]:
    """A node with volumes of so many GB/s on sockets."""
    nvme = [
        {"path": f"/v{place}", "bandwidth": f"{rate:.9f}GB/s"} | ({} if socket is None else {"socket": socket})
        for place, (rate, socket) in enumerate(volumes)
    ]
    return {"ranks": ranks, "nvme": nvme, "host": {"sockets": 2, **host}}


def planned(described: dict[str, Any], ranks: int = 4, device: Device = "cpu", **accelerator: str) -> Plan:
    """The plan of a run with all optimizer states on the volumes of a node."""
    recipe = parse_recipe(
        {
            "name": "near",
            "model": {"preset": "gpt2-1m"},
            "data": {"path": "set", "sequence_length": 64},
            "train": {"global_batch": ranks},
            "offload": {"optimizer": "nvme", "share": 1.0},
        }
    )
    return make_plan(
        recipe, Facts(world=ranks, device=device, cluster=load_cluster({"node": described, "accelerator": accelerator}))
    )


def weights(plan: Plan, rank: int) -> list[float]:
    found = for_rank(plan, rank).sharding.offload.bandwidths
    return [weight / sum(found) for weight in found]


def test_ranks_use_the_volumes_of_their_socket() -> None:
    plan = planned(node((4, 0), (2, 1), (2, 1)))
    assert [socket_of(plan, rank) for rank in range(4)] == [0, 0, 1, 1]
    assert weights(plan, 0) == weights(plan, 1) == pytest.approx([1, 0, 0])
    assert weights(plan, 2) == weights(plan, 3) == pytest.approx([0, 0.5, 0.5])
    assert [one.far for one in volume_shares(plan)] == [0, 0, 0]


def test_what_a_socket_s_volumes_do_not_take_goes_to_the_other() -> None:
    plan = planned(node((6, 0), (1, 1), (1, 1)))
    assert weights(plan, 0) == pytest.approx([1, 0, 0])
    assert weights(plan, 2) == pytest.approx([0.5, 0.25, 0.25])
    assert [(one.path, one.socket, one.share, one.far) for one in volume_shares(plan)] == [
        ("/v0", 0, 0.75, 0.25), ("/v1", 1, 0.125, 0), ("/v2", 1, 0.125, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("volumes", [[(4, None), (2, 1)], [(4, 0)], [(4, None), (2, None)]])
def test_without_stated_sockets_all_ranks_use_all_volumes(volumes: list[tuple[float, int | None]]) -> None:
    plan = planned(node(*volumes))
    assert all(for_rank(plan, rank) == plan for rank in range(4))
    assert sum(one.share for one in volume_shares(plan)) == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 9), st.integers(0, 1)), min_size=2, max_size=5), st.integers(2, 7))
def test_volumes_get_their_part_however_they_lie(volumes: list[tuple[float, int]], ranks: int) -> None:
    plan = planned(node(*volumes, ranks=ranks), ranks)
    each = [weights(plan, rank) for rank in range(ranks)]
    total = sum(rate for rate, _ in volumes)
    for place, share in enumerate(volume_shares(plan)):
        assert sum(own[place] for own in each) / ranks == pytest.approx(volumes[place][0] / total, abs=1e-6)
        far = sum(own[place] for rank, own in enumerate(each) if socket_of(plan, rank) != volumes[place][1])
        assert share.far == pytest.approx(far / ranks, abs=1e-6)
    # No byte goes to another socket while one of the same kind comes from there.
    crossing = [sum(one.far for one in volume_shares(plan) if one.socket == socket) for socket in (0, 1)]
    assert min(crossing) == pytest.approx(0, abs=1e-6)


def test_least_time_of_offloaded_states() -> None:
    plan = planned(node((4, 0), (2, 1), bandwidth="100GB/s", cores=64), device="cuda", host_link="10GB/s")
    elements = sum(one.end - one.start for rank in range(4) for one in rank_buckets(plan, rank))
    programs = programs_of(plan)
    least = least_time(plan, lane_times(plan, programs, moved_of(plan, programs)))
    # fp32 masters and moments are read and written, gradients are read, 16-bit weights are written.
    assert least.host == pytest.approx(elements * (2 * 12 + 4 + 2) / 100e9)
    files = sum(one.nbytes for rank in range(4) for one in rank_buckets(plan, rank))
    assert least.volumes == pytest.approx(files / 6e9, rel=0.02)
    # Gradients go to the host in fp32; weights come back in 16 bits.
    most = max(sum(one.end - one.start for one in rank_buckets(plan, rank)) for rank in range(4))
    assert least.link == pytest.approx(4 * most / 10e9)
    assert step_threads(plan) == 16


def test_a_socket_that_the_host_does_not_have() -> None:
    with pytest.raises(BadInputError, match=r"^node\.nvme\[1\]\.socket is 2; expected a number below host\.sockets"):
        load_cluster({"node": node((4, 0), (2, 2))})
    # Where their number is not stated, there are as many as the drives name.
    described = {"ranks": 4, "nvme": [{"path": "/a", "socket": 0}, {"path": "/b", "socket": 2}]}
    assert load_cluster({"node": described}).node.sockets == 3
