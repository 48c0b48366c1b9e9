"""A dry run of a run that has begun: it says what a start would, from what the run's folder holds."""

from pathlib import Path

import pytest
from llmtrain.cli.main import main

from tests.in_process import train_here
from tests.tiny import write_run

RECIPE = """
model: {{family: gpt2, layers: 2, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 4, global_batch: 8, eval_every: 0}}
optimizer: {{warmup: 1}}
checkpoint: {{every: 2}}
logging: {{every: 1, dir: {folder}/runs}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its run, of which a checkpoint of step 4 is the last."""
    folder = write_run(tmp_path_factory.mktemp("begun"), RECIPE)
    train_here(folder / "tiny.yaml")
    return folder


def dry_run(folder: Path, *keys: str) -> int:
    return main(["run", str(folder / "tiny.yaml"), *keys, "--nproc", "1", "--dry-run"])


def test_it_says_where_the_run_continues_and_what_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(folder, "train.steps=6", "optimizer.lr=1e-3") == 0
    said = capsys.readouterr().out
    assert f"# the run continues after step 4, from {folder}/runs/tiny/checkpoints/step-00000004\n" in said
    assert "# optimizer.lr: 0.0003 -> 0.001, changed since the last start\n" in said
    assert "# train.steps: 4 -> 6, changed since the last start\n" in said
    assert said.count("changed since") == 2


def test_it_says_that_nothing_is_left_to_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(folder) == 0
    said = capsys.readouterr().out
    assert "step-00000004, and train.steps is 4, so that nothing is left to train\n" in said
    assert "changed since" not in said


def test_it_refuses_another_model_as_the_start_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(folder, "model.layers=6") == 2
    assert "model.layers is 6 in the recipe but 2 in the checkpoint" in capsys.readouterr().err


def test_it_passes_over_a_damaged_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = folder / "runs/tiny/checkpoints/step-00000004/manifest.json"
    sound = newest.read_bytes()
    newest.write_bytes(sound[:-1])
    try:
        assert dry_run(folder) == 0
    finally:
        newest.write_bytes(sound)
    assert "# the run continues after step 2, from" in capsys.readouterr().out


def test_a_run_that_has_not_begun_continues_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(folder, "name=other") == 0
    assert "continues after" not in capsys.readouterr().out
