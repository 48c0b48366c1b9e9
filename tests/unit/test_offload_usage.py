"""What offloaded states move, and how long a rank waits for that."""

from pathlib import Path

import pytest
from llmtrain.offload.striped_file import StripedFile
from llmtrain.offload.usage import LinkCount, TierUsage
from llmtrain_kernels.direct_io.queue import FILE_ALIGNMENT, DirectQueue, aligned_bytes


def test_waits_are_told_apart_by_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).mkdir()
    file, queue = StripedFile(paths, [8 * FILE_ALIGNMENT]), DirectQueue()
    memory = aligned_bytes(8 * FILE_ALIGNMENT)
    # Transfers take half a second on the second volume.
    clock, finish = [0.0], queue.finish
    monkeypatch.setattr("llmtrain.offload.striped_file.time.perf_counter", lambda: clock[0])
    transfers = file.start_write(queue, 0, memory)
    slow = {transfer for volume, transfer in transfers if volume == 1}

    def finished(transfer: int) -> None:
        clock[0] += 0.5 if transfer in slow else 0.0
        finish(transfer)

    monkeypatch.setattr(queue, "finish", finished)
    file.finish(queue, transfers)
    assert file.usage(queue).waits == {paths[0]: 0.0, paths[1]: 0.5}
    queue.close()
    file.close()


def test_usage_adds_up_and_is_told_since_a_step() -> None:
    one = TierUsage(read={"/a": 5}, written={"/a": 3}, waited=0.5, waits={"/a": 0.5}).with_link(
        LinkCount(10, 20), LinkCount(1, 2)
    )
    both = one + TierUsage(
        read={"/a": 1, "/b": 2},
        written={"/b": 4},
        waited=0.25,
        waits={"/b": 0.25},
        compute_waited=0.5,
        gpu_waited=0.125,
    )
    assert (both.read, both.written, both.waited) == ({"/a": 6, "/b": 2}, {"/a": 3, "/b": 4}, 0.75)
    assert both.waits == {"/a": 0.5, "/b": 0.25}
    assert both.since(one) == {
        "read_bytes": {"/a": 1, "/b": 2}, "written_bytes": {"/a": 0, "/b": 4}, "wait_s": 0.25,
        "waits_s": {"/a": 0.0, "/b": 0.25}, "to_host_bytes": 0, "to_device_bytes": 0, "gpu_wait_s": 0.125,
        "compute_wait_s": 0.5,
    }  # fmt: skip
    assert (both.to_host, both.to_device) == (11, 22)
