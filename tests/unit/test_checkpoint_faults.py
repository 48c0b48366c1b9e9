"""Errors of the file system while checkpoints are written: a run gets a sentence, and goes on."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.comm.ranks import Ranks

from tests.unit.test_checkpoint_save_load import ABOUT, load_and_check, on_ranks, shards_of, values_at


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
