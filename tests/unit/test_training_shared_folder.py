"""All ranks must see the run's folder, and a start waits until they do only where one does not see it at once."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import CommandError, PreemptedError, RunFailedError
from llmtrain.launch.run_lock import LOCK, RunLock
from llmtrain.launch.stop import STOPPED_EARLY, StopRequest
from llmtrain.training import shared_folder
from llmtrain.training.run_folder import lock_folder

from tests.unit.test_checkpoint_save_load import ThreadRanks, on_ranks


class GatheringRanks(ThreadRanks):
    """Thread ranks that also gather."""

    def gather_all(self, values: list[int]) -> list[list[int]]:
        assert self.store is not None
        self.store.set(f"gathered/{self.rank}", json.dumps(values))
        return [json.loads(self.store.get(f"gathered/{rank}")) for rank in range(self.layout.world)]


def start(folders: list[Path], before: Callable[[Ranks, StopRequest], None] = lambda *_: None) -> list[str]:
    """Lock the run's folder on ranks that each see another path; return what each rank raised, or nothing."""

    def work(ranks: Ranks) -> str:
        stop = StopRequest()
        before(ranks, stop)
        mine = GatheringRanks(ranks.rank, ranks.local_rank, ranks.layout, ranks.device, ranks.links)
        try:
            with lock_folder(folders[ranks.rank], mine, stop):
                return ""
        except CommandError as error:
            return f"{type(error).__name__}: {error}"

    return on_ranks(len(folders), work)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds between looks, which pass at once."""
    naps: list[float] = []
    monkeypatch.setattr(shared_folder.time, "sleep", naps.append)
    return naps


def test_ranks_that_share_the_folder_do_not_wait(tmp_path: Path, naps: list[float]) -> None:
    (tmp_path / "mount").symlink_to(tmp_path)
    assert start([tmp_path / "run", tmp_path / "mount" / "run", tmp_path / "run"]) == ["", "", ""]
    assert naps == []
    assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.parametrize("other", ["absent", "empty", "left by another run"])
def test_a_rank_with_a_folder_of_its_own_ends_all(tmp_path: Path, naps: list[float], other: str) -> None:
    mine, own = tmp_path / "a" / "run", tmp_path / "b" / "run"
    if other != "absent":
        (own / "checkpoints").mkdir(parents=True)
    if other == "left by another run":
        (own / LOCK).write_text("{}")
    said = start([mine, mine, own])
    assert len({path.replace(str(own), str(mine)) for path in said}) == 1
    assert said[0].startswith("RunFailedError: rank 2 on ")
    assert f"does not see the run's folder {mine} of rank 0 on " in said[0]
    assert said[0].endswith("; all ranks must share logging.dir")
    assert len(naps) == shared_folder.LOOKS - 1
    # The lock is free again.
    assert (mine / LOCK).read_bytes() == b""


def test_a_rank_that_sees_the_folder_late_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, late, looks = tmp_path / "a" / "run", tmp_path / "b" / "run", list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            shutil.copytree(mine, late)

    monkeypatch.setattr(shared_folder.time, "sleep", sleep)
    assert start([mine, late]) == ["", ""]
    assert len(looks) == 3


def test_a_stop_ends_the_wait_on_all(tmp_path: Path, naps: list[float]) -> None:
    def ask(ranks: Ranks, stop: StopRequest) -> None:
        stop.asked = ranks.rank == 1

    said = start([tmp_path / "a" / "run", tmp_path / "b" / "run"], ask)
    assert said == [f"{PreemptedError.__name__}: {STOPPED_EARLY}"] * 2
    assert naps == []


def test_checkpoints_that_cannot_be_made_free_the_lock(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    assert start([tmp_path] * 2) == [f"{RunFailedError.__name__}: {tmp_path} cannot be written: File exists; "
                                    "check logging.dir"] * 2  # fmt: skip
    lock = RunLock(tmp_path)
    assert lock.take(time.sleep) is None  # type: ignore[arg-type]
    lock.release()
