"""How often the files of a checkpoint of many ranks are opened."""

import resource
from collections import Counter
from pathlib import Path

import pytest
import torch
from llmtrain.checkpoint import read
from llmtrain.checkpoint.plain_file import open_plain
from llmtrain.checkpoint.read import CheckpointReader
from llmtrain.checkpoint.verify import verify

from tests.unit.test_checkpoint_save_load import STATES, UNITS, save, values_at

RANKS = 24


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path, [10], world=RANKS)
    return tmp_path / "step-00000010"


@pytest.fixture
def opened(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is opened from now on."""
    count: Counter[str] = Counter()

    def counted(path: Path) -> tuple[int, int]:
        count[path.name] += 1
        return open_plain(path)

    monkeypatch.setattr(read, "open_plain", counted)
    return count


def limit(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, files))


def test_verify_opens_each_once(checkpoint: Path, opened: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 12)
    assert verify(checkpoint).problems == []
    assert opened == {f"rank-{rank:05d}.safetensors": 1 for rank in range(RANKS)}


def test_verify_finds_all_damage_of_files_and_blocks(checkpoint: Path) -> None:
    with (checkpoint / "rank-00003.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xa5")
    (checkpoint / "rank-00005.safetensors").unlink()
    found = verify(checkpoint).problems
    assert len(found) == 2
    assert "rank-00003.safetensors does not match its checksum at head.weight (v)" in found[0]
    assert found[1] == "rank-00005.safetensors is missing"


@pytest.mark.parametrize(("files", "again"), [(2 * RANKS, False), (2 * RANKS - 2, True)])
def test_a_reader_keeps_half_of_what_the_process_may_open(
    checkpoint: Path, opened: Counter[str], files: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, files)
    expected = values_at(10)
    with CheckpointReader(checkpoint) as reader:
        for unit in UNITS:
            for name in STATES:
                read_back = [reader.full_tensor(tensor.name, name).flatten() for tensor in unit.tensors]
                assert torch.equal(torch.cat(read_back), expected[unit.name][name])
    assert opened.keys() == {f"rank-{rank:05d}.safetensors" for rank in range(RANKS)}
    assert (max(opened.values()) > 1) == again
