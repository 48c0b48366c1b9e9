"""Errors of the file system while checkpoints are written: a run gets a sentence, and goes on."""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmtrain.checkpoint.convert.target import new_folder
from llmtrain.checkpoint.folder import drop_later
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import RunFailedError
from llmtrain_data.indexed import IndexedWriter

from tests.unit.test_checkpoint_save_load import ABOUT, load_and_check, on_ranks, save, shards_of, values_at


def failing(call: Callable[..., Any], code: int, where: Callable[[Path], bool]) -> Callable[..., Any]:
    """Return a function of `os` that raises the error `code` for paths for which `where` returns true."""

    def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike) and where(Path(path)):
            raise OSError(code, os.strerror(code), str(path))
        return call(path, *args, **kwargs)

    return wrapped


@pytest.mark.parametrize("refused", [("mkdir", "scandir"), ("open", "scandir")], ids=["no folder", "no file"])
@pytest.mark.parametrize(("world", "asynchronous"), [(1, False), (1, True), (2, True)])
def test_a_folder_that_cannot_be_listed_loses_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...], world: int, asynchronous: bool
) -> None:
    folder, stale = tmp_path / "c", threading.Event()

    def below(path: Path) -> bool:
        return stale.is_set() and path.is_relative_to(folder)

    for name in refused:
        monkeypatch.setattr(os, name, failing(getattr(os, name), errno.ESTALE, below))

    def work(ranks: Ranks) -> list[str | None]:
        checkpointer = Checkpointer(folder, ranks, 9, asynchronous)
        outcomes = []
        for step in (10, 20, 30):
            # All ranks have ended the save of step 10: each acknowledges it.
            (stale.set if step == 20 else stale.clear)()
            outcome = checkpointer.save(step, shards_of(values_at(step), ranks), {"seen": step * 7}, ABOUT)
            deadline = time.monotonic() + 20
            while checkpointer.saving and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not checkpointer.saving
            outcomes.append(outcome or checkpointer.wait())
        return outcomes

    for outcomes in on_ranks(world, work):
        assert outcomes[::2] == [None, None]
        assert str(outcomes[1]).startswith("the checkpoint of step 20 was not saved: ")
        assert str(outcomes[1]).endswith(": Stale file handle; earlier ones cannot be listed")
    assert load_and_check(folder, world, 30) == []


def fail_fsync(monkeypatch: pytest.MonkeyPatch, code: int, where: Callable[[os.stat_result], bool]) -> None:
    """Let `os.fsync` raise the error `code` for files for which `where` returns true, without a path, as it does."""
    fsync = os.fsync

    def wrapped(descriptor: int) -> None:
        if where(os.fstat(descriptor)):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wrapped)


def save_with_warning(folder: Path, step: int, keep: int = 1) -> tuple[str | None, str]:
    """Save on one rank; return the failure and the warning."""

    def work(ranks: Ranks) -> tuple[str | None, str]:
        checkpointer = Checkpointer(folder, ranks, keep, asynchronous=False)
        failure = checkpointer.save(step, shards_of(values_at(step), ranks), {"seen": step * 7}, ABOUT)
        return failure, checkpointer.warning()

    return on_ranks(1, work)[0]


def test_a_file_system_without_fsync_for_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_fsync(monkeypatch, errno.EINVAL, lambda status: stat.S_ISDIR(status.st_mode))
    for step in (10, 20):
        assert save_with_warning(tmp_path / "c", step) == (None, "")
    assert os.listdir(tmp_path / "c") == ["step-00000020"]
    assert load_and_check(tmp_path / "c", 1, 20) == []
    with new_folder(tmp_path / "converted"):
        pass
    assert (tmp_path / "converted").is_dir()
    writer = IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16))
    writer.add(np.zeros(40), np.full(10, 4))
    writer.commit()
    assert (tmp_path / "corpus.idx").exists()


def test_an_error_after_the_rename_does_not_say_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    save(folder, [10])
    with monkeypatch.context() as patch:
        fail_fsync(patch, errno.EIO, lambda status: os.path.samestat(status, folder.stat()))
        failure, warning = save_with_warning(folder, 20)
    assert failure is None
    assert warning == (
        "the checkpoint of step 20 is saved, but may not survive a power failure, and older ones stay: "
        f"{folder}: Input/output error"
    )
    assert sorted(os.listdir(folder)) == ["step-00000010", "step-00000020"]
    assert load_and_check(folder, 1, 20) == []
    assert save_with_warning(folder, 30) == (None, "")
    assert os.listdir(folder) == ["step-00000030"]


def test_an_error_before_the_rename_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    save(folder, [10])
    fail_fsync(monkeypatch, errno.EIO, lambda status: stat.S_ISDIR(status.st_mode))
    assert save(folder, [20]) == [
        "the checkpoint of step 20 was not saved: "
        f"{folder / 'step-00000020.partial'}: Input/output error; the one of step 10 stays"
    ]
    assert os.listdir(folder) == ["step-00000010"]


def test_a_replaced_checkpoint_that_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    save(folder, [10])
    in_use = folder / "step-00000010.replaced"
    with monkeypatch.context() as patch:
        # On NFS, a folder keeps a file that was removed while a program had it open.
        patch.setattr(os, "rmdir", failing(os.rmdir, errno.ENOTEMPTY, lambda path: path.name == in_use.name))
        failure, warning = save_with_warning(folder, 10)
        assert failure is None
        assert warning.startswith("the checkpoint of step 10 is saved, but an older one stays: ")
        assert warning.endswith("Directory not empty")
        assert load_and_check(folder, 1, 10) == []
        (in_use / ".nfs1").touch()
        assert in_use.exists()
    assert save_with_warning(folder, 20, keep=2) == (None, "")
    assert sorted(os.listdir(folder)) == ["step-00000010", "step-00000020"]


def test_a_later_checkpoint_that_is_in_use_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, [10, 20])
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", failing(os.rmdir, errno.ENOTEMPTY, lambda path: path.suffix == ".pruned"))
        drop_later(tmp_path, 10)
    assert load_and_check(tmp_path, 1, 10) == []
    assert save_with_warning(tmp_path, 20, keep=2) == (None, "")
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000020"]


def test_a_converted_folder_that_may_not_be_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_fsync(monkeypatch, errno.EIO, lambda status: os.path.samestat(status, tmp_path.stat()))
    with (
        pytest.raises(RunFailedError, match=f"is complete, but .* {tmp_path}: Input/output error"),
        new_folder(tmp_path / "converted") as partial,
    ):
        (partial / "weights").touch()
    assert os.listdir(tmp_path / "converted") == ["weights"]
