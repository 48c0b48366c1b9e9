"""Files on several volumes: where bytes lie, how their space is taken, and what is on its way at the same time."""

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
import torch
from llmtrain.errors import RunFailedError
from llmtrain.offload.states import FileStates
from llmtrain.offload.striped_file import StripedFile
from llmtrain.plan import direct_file
from llmtrain.plan.offload import PARTS, Offload
from llmtrain_kernels.direct_io.queue import FILE_ALIGNMENT, DirectQueue, aligned_bytes
from torch import Tensor

from tests.unit.test_offload import offloaded


def test_regions_are_striped_evenly(tmp_path: Path) -> None:
    """Volumes get the same bytes, but for a page; each region is spread over all of them."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    regions = [FILE_ALIGNMENT * pages for pages in (1, 2, 100, 7, 1, 1, 31)]
    file, queue = StripedFile(list(map(str, paths)), regions), DirectQueue()
    assert sum(file.nbytes) == sum(regions)
    assert max(file.nbytes) - min(file.nbytes) <= FILE_ALIGNMENT
    kept = []
    for region, nbytes in enumerate(regions):
        values = aligned_bytes(nbytes).random_(0, 256, generator=torch.Generator().manual_seed(region))
        file.finish(queue, file.start_write(queue, region, values))
        kept.append(values)
    for region, values in enumerate(kept):
        into = aligned_bytes(values.nbytes)
        file.finish(queue, file.start_read(queue, region, into))
        assert torch.equal(into, values)
        part = aligned_bytes(FILE_ALIGNMENT)
        file.reading(region, values.nbytes - FILE_ALIGNMENT, part)()
        assert torch.equal(part, values[-FILE_ALIGNMENT:])
    usage = file.usage(queue)
    assert [*usage.read.values()] == [*usage.written.values()] == file.nbytes
    queue.close()
    file.close()


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What queues begin ("read" or "write") and "finish", with the file; -1 for what is finished."""
    events, start, finish = list[tuple[str, int]](), DirectQueue._start, DirectQueue.finish

    def started(queue: DirectQueue, file: int, offset: int, memory: Tensor, kind: Literal["read", "write"]) -> int:
        events.append((kind, file))
        return start(queue, file, offset, memory, kind)

    def finished(queue: DirectQueue, transfer: int) -> None:
        events.append(("finish", -1))
        finish(queue, transfer)

    monkeypatch.setattr(DirectQueue, "_start", started)
    monkeypatch.setattr(DirectQueue, "finish", finished)
    return events


def folders(tmp_path: Path, count: int) -> tuple[str, ...]:
    paths = [tmp_path / str(number) for number in range(count)]
    for path in paths:
        path.mkdir()
    return tuple(map(str, paths))


def test_a_region_is_on_its_way_on_all_volumes(in_flight: list[tuple[str, int]], tmp_path: Path) -> None:
    file = StripedFile(folders(tmp_path, 4), [8 * FILE_ALIGNMENT])
    values = aligned_bytes(8 * FILE_ALIGNMENT).random_(0, 256)
    file.writing(0, 0, values)()
    file.reading(0, 0, into := aligned_bytes(8 * FILE_ALIGNMENT))()
    assert torch.equal(into, values)
    kinds = [kind for kind, _ in in_flight]
    assert kinds == [*["write"] * 4, *["finish"] * 4, *["read"] * 4, *["finish"] * 4]
    file.close()


def test_parts_of_several_buckets_are_on_their_way(in_flight: list[tuple[str, int]], tmp_path: Path) -> None:
    """One state of the buckets is on all volumes."""
    offload = Offload(tier="nvme", share=1.0, bucket=1024, paths=folders(tmp_path, 3), bandwidths=(1.0,) * 3)
    with offloaded(torch.bfloat16, offload) as (units, outside):
        assert isinstance(outside.states, FileStates)
        outside.states.flush()
        shard = units[0].optimizer
        start, end = shard.bounds[0], shard.bounds[0] + 12 * 1024
        values = torch.rand(end - start)
        for kind, move in (
            ("write", lambda: shard.write("m", start, values)),
            ("read", lambda: shard.read("m", start, end)),
        ):
            in_flight.clear()
            move()
            outside.states.flush()
            kinds = [one for one, _ in in_flight]
            assert kinds == [*[kind] * PARTS, *["finish", kind] * (12 - PARTS), *["finish"] * PARTS]
            assert set(Counter(file for one, file in in_flight if one == kind).values()) == {4}
        assert torch.equal(shard.read("m", start, end), values)


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a file loses its name as soon as it is open."""
    monkeypatch.setattr("os.O_TMPFILE", 0)
    file, queue, values = StripedFile([str(tmp_path)], [FILE_ALIGNMENT]), DirectQueue(), aligned_bytes(FILE_ALIGNMENT)
    assert [*tmp_path.iterdir()] == []
    file.finish(queue, file.start_write(queue, 0, values.fill_(7)))
    file.reading(0, 0, into := aligned_bytes(FILE_ALIGNMENT))()
    assert torch.equal(into, values)
    queue.close()
    file.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_reserves_no_space(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have their size, read as zeros, and take what is written. No byte is written before."""
    monkeypatch.setattr(direct_file, "fallocate", lambda file, nbytes: code)
    file, queue = StripedFile([str(tmp_path)], [3 * FILE_ALIGNMENT]), DirectQueue()
    status = os.fstat(file._files[0])
    assert (status.st_size, status.st_blocks) == (3 * FILE_ALIGNMENT, 0)
    file.writing(0, FILE_ALIGNMENT, values := aligned_bytes(FILE_ALIGNMENT).fill_(7))()
    file.finish(queue, file.start_read(queue, 0, into := aligned_bytes(3 * FILE_ALIGNMENT)))
    assert torch.equal(into[FILE_ALIGNMENT : 2 * FILE_ALIGNMENT], values)
    assert not into[:FILE_ALIGNMENT].any()
    assert not into[2 * FILE_ALIGNMENT :].any()
    queue.close()
    file.close()


def test_a_signal_while_space_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter((errno.EINTR, 0))
    monkeypatch.setattr(direct_file, "fallocate", lambda file, nbytes: next(codes))
    StripedFile([str(tmp_path)], [FILE_ALIGNMENT]).close()
    assert next(codes, None) is None


def test_faster_volumes_get_more(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "slow").mkdir()
    paths = [str(tmp_path / "fast"), str(tmp_path / "slow")]
    file = StripedFile(paths, [FILE_ALIGNMENT * pages for pages in (1, 1, 1, 40, 3, 3)], [3.0, 1.0])
    assert file.nbytes == [37 * FILE_ALIGNMENT, 12 * FILE_ALIGNMENT]
    file.close()


def test_a_volume_without_room(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"cannot take \d+ bytes: .*"):
        StripedFile([str(tmp_path)], [2**55])
    with pytest.raises(RunFailedError, match="cannot hold offloaded states: No such file or directory"):
        StripedFile([str(tmp_path / "nowhere")], [FILE_ALIGNMENT])
