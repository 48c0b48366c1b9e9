"""Errors of the file system while checkpoints are read: they are not damage, and no older checkpoint is taken."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmtrain.checkpoint import plain_file
from llmtrain.checkpoint.folder import check_start
from llmtrain.checkpoint.load import load_latest
from llmtrain.checkpoint.manifest import MANIFEST
from llmtrain.checkpoint.plain_file import UnreachableError
from llmtrain.checkpoint.read import CheckpointReader
from llmtrain.cli.main import main
from llmtrain.comm.ranks import Ranks
from llmtrain.inference import trained
from llmtrain.launch.status import statuses
from llmtrain.plan.checkpointing import checkpointing
from llmtrain.recipe.checkpoint import CheckpointConfig

from tests.unit.test_checkpoint_faults import failing
from tests.unit.test_checkpoint_save_load import load_and_check, on_ranks, save, shards_of, values_at

FILE = "rank-00000.safetensors"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_file, "PAUSE", 0.0)


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, code: int, name: str) -> None:
    """Let a function of `os` raise an error for each path of this name."""
    monkeypatch.setattr(os, call, failing(getattr(os, call), code, lambda path: path.name == name))


class Stale:
    """Makes reads of some threads fail, each `left` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.ESTALE) -> None:
        self.left: dict[int, int] = {}
        self.opened: list[str] = []
        preadv, open_ = os.preadv, os.open

        def stale(descriptor: int, *args: Any) -> int:
            me = threading.get_ident()
            if self.left.get(me):
                self.left[me] -= 1
                raise OSError(code, os.strerror(code))
            return preadv(descriptor, *args)

        def noted(path: Any, *args: Any, **kwargs: Any) -> int:
            self.opened.append(os.path.basename(path))
            return open_(path, *args, **kwargs)

        monkeypatch.setattr(os, "preadv", stale)
        monkeypatch.setattr(os, "open", noted)

    def start(self, count: int) -> None:
        """Let the next `count` reads of this thread fail."""
        self.left[threading.get_ident()] = count


def load_on(folder: Path, world: int, before: Callable[[Ranks], None]) -> list[tuple[Any, str, list[str]]]:
    """Load the newest checkpoint on each rank; return its progress, the error and the warnings of each."""

    def work(ranks: Ranks) -> tuple[Any, str, list[str]]:
        warnings: list[str] = []
        before(ranks)
        try:
            progress = load_latest(folder, shards_of(values_at(0), ranks), ranks, warnings.append)
        except UnreachableError as error:
            return None, str(error), warnings
        return progress, "", warnings

    return on_ranks(world, work)


def test_an_error_that_passes_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, [10, 20], 2)
    stale = Stale(monkeypatch)
    found = load_on(tmp_path, 3, lambda ranks: stale.start(int(ranks.rank == 1)))
    assert found == [({"seen": 140, "step": 20}, "", [])] * 3
    assert set(stale.left.values()) == {0}


def test_a_stale_handle_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, [10], 1)
    stale = Stale(monkeypatch)
    with CheckpointReader(tmp_path / "step-00000010") as reader:
        states = reader.manifest.tensors["head.norm.weight"].states
        for block in range(2):
            stale.start(block)
            assert len(reader.block("head", states["m"][0], 0))
    assert stale.opened.count(FILE) == 2


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_an_error_of_one_rank_that_lasts_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    save(tmp_path, [10, 20], 2)
    stale = Stale(monkeypatch, code)
    found = load_on(tmp_path, 3, lambda ranks: stale.start(99 if ranks.rank == 1 else 0))
    ((progress, said, warnings),) = [one for at, one in enumerate(found) if one not in found[:at]]
    assert (progress, warnings) == (None, [])
    assert said.startswith("rank 1 on ")
    assert f"cannot load the checkpoint step-00000020: {tmp_path}/step-00000020/{MANIFEST}: {os.strerror(code)}" in said
    assert said.endswith("; the same command resumes once it can")
    stale.left.clear()
    assert load_and_check(tmp_path, 3, 20) == []


def test_an_unreadable_part_beside_a_damaged_one_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, [10, 20], 2)
    (tmp_path / "step-00000020" / "rank-00001.safetensors").write_bytes(b"")
    refuse(monkeypatch, "open", errno.EIO, FILE)
    found = load_on(tmp_path, 2, lambda ranks: None)
    assert all(f"{FILE}: Input/output error" in said for _, said, _ in found)


@pytest.mark.parametrize(("call", "name"), [("open", MANIFEST), ("open", FILE), ("scandir", "checkpoints")])
def test_what_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    save(tmp_path / "checkpoints", [10], 1)
    refuse(monkeypatch, call, errno.EACCES, name)
    for progress, said, warnings in load_on(tmp_path, 2, lambda ranks: None):
        assert (progress, warnings) == (None, [])
        assert f"{name}: Permission denied" in said


def test_a_start_that_cannot_list_does_not_start_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, [10], 1)
    refuse(monkeypatch, "scandir", errno.EACCES, tmp_path.name)
    with pytest.raises(PermissionError):
        check_start(checkpointing(CheckpointConfig()), tmp_path)


def test_commands_do_not_advise_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, [10], 1)
    refuse(monkeypatch, "open", errno.EACCES, MANIFEST)
    assert main(["ckpt", "list", str(tmp_path)]) == 0
    assert f"cannot be read: {MANIFEST}: Permission denied" in capsys.readouterr().out
    assert main(["ckpt", "list", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"folder": f"{tmp_path}/step-00000010", "unreadable": f"{MANIFEST}: Permission denied"}
    assert main(["ckpt", "inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [f"llmtrain: {tmp_path}/step-00000010/{MANIFEST}: Permission denied"]
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/step-00000010: {MANIFEST} cannot be read: Permission denied\n"
    assert said.err == (
        f"llmtrain: 1 of 1 checkpoints in {tmp_path} cannot be read whole and may be sound; see to their disk or "
        "permissions, and verify again\n"
    )


def test_a_model_is_not_loaded_from_an_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, [10, 20], 1)
    warnings: list[str] = []
    refuse(monkeypatch, "open", errno.EIO, FILE)
    with pytest.raises(UnreachableError, match=f"{FILE}: Input/output error"):
        trained.open_model(tmp_path, warnings.append)
    assert warnings == []


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that was killed, of another user."""
    folder = tmp_path / "runs" / "killed"
    save(folder / "checkpoints", [10], 1)
    (folder / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0}\n')
    (folder / "run.json").write_text('{"steps": 20}')
    return folder


def test_status_of_a_run_whose_checkpoints_cannot_be_listed(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "scandir", errno.EACCES, "checkpoints")
    (found,) = statuses([killed.parent])
    assert found.detail == "killed, or lost with its machine; its checkpoints cannot be listed: Permission denied"
