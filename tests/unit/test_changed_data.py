"""A run that resumes with other data than it was trained on is refused, unless it is allowed explicitly."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from llmtrain.checkpoint.folder import step_folders
from llmtrain.checkpoint.manifest import encode, read_manifest
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.inference.generate import Sampling
from llmtrain.inference.trained import complete, evaluate_on, open_model
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Batch
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training import loop as loop
from llmtrain.training import run_data
from llmtrain.training.run_data import DATA, check_data, open_data
from llmtrain.training.saved_progress import progress_of
from llmtrain_data.errors import DataError
from llmtrain_data.fingerprint import Fingerprint
from llmtrain_data.indexed import IndexedData
from pydantic import JsonValue

from tests.in_process import train_here
from tests.tiny import write_corpus

RECIPE = """
model: {{family: gpt2, layers: 1, hidden: 16, heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 6, global_batch: 8, microbatch: 8, eval_every: 3}}
optimizer: {{lr: 1.0e-2, warmup: 1}}
checkpoint: {{every: 3}}
logging: {{dir: {folder}/runs}}
"""

Train = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, documents in (("set", 200), ("other", 190)):
        write_corpus(tmp_path / name, documents)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=tmp_path))
    return tmp_path


@pytest.fixture
def train(folder: Path) -> Train:
    """Train by the tiny recipe with overrides."""

    def run(*overrides: str) -> None:
        train_here(folder / "tiny.yaml", *overrides)

    return run


def turn_round(folder: Path) -> None:
    """Reverse the tokens of the set; all of them stay ids of the vocabulary."""
    np.fromfile(folder / "set.bin", np.uint16)[::-1].tofile(folder / "set.bin")


@pytest.mark.parametrize("checksums", [True, False])
def test_data_turned_round_before_a_resume_is_refused(train: Train, folder: Path, checksums: bool) -> None:
    if not checksums:
        (folder / "set.checksums").unlink()
    train()
    turn_round(folder)
    before = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    refusal = r"set\.bin does not match its checksums" if checksums else r"set holds other data than .*accept_changed"
    with pytest.raises((BadInputError, DataError), match=refusal) as refused:
        train("train.steps=9")
    assert isinstance(refused.value, BadInputError | DataError)
    assert refused.value.exit_code == 2
    assert {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()} == before


def test_other_data_is_refused_once_until_it_is_accepted(
    train: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    for path in (f"{folder}/other", f"[1,{folder}/set,1,{folder}/other]"):
        with pytest.raises(BadInputError, match=r"accept_changed=true"):
            train("train.steps=7", f"data.path={path}")
    capsys.readouterr()
    train("train.steps=9", f"data.path={folder}/other", "data.accept_changed=true")
    assert "data.accept_changed accepts that" in " ".join("".join(capsys.readouterr()).split())
    # The run is now trained on the accepted data.
    train("train.steps=12", f"data.path={folder}/other")


def test_the_same_data_elsewhere_and_prepared_again_goes_on(train: Train, folder: Path) -> None:
    train()
    write_corpus(folder / "set", 200)
    train("train.steps=7")
    for suffix in (".bin", ".idx", ".checksums"):
        (folder / f"set{suffix}").rename(folder / f"moved{suffix}")
    train("train.steps=9", f"data.path={folder}/moved")


def test_a_run_that_starts_from_another_takes_any_data(train: Train, folder: Path) -> None:
    train()
    train("name=tuned", "train.steps=9", f"checkpoint.resume={folder}/runs/tiny", f"data.path={folder}/other")
    with pytest.raises(BadInputError, match=r"set does not hold the data of .*other"):
        train("name=tuned", "train.steps=12", f"checkpoint.resume={folder}/runs/tiny")


def test_checkpoints_without_fingerprints_go_on(train: Train, folder: Path) -> None:
    train()
    newest = step_folders(folder / "runs" / "tiny" / "checkpoints")[-1]
    manifest = read_manifest(newest)
    assert manifest.progress.pop(DATA)
    for name, content in zip(("manifest.json", "manifest.json.xxh3"), encode(manifest), strict=True):
        (newest / name).write_bytes(content)
    train("train.steps=9", f"data.path={folder}/other")


@pytest.mark.parametrize("said", ["text", [1], [{"path": "a"}], {}, None])
def test_fingerprints_that_are_none_are_told(train: Train, folder: Path, said: JsonValue) -> None:
    train()
    newest = step_folders(folder / "runs" / "tiny" / "checkpoints")[-1]
    manifest = read_manifest(newest)
    changed = replace(manifest, progress={**manifest.progress, DATA: said})
    for name, content in zip(("manifest.json", "manifest.json.xxh3"), encode(changed), strict=True):
        (newest / name).write_bytes(content)
    with pytest.raises(BadInputError, match=r"fingerprints of the data cannot be read: .*; remove that checkpoint"):
        train("train.steps=9")


def test_progress_that_is_none_is_told() -> None:
    with pytest.raises(RunFailedError, match=r"progress cannot be read: .*; remove that checkpoint to resume from the"):
        progress_of({"step": "many"}, cast(Batch, None))


def test_sets_without_checksums_are_named_once(train: Train, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other.checksums").unlink()
    train(f"data.path=[1,{folder}/set,1,{folder}/other]")
    shown = " ".join("".join(capsys.readouterr()).split())
    assert shown.count("has no checksums") == 1
    assert f"llmtrain data checksum {folder}/other" in shown


def test_an_evaluation_notices_damage_and_foreign_ids(train: Train, folder: Path) -> None:
    train()
    said: list[str] = []
    opened = open_model(folder / "runs" / "tiny", print)
    model = replace(opened, notice=lambda: said.append("the machine is busy"))
    assert evaluate_on(model, "train", None, 10, 4)["samples"] == 10
    (folder / "set.checksums").rename(folder / "kept")
    tokens = np.memmap(folder / "set.bin", np.uint16)
    tokens[1234] = 64
    with pytest.raises(DataError, match=r"holds id 64 at token 34 of document 12; expected 0 to 63"):
        evaluate_on(model, "train", None, 10, 4)
    (folder / "kept").rename(folder / "set.checksums")
    tokens[1234] = 0
    with pytest.raises(DataError, match=r"set\.bin does not match its checksums"):
        evaluate_on(model, "train", str(folder / "set"), 10, 4)
    with pytest.raises(BadInputError, match="name it with --tokenizer"):
        next(complete(model, "a", 1, Sampling(1.0, 0, 1.0, 0), folder / "absent"))
    # An error that ends the command stands alone.
    assert said == ["the machine is busy"]


def test_a_refusal_that_begins_with_a_bracket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal begins with the path of the data, which may begin with a bracket."""
    facts = Facts(world=1, device="cpu")
    plan = check_and_plan(load_recipe(str(folder / "tiny.yaml")), facts)
    data, _ = open_data(plan)
    said: list[str] = []
    main = SimpleNamespace(local_rank=0, is_main=True, from_main=lambda name, text: said.append(text) or text)
    other = SimpleNamespace(local_rank=1, is_main=False, from_main=lambda name, text: said[-1])

    def refuse(data: IndexedData) -> Fingerprint:
        raise DataError("[x]/set.bin does not match its checksums")

    monkeypatch.setattr(run_data, "fingerprint", refuse)
    for rank in (main, other):
        with pytest.raises(BadInputError, match=r"^\[x\]/set\.bin does not match"):
            check_data(data, None, False, rank, said.append)  # type: ignore[arg-type]


def test_a_node_that_has_other_data_than_the_first_is_refused(folder: Path) -> None:
    """Each node may have its own copy of the data."""
    facts = Facts(world=1, device="cpu")
    plan = check_and_plan(load_recipe(str(folder / "tiny.yaml")), facts)
    data, _ = open_data(plan)
    said: list[str] = []
    main = SimpleNamespace(
        local_rank=0, is_main=True, from_main=lambda name, text: said.append(text) or text, host_of=lambda rank: "one"
    )
    other = SimpleNamespace(
        local_rank=0, is_main=False, from_main=lambda name, text: said[-1], host_of=lambda rank: "one"
    )
    found = check_data(data, None, False, main, said.append)  # type: ignore[arg-type]
    assert check_data(data, None, False, other, said.append) == found  # type: ignore[arg-type]
    (folder / "set.checksums").unlink()
    turn_round(folder)
    data, _ = open_data(plan)
    with pytest.raises(BadInputError, match=r"set on .* holds other data than on one; copy the same files to both"):
        check_data(data, None, False, other, said.append)  # type: ignore[arg-type]
