"""Commands that read a checkpoint which its run deletes meanwhile."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llmtrain.checkpoint import describe, read
from llmtrain.checkpoint import verify as verifying
from llmtrain.checkpoint.convert.convert import convert
from llmtrain.checkpoint.deleted import DeletedError
from llmtrain.checkpoint.plain_file import DamagedError, open_plain
from llmtrain.cli.ckpt import verify
from llmtrain.errors import RunFailedError
from llmtrain.inference import trained

from tests.unit.test_checkpoint_save_load import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 10 and 20, of two ranks each."""
    assert save(tmp_path / "run" / "checkpoints", [10, 20], world=2) == [None, None]
    return tmp_path / "run"


def delete_at(monkeypatch: pytest.MonkeyPatch, run: Path, place: str, step: int) -> Path:
    """Let the run delete the checkpoint of `step` when `place` is opened: FOLDER/FILE."""
    folder = run / "checkpoints" / f"step-{step:08d}"

    def opened(path: Path) -> tuple[int, int]:
        if str(path).endswith(place) and folder.exists():
            shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.pruned")))
        return open_plain(path)

    monkeypatch.setattr(read, "open_plain", opened)
    return folder


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("place", [f"{one}.safetensors" for one in ("20/rank-00000", "10/rank-00000", "10/rank-00001")])
def test_verify_does_not_count_it(
    run: Path, place: str, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = delete_at(monkeypatch, run, place, 10)
    verify(run, as_json)
    said, kept = capsys.readouterr().out, gone.with_name("step-00000020")
    if as_json:
        assert json.loads(said) == {str(kept): []}
    else:
        assert said.splitlines() == [f"{kept}: sound", f"{gone}: deleted by its run meanwhile (checkpoint.keep)"]


def test_verify_counts_what_is_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = delete_at(monkeypatch, run, "10/rank-00001.safetensors", 10)
    (gone.with_name("step-00000020") / "rank-00000.safetensors").unlink()
    with pytest.raises(RunFailedError, match=r"^1 of 1 checkpoints"):
        verify(run)
    assert "rank-00000.safetensors is missing" in capsys.readouterr().out


def test_verify_of_a_folder_that_goes_before_it_is_listed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(read.CheckpointReader):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            shutil.rmtree(folder)

    monkeypatch.setattr(verifying, "CheckpointReader", Gone)
    with pytest.raises(DeletedError):
        verifying.verify(run / "checkpoints" / "step-00000020")


def test_an_export_says_so(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = delete_at(monkeypatch, run, "20/rank-00001.safetensors", 20)
    with pytest.raises(RunFailedError, match=f"the checkpoint {gone} is gone: its run has newer ones"):
        convert(run, tmp_path / "hf", "fp32", "5GB", None)
    assert not list(tmp_path.glob("hf*"))


def test_a_list_is_of_those_that_are_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = describe.existing(run)
    shutil.rmtree(folders[1])
    monkeypatch.setattr(describe, "existing", lambda path: folders)
    assert [row["step"] for row in describe.list_checkpoints(run)] == [20]


def test_a_model_is_taken_from_a_newer_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, warnings = run / "checkpoints", list[str]()

    def opened(one: Path, waiting: object, dtype: str) -> Any:
        if one.name == "step-00000020":
            shutil.rmtree(one)
            shutil.copytree(folder / "step-00000010", folder / "step-00000030")
            raise DamagedError("manifest.json is missing")
        return one

    monkeypatch.setattr(trained, "_open", opened)
    newer: Any = trained.open_model(run, warnings.append)
    assert newer == folder / "step-00000030"
    said = f"skipped the checkpoint {folder / 'step-00000020'}: its run has deleted it meanwhile (checkpoint.keep)"
    assert warnings == [said]
