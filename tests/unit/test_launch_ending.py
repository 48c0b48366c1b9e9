"""What a rank says when NCCL fails on it, and when another rank is gone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from llmtrain.comm.activity import Activity
from llmtrain.comm.crash_notes import Ending
from llmtrain.comm.ranks import _named_failure
from llmtrain.errors import RunFailedError
from llmtrain.launch import ending

FULL = """NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details)
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-x4 (size 9637888), error: No space left on device (28)"""
GONE = """NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer node3<40112>"""


class Watch:
    """Stands for a watchdog, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked = list[str]()

    def __getattr__(self, name: str) -> Any:
        return lambda: self.asked.append(name)


def ended(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Return what rank 1 of a run says after an error, and what its watchdog was asked."""
    monkeypatch.setattr(ending, "_skip_finalization", lambda code: None)
    monkeypatch.delenv("LLMTRAIN_LAUNCHER_PID", raising=False)
    ranks: Any = SimpleNamespace(rank=1, activity=Activity(1), watchdog=Watch())
    ranks.activity.record("all_gather", 3)
    with pytest.raises(RunFailedError) as found, ending.end_together(ranks):
        raise error
    return str(found.value), ranks.watchdog.asked


def test_an_error_of_nccl_is_told_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said, asked = ended(dist.DistBackendError(FULL), monkeypatch)
    assert said.startswith("NCCL failed on rank 1 ")
    assert "No space left on device (28); NCCL_DEBUG=INFO shows more" in said
    assert "\n" not in said
    assert asked == ["leave_word", "end"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Ending.OUT_OF_MEMORY),
        (MemoryError(), Ending.OUT_OF_MEMORY),
        (RuntimeError("a mistake"), Ending.CRASHED),
        (OSError("a disk"), Ending.REPORTED),
    ],
)
def test_a_rank_notes_how_it_ended(error: Exception, kind: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_skip_finalization", lambda code: None)
    ranks: Any = SimpleNamespace(rank=1, activity=Activity(1), watchdog=Watch())
    noted = list[Ending]()
    monkeypatch.setattr(ranks.activity, "ended", noted.append)
    with pytest.raises(type(error)), ending.end_together(ranks):
        raise error
    assert noted == [kind]


@pytest.mark.parametrize(("error", "why"), [(FULL, "No space left on device (28)"), (GONE, "is gone")])
def test_nccl_that_fails_as_it_connects_is_told(error: str, why: str) -> None:
    with pytest.raises(RunFailedError) as found, _named_failure(1):
        raise dist.DistBackendError(error)
    assert f"{why}; NCCL_DEBUG=INFO shows more. Containers need --ipc=host" in str(found.value)
    assert "\n" not in str(found.value)


def test_gloo_that_fails_as_it_connects_is_told() -> None:
    error = "[enforce fail at /torch/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: hsn0"
    with pytest.raises(RunFailedError) as found, _named_failure(1):
        raise RuntimeError(error)
    assert str(found.value).startswith("gloo failed on rank 1 on ")
    assert " as it connected: ifa != nullptr. Unable to find address for: hsn0; the interface in" in str(found.value)
    assert str(found.value).endswith("or else GLOO_SOCKET_IFNAME")
    with pytest.raises(RuntimeError, match="a mistake"), _named_failure(1):
        raise RuntimeError("a mistake")


def test_the_loss_of_another_rank_is_left_to_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    said, asked = ended(dist.DistBackendError(GONE), monkeypatch)
    assert "lost contact with another rank" in said
    assert asked == ["find_lost"]
