"""`llmtrain bench memory`: what it measures, the description that it writes, and its errors."""

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmtrain.cli.main import main
from llmtrain.cluster.control_groups import usable_cores
from llmtrain.cluster.load import load_cluster
from llmtrain.launch import bench_memory
from llmtrain.launch.measure import memory_rates, volume_rates
from llmtrain.launch.measure.memory_result import (
    HOST,
    TOGETHER,
    WAYS,
    Copy,
    MemoryFound,
    StepRate,
    VolumeRate,
    described,
)

MIB = 2**20


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure less than a user does."""
    monkeypatch.setattr(memory_rates, "COPIED", 4 * MIB)
    monkeypatch.setattr(memory_rates, "ELEMENTS", MIB)
    monkeypatch.setattr(volume_rates, "FILE", 32 * MIB)
    monkeypatch.setattr(volume_rates, "BLOCKS", (2**17, 2**20))
    monkeypatch.setattr(volume_rates, "DEPTHS", (1, 8))
    monkeypatch.setattr(volume_rates, "_LEAST_SECONDS", 0.01)


def found(**sockets: int | None) -> MemoryFound:
    volumes = [
        VolumeRate(path, way, block, 8, rate * (1 if block == MIB else 0.5))
        for path in sockets
        for block in (MIB, 4 * MIB)
        for way, rate in zip(WAYS, (6e9, 3e9, 4e9), strict=True)
    ]
    volumes += [VolumeRate(path, "read", MIB, 8, 9e9, "near") for path in sockets]
    return MemoryFound(
        copies=[
            Copy(HOST, 1, 10e9), Copy(HOST, 8, 40e9), Copy("from pinned memory to the GPU", 1, 25e9),
            Copy("from the GPU to pinned memory", 1, 22e9), Copy("from pageable memory to the GPU", 1, 9e9),
        ],
        stepped=[StepRate(1, 4e8, 12e9), StepRate(8, 3e9, 90e9)],
        volumes=volumes,
        sockets=dict(sockets),
    )  # fmt: skip


def test_figures_replace_those_of_a_description_and_the_rest_stays() -> None:
    before = load_cluster(
        {
            "name": "mine",
            "accelerator": {"name": "H100", "memory": "80GB", "host_link": "1GB/s"},
            "node": {
                "ranks": 4,
                "host": {"memory": "1TB", "cores": 64, "sockets": 2},
                "nvme": [{"path": "a", "bandwidth": "1GB/s"}, {"path": "other", "bandwidth": "2GB/s", "socket": 1}],
            },
            "clusters": [{"name": "ib", "nic": {"kind": "infiniband"}}],
        }
    )
    after = described(before, found(a=1, b=5))
    assert after.accelerator is not None
    assert after.node.host is not None
    # The slower direction of pinned copies; what AdamW reads and writes is more than copies do.
    assert (after.accelerator.name, after.accelerator.host_link) == ("H100", "22.0 GB/s")
    assert (after.node.host.memory, after.node.host.cores, after.node.host.bandwidth) == ("1TB", 64, "90.0 GB/s")
    # Of each volume half of what its fastest transfers by all processors read and write at once, which is less than
    # either direction alone; a socket that the host does not have is left out.
    assert [(one.path, one.bandwidth, one.socket) for one in after.node.nvme] == [
        ("a", "2.00 GB/s", 1), ("other", "2GB/s", 1), ("b", "2.00 GB/s", None),
    ]  # fmt: skip
    assert after.clusters == before.clusters


@pytest.mark.parametrize(("together", "each"), [(8e9, "2.00 GB/s"), (6e9, "1.50 GB/s"), (9e9, "2.00 GB/s")])
def test_volumes_that_slow_each_other_down_have_what_they_have_together(together: float, each: str) -> None:
    each_alone = found(a=None, b=None)
    both = replace(each_alone, volumes=[*each_alone.volumes, VolumeRate(TOGETHER, "mixed", MIB, 8, together)])
    after = described(
        load_cluster(
            {"name": "mine", "node": {"ranks": 4}, "clusters": [{"name": "ib", "nic": {"kind": "infiniband"}}]}
        ),
        both,
    )
    assert [one.bandwidth for one in after.node.nvme] == [each, each]


@pytest.mark.usefixtures("_small")
def test_volumes_one_by_one_and_together_near_and_far(tmp_path: Path) -> None:
    paths, bound = [str(tmp_path / name) for name in "ab"], list[str]()
    for path in paths:
        os.mkdir(path)

    @contextmanager
    def binding(name: str) -> Iterator[None]:
        bound.append(name)
        yield
        bound.append(f"not {name}")

    rates = list(
        volume_rates.measure_volumes(
            paths, 1.0, lambda path: [("near", binding("near")), ("far", binding("far"))] if path == paths[0] else []
        )
    )
    cells = [(one.path, one.way, one.block, one.depth) for one in rates if one.socket is None and one.path != TOGETHER]
    assert cells == [
        (path, way, block, depth) for path in paths for block in (2**17, 2**20) for depth in (1, 8) for way in WAYS
    ]
    assert [(one.path, one.socket, one.way) for one in rates if one.socket] == [
        (paths[0], socket, way) for socket in ("near", "far") for way in WAYS
    ]
    assert bound == ["near", "not near", "far", "not far"]
    assert [one.way for one in rates if one.path == TOGETHER] == list(WAYS)
    assert all(one.rate > MIB for one in rates)
    # The files had no names.
    assert [os.listdir(path) for path in paths] == [[], []]


@pytest.mark.usefixtures("_small")
def test_all_bytes_of_a_rate_are_transferred(tmp_path: Path) -> None:
    """The rate is what the queue has moved in the time; reads and writes of a mix are equally many."""
    moved: list[dict[tuple[int, str], int]] = []

    class Counting(volume_rates.DirectQueue):
        def close(self) -> None:
            moved.append(dict(self.moved))
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(volume_rates, "DirectQueue", Counting)
        volume = volume_rates.Volume(str(tmp_path))
        memory = volume_rates.aligned_bytes(4 * volume_rates._REGION)
        volume.fill(memory[: volume_rates._REGION])
        rate = volume_rates.rate([volume], "mixed", (2**20, 8), 0.3, memory)
        volume.close()
    written, mixed = moved
    assert sum(written.values()) == 32 * MIB
    by_way = {way: count for (_, way), count in mixed.items()}
    assert abs(by_way["read"] - by_way["write"]) <= volume_rates._REGION
    assert 0 < rate <= sum(by_way.values()) / 0.3


@pytest.mark.parametrize(("block", "depth", "regions"), [(2**20, 8, 4), (2**22, 8, 4), (2**22, 64, 17)])
def test_a_queue_is_as_deep_as_its_label_says(
    block: int, depth: int, regions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions of 16 MiB are under way at the same time, however slow the disk is."""
    # Each look at the clock is a second later, so that 2 * regions are started.
    seconds = itertools.count()
    monkeypatch.setattr(volume_rates, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    volume, under_way, most = volume_rates.Volume(str(tmp_path)), 0, 0
    memory = volume_rates.aligned_bytes(4 * volume_rates._REGION)
    volume.fill(memory[: volume_rates._REGION])
    start, finish = volume.file.start_read, volume.file.finish

    def counted_start(*given: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return start(*given)

    def counted_finish(*given: Any) -> None:
        nonlocal under_way
        under_way -= 1
        finish(*given)

    monkeypatch.setattr(volume.file, "start_read", counted_start)
    monkeypatch.setattr(volume.file, "finish", counted_finish)
    volume_rates.rate([volume], "read", (block, depth), 2 * regions + 1, memory)
    volume.close()
    assert most == regions


@pytest.mark.usefixtures("_small")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("node: {ranks: 3, nvme: [{path: disk}]}\nbetween: {kind: tcp}\n")
    os.mkdir("disk")
    assert main(["bench", "memory", "--output", "there.yaml", "--seconds", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {one["name"] for one in data["copies"]} == {HOST}
    threads = [one["threads"] for one in data["adamw"]]
    assert threads == sorted(set(threads))
    assert threads[-1] == usable_cores()
    assert all(one["rate"] > 0 < one["elements"] for one in data["adamw"])
    # The file's other entries stay.
    after = load_cluster("there.yaml")
    assert (after.node.ranks, after.between and after.between.kind) == (3, "tcp")
    assert after.node.host is not None
    assert after.node.host.bandwidth is not None
    assert after.node.nvme[0].bandwidth is not None
    assert main(["bench", "memory", "--paths", "disk", "--seconds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "AdamW on threads" in printed
    assert "read and write" in printed
    assert main(["bench", "memory", "--seconds", "1"]) == 0
    assert "no volume was measured; name a folder" in capsys.readouterr().out


def test_a_new_description_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_memory, "machine_memory", lambda: 1000 * 2**30)
    monkeypatch.setattr(bench_memory, "usable_cores", lambda: 12)
    host = bench_memory._this_machine().node.host
    assert host is not None
    assert (host.memory, host.cores) == ("875 GiB", 12)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--paths", "absent"], "--paths has absent, which is no folder on this machine"),
        (["--paths", "/dev/shm"], "--paths has /dev/shm, which is on a tmpfs, in memory"),
        (["--paths", "a", "--paths", "b"], "--paths has a and b, which are on one volume"),
        (["--output", "absent/c.yaml"], "c.yaml cannot be written: there is no folder absent; make it first"),
        (["--cluster", "frontear"], "there is no description of a cluster frontear; did you mean frontier?"),
    ],
)
def test_what_cannot_be_measured(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        os.mkdir(name)
    assert main(["bench", "memory", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_sockets_of_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
    ran: list[frozenset[int]] = []
    monkeypatch.setattr(bench_memory, "run_on", ran.append)
    monkeypatch.setattr(bench_memory, "volume_socket", lambda path, cores: 1)
    usable = frozenset({0, 2, 3})
    for _, bound in bench_memory._sockets("/disk", cores, usable):
        with bound:
            pass
    assert ran == [{2, 3}, usable, {0}, usable]
    assert list(bench_memory._sockets("/disk", cores, frozenset({2, 3}))) == []
    monkeypatch.setattr(bench_memory, "volume_socket", lambda path, cores: None)
    assert list(bench_memory._sockets("/disk", cores, usable)) == []
