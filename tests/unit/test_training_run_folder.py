"""What a start writes into a run's folder, beside what an earlier one wrote."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.errors import RunFailedError
from llmtrain.model.config import ModelConfig
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.schema import PrecisionConfig, Recipe, TrainConfig
from llmtrain.telemetry.run_file import write_run_file
from llmtrain.training.run_folder import write_record
from llmtrain_data.config import DataConfig

from tests.tiny import small_files


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("a" * 5000)
    recipe = Recipe(
        name="tiny",
        model=ModelConfig(family="gpt2", layers=2, hidden=32, heads=2, vocab=50),
        data=DataConfig(path="corpus", sequence_length=16, tokenizer=str(tmp_path / "tokenizer")),
        train=TrainConfig(steps=10, global_batch=4),
        precision=PrecisionConfig(compute="fp32"),
    )
    return make_plan(recipe, Facts(world=1, device="cpu"))


@pytest.fixture
def folder(tmp_path: Path, plan: Plan) -> Path:
    """A run's folder after its first start."""
    (tmp_path / "run").mkdir()
    start(tmp_path / "run", plan)
    return tmp_path / "run"


def start(folder: Path, plan: Plan) -> None:
    write_record(folder, plan)
    write_run_file(folder, dict(plan.record))


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content and the inode of each file."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_ino) for path in found}


@pytest.mark.parametrize("changed", ["recipe", "tokenizer"])
def test_a_start_on_a_full_disk_leaves_files_as_they_were(
    changed: str, folder: Path, plan: Plan, tmp_path: Path
) -> None:
    before = files(folder)
    if changed == "recipe":
        plan = replace(plan, record={**plan.record, "name": "other"})
    else:
        (tmp_path / "tokenizer" / "tokenizer.json").write_text("b" * 5000)
    with small_files(1000), pytest.raises(RunFailedError, match="run cannot be written: File too large; check"):
        write_record(folder, plan)
    assert files(folder) == before


def test_a_run_file_is_replaced_whole(folder: Path) -> None:
    before = files(folder)
    with small_files(1000), pytest.raises(OSError, match="File too large"):
        write_run_file(folder, {"name": "x" * 2000})
    assert files(folder) == before


def test_a_start_with_the_same_files_needs_no_room(folder: Path, plan: Plan) -> None:
    before = files(folder)
    with small_files(0):
        start(folder, plan)
    assert files(folder) == before


def test_a_reader_keeps_the_file_that_it_has_opened(folder: Path, plan: Plan, tmp_path: Path) -> None:
    """As on another node, at each requeue."""
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("b" * 5000)
    (folder / "tokenizer" / "tokenizer.json.partial").write_text("of a start that was killed")
    with (folder / "tokenizer" / "tokenizer.json").open() as file:
        start(folder, plan)
        assert file.read() == "a" * 5000
    assert (folder / "tokenizer" / "tokenizer.json").read_text() == "b" * 5000
    assert os.listdir(folder / "tokenizer") == ["tokenizer.json"]


@pytest.mark.parametrize("own", [True, False], ids=["with data.tokenizer", "without"])
def test_a_run_of_a_hugging_face_model_keeps_its_tokenizer(tmp_path: Path, plan: Plan, own: bool) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("of the model")
    (tmp_path / "run").mkdir()
    data = plan.data if own else replace(plan.data, tokenizer=None)
    write_record(tmp_path / "run", replace(plan, data=data, import_from=str(tmp_path / "hf")))
    assert (tmp_path / "run/tokenizer/tokenizer.json").read_text() == ("a" * 5000 if own else "of the model")
