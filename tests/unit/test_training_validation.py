"""A run that validates on a set of its own: `data.validation`."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from llmtrain.cli.main import main
from llmtrain.errors import BadInputError

from tests.in_process import train_here
from tests.tiny import rows, write_corpus, write_run

RECIPE = """
model: {{family: gpt2, layers: 2, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 4, global_batch: 8, microbatch: 4, eval_every: 2, eval_batches: 1000}}
optimizer: {{lr: 1.0e-2, warmup: 1}}
logging: {{every: 1, dir: {folder}/runs}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sets, `set` and `other`."""
    folder = write_run(tmp_path_factory.mktemp("validation"), RECIPE)
    write_corpus(folder / "other", 40)
    return folder


def train(folder: Path, *keys: str) -> Path:
    """Train by the recipe with overrides; return the run's folder."""
    return folder / "runs" / train_here(folder / "tiny.yaml", *keys).name


def losses(run: Path, event: str | None) -> list[Any]:
    return [row["loss"] for row in rows(run) if row.get("event") == event and "loss" in row]


def test_the_other_set_validates_and_all_of_the_first_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(folder, "name=own", f"data.validation={folder}/other")
    whole = train(folder, "name=whole", "data.split=[99,0,1]", "train.eval_every=0")
    assert losses(run, None) == losses(whole, None)
    assert len(losses(run, "eval")) == 3
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sets"] == [f"{folder}/other"]
    assert losses(run, "eval")[-1] == pytest.approx(found["loss"], rel=1e-6)
    assert yaml.safe_load((run / "recipe.resolved.yaml").read_text())["data"]["validation"] == f"{folder}/other"


def test_a_blend_validates(folder: Path) -> None:
    blend = f"[1,{folder}/other,1,{folder}/set]"
    run = train(folder, "name=blend", f"data.validation={blend}", "data.split=[9,0,1]")
    assert len(losses(run, "eval")) == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["data.validation={}/gone"], "data.validation is {}/gone, but there is no file {}/gone.bin"),
        (["data.validation=[1]"], "data.validation is [1.0]; expected a blend"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, keys: list[str], said: str) -> None:
    with pytest.raises(BadInputError) as error:
        train(folder, "name=refused", *(key.replace("{}", str(folder)) for key in keys))
    assert said.replace("{}", str(folder)) in str(error.value)
