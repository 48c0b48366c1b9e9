"""The manifest of a checkpoint: what is saved can be read again."""

import math
from pathlib import Path

import pytest
import torch
from llmtrain.checkpoint import manifest
from llmtrain.checkpoint.load import load_latest
from llmtrain.checkpoint.manifest import read_manifest
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from pydantic import JsonValue

from tests.unit.test_checkpoint_save_load import ABOUT, on_ranks, shards_of, values_at

RANKS = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))


def test_a_manifest_that_no_load_would_read_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(step: int) -> list[str | None]:
        return on_ranks(
            2,
            lambda ranks: Checkpointer(tmp_path, ranks, 1, asynchronous=False).save(
                step, shards_of(values_at(step), ranks), {}, ABOUT
            ),
        )

    assert save(10) == [None, None]
    with monkeypatch.context() as changed:
        changed.setattr(manifest, "_LARGEST_MANIFEST", 2000)
        failures = save(20)
    assert failures[0] == failures[1]
    assert failures[0] is not None
    assert "bytes long, but a load reads at most 2000; shard the optimizer states over fewer ranks" in failures[0]
    assert failures[0].endswith("the one of step 10 stays")
    found = values_at(3)
    on_ranks(1, lambda ranks: load_latest(tmp_path, shards_of(found, ranks), ranks, print))
    assert torch.equal(found["head"]["master"], values_at(10)["head"]["master"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_values_of_the_progress_and_of_the_recipe(tmp_path: Path) -> None:
    progress: dict[str, JsonValue] = {
        "norms": [math.inf, -math.inf, 0.1, 1e-5, 1e22, 5e-324],
        "text": '\u00e9\U0001f642"\n',
        "none": None,
    }
    about = {**ABOUT, "recipe": {"lr": math.nan, "steps": 2**62, "nested": {"a": [True, 1.0]}}}
    shards = shards_of(values_at(7), RANKS)
    assert Checkpointer(tmp_path, RANKS, 1, asynchronous=False).save(7, shards, progress, about) is None
    found = read_manifest(tmp_path / "step-00000007")
    assert found.progress == {**progress, "step": 7}
    assert math.isnan(found.recipe.pop("lr"))  # type: ignore[arg-type]
    assert found.recipe == {"steps": 2**62, "nested": {"a": [True, 1.0]}}
    assert isinstance(found.recipe["nested"]["a"][1], float)  # type: ignore[index,call-overload]
