"""Weight shards in files, which pass through the host's memory in parts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llmtrain.offload import weight_stores
from llmtrain.offload.weight_stores import FileWeights, Volumes

# In pages of 4096 bytes: four parts of two pages each for the larger shard.
SIZES = {"a": 7 * 1024 + 5, "b": 3}


def noted(name: str, order: list[str], call: Callable[..., object]) -> Callable[..., object]:
    """Return `call`, which then also adds its name to `order`."""

    def called(*given: object) -> object:
        order.append(name)
        return call(*given)

    return called


def test_a_shard_passes_in_parts_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two volumes, of which one takes three times as much."""
    monkeypatch.setattr(weight_stores, "_PART", 8192)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    store = FileWeights(SIZES, torch.float32, False, Volumes(tuple(map(str, folders)), (3.0, 1.0)), direct=False)
    shards = {name: torch.randn(numel) for name, numel in SIZES.items()}
    for name, shard in shards.items():
        store.store(name, shard)
    for name, shard in shards.items():
        into = torch.full_like(shard, 9.0)
        store.load(name, into)
        assert torch.equal(into, shard)
        assert torch.equal(store.read(name, 1, len(shard)), shard[1:])
    assert sum(store.usage().read.values()) == sum(store.usage().written.values()) == 9 * 4096
    store.close()


def test_all_parts_are_asked_for_before_the_first_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stores, "_PART", 8192)
    store = FileWeights(SIZES, torch.float32, False, Volumes((str(tmp_path),), (1.0,)), direct=False)
    order = list[str]()
    for name in ("start_read", "finish"):
        monkeypatch.setattr(store._file, name, noted(name, order, getattr(store._file, name)))
    store.load("a", torch.empty(SIZES["a"]))
    assert order == ["start_read"] * 4 + ["finish"] * 4
    store.close()
