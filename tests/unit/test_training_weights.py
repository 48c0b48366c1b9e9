"""A run that starts with the weights of another run alone: `checkpoint.weights`."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmtrain.checkpoint.manifest import read_manifest
from llmtrain.checkpoint.read import CheckpointReader
from llmtrain.cli.main import main
from llmtrain.errors import BadInputError
from llmtrain.launch.submit import load_site
from llmtrain.recipe.load import load_recipe
from llmtrain.start.job import plan_job
from llmtrain_data.dataset import Samples
from torch import Tensor

from tests.in_process import train_here
from tests.tiny import rows, write_corpus, write_run

RECIPE = """
model: {{family: gpt2, layers: 2, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 8, global_batch: 8, microbatch: 4, eval_every: 8}}
optimizer: {{lr: 1.0e-2, warmup: 4}}
checkpoint: {{every: 4}}
logging: {{every: 1, dir: {folder}/runs}}
"""

# A spike of this size never comes, but the run saves the states that it starts with.
SAVED = "on_spike={threshold: 1000, action: rewind}"

Row = dict[str, Any]
Train = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set, another set, and a run `base` of 8 steps."""
    folder = write_run(tmp_path_factory.mktemp("weights"), RECIPE)
    write_corpus(folder / "other", 150)
    train_here(folder / "tiny.yaml", "name=base")
    return folder


@pytest.fixture
def folder(trained: Path) -> Path:
    """The same without the runs of other tests."""
    for run in (trained / "runs").iterdir():
        if run.name != "base":
            shutil.rmtree(run)
    return trained


@pytest.fixture
def train(folder: Path) -> Train:
    """Train by the tiny recipe with overrides, and return the run's rows."""
    return lambda *keys: rows(folder / "runs" / train_here(folder / "tiny.yaml", *keys).name)


def steps_of(found: list[Row]) -> list[Row]:
    return [row for row in found if "event" not in row]


def validation(found: list[Row]) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in found if row.get("event") == "eval"]


def states(checkpoint: Path, name: str) -> dict[str, Tensor]:
    with CheckpointReader(checkpoint) as reader:
        return {tensor: reader.full_tensor(tensor, name) for tensor in reader.manifest.tensors}


@pytest.mark.parametrize(
    ("keys", "source", "step"),
    [
        pytest.param((), "", 8, id="fp32"),
        pytest.param((), "/checkpoints/step-00000004", 4, id="one checkpoint"),
        pytest.param(("precision.compute=bf16",), "", 8, id="bf16"),
        pytest.param(("precision.compute=fp16",), "", 8, id="fp16"),
        pytest.param(("offload.optimizer=host",), "", 8, id="states in the host's memory"),
        pytest.param(("offload={{optimizer: nvme, paths: [{}]}}",), "", 8, id="states in files"),
    ],
)
def test_only_the_weights_are_taken(train: Train, folder: Path, keys: tuple[str, ...], source: str, step: int) -> None:
    keys = (SAVED, "data.path={}/other", "train.steps=5", *keys)
    keys = tuple(key.format(folder) if "{}" in key else key for key in keys)
    fresh = train("name=fresh", *keys)
    tuned = train("name=tuned", f"checkpoint.weights={folder}/runs/base{source}", *keys)
    started, from_nothing = (folder / "runs" / name / "checkpoints/step-00000000" for name in ("tuned", "fresh"))
    base = folder / f"runs/base/checkpoints/step-{step:08d}"
    masters = states(base, "master")
    assert masters
    assert all(torch.equal(values, masters[name]) for name, values in states(started, "master").items())
    for moment in ("m", "v"):
        assert any(values.any() for values in states(base, moment).values())
        assert not any(values.any() for values in states(started, moment).values())
    # Step, counters, loss scale and the position in the data are those of any start.
    assert read_manifest(started).progress == read_manifest(from_nothing).progress
    for key in ("step", "lr", "tokens"):
        assert [row[key] for row in steps_of(tuned)] == [row[key] for row in steps_of(fresh)]
    assert [row["step"] for row in steps_of(tuned)] == [1, 2, 3, 4, 5]
    assert steps_of(tuned)[0]["lr"] == pytest.approx(1e-2 / 4)
    assert steps_of(tuned)[0]["loss"] < steps_of(fresh)[0]["loss"] - 0.1


def test_the_first_losses_are_those_of_the_other_run(train: Train, folder: Path) -> None:
    base = rows(folder / "runs" / "base")
    tuned = train("name=tuned", f"checkpoint.weights={folder}/runs/base")
    assert validation(tuned)[0] == (0, validation(base)[-1][1])
    assert validation(tuned)[-1][0] == 8
    assert [row["step"] for row in steps_of(tuned)] == list(range(1, 9))


def test_the_data_begins_where_any_run_begins(train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Samples.batch
    taken: dict[str, list[tuple[int, list[int]]]] = {"fresh": [], "tuned": []}
    for name, keys in (("fresh", ()), ("tuned", (f"checkpoint.weights={folder}/runs/base",))):

        def noted(samples: Samples, seed: int, first: int, count: int, name: str = name) -> Any:
            found = read(samples, seed, first, count)
            taken[name].append((first, found.ravel().tolist()))
            return found

        monkeypatch.setattr(Samples, "batch", noted)
        train(f"name={name}", "train.eval_every=0", "train.steps=4", *keys)
    assert taken["tuned"] == taken["fresh"]
    assert [first for first, _ in taken["tuned"]] == [0, 8, 16, 24]


def test_a_second_start_resumes_the_runs_own_checkpoint(
    train: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "runs/base", folder / "runs/copy")
    weights, constant = f"checkpoint.weights={folder}/runs/copy", "optimizer.schedule=constant"
    whole = train("name=whole", weights, constant, "train.steps=8")
    capsys.readouterr()
    train("name=tuned", weights, constant, "train.steps=4")
    said = " ".join("".join(capsys.readouterr()).split())
    told = f"the run starts with the weights alone of {folder}/runs/copy after its step 8 (checkpoint.weights)"
    assert said.count(told) == 1
    assert "continues after" not in said
    # What it started from may be gone, and has no effect any more.
    shutil.rmtree(folder / "runs/copy")
    resumed = train("name=tuned", weights, constant, "train.steps=8")
    said = " ".join("".join(capsys.readouterr()).split())
    assert "continues after step 4" in said
    assert "the run starts with" not in said
    assert [row["loss"] for row in steps_of(resumed)] == [row["loss"] for row in steps_of(whole)]
    train("name=tuned", constant, "train.steps=9")
    said = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"checkpoint.weights: \S+/copy -> null, changed since the last start; it has no effect", said)


def test_a_damaged_checkpoint_is_skipped(train: Train, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "runs/base", folder / "runs/copy")
    newest = folder / "runs/copy/checkpoints/step-00000008"
    # Other weights of this checkpoint are loaded before the damage is found.
    damaged = list(read_manifest(newest).tensors.values())[-1].states["master"][-1]
    content = bytearray((newest / damaged.file).read_bytes())
    content[damaged.offset] ^= 1
    (newest / damaged.file).write_bytes(content)
    train("name=tuned", SAVED, f"checkpoint.weights={folder}/runs/copy", "train.steps=4")
    said = " ".join("".join(capsys.readouterr()).split())
    assert "skipped the checkpoint" in said
    assert "weights alone of" in said
    assert "after its step 4" in said
    # No state of the damaged checkpoint is left.
    started = folder / "runs/tuned/checkpoints/step-00000000"
    older = states(folder / "runs/copy/checkpoints/step-00000004", "master")
    assert all(torch.equal(values, older[name]) for name, values in states(started, "master").items())


def test_never_resuming_still_takes_the_weights(train: Train, folder: Path) -> None:
    keys = ("name=tuned", f"checkpoint.weights={folder}/runs/base", "checkpoint.resume=never", "train.steps=4")
    assert validation(train(*keys))[0][1] == validation(rows(folder / "runs" / "base"))[-1][1]
    with pytest.raises(BadInputError, match=r"holds checkpoints and checkpoint\.resume is never"):
        train(*keys)


REFUSED = {
    "a Hugging Face model too": (
        ["model={family: null, hf: elsewhere}"],
        "checkpoint.weights is {} and model.hf is elsewhere; expected one of them, leave the other out",
    ),
    "another run's progress too": (
        ["checkpoint.resume=elsewhere"],
        "checkpoint.weights is {} and checkpoint.resume is elsewhere; expected one of them, leave the other out",
    ),
    "another width": (["model.hidden=64"], "model.hidden is 64 in the recipe but 32 in the checkpoint {}"),
    "learned positions": (
        ["model.positions=32"],
        "model.positions is 32 in the recipe but 16 in the checkpoint {}",
    ),
    "an empty folder": (
        ["checkpoint.weights=empty"],
        "checkpoint.weights is empty, which holds no checkpoint; expected a run's folder",
    ),
    "a Hugging Face folder": (
        ["checkpoint.weights=hf"],
        "checkpoint.weights is hf, which holds no checkpoint; it is a Hugging Face folder, which model.hf takes",
    ),
}


@pytest.mark.parametrize("keys", REFUSED)
@pytest.mark.parametrize("command", ["run", "plan", "submit"])
def test_what_does_not_fit_is_refused_before_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, keys: str
) -> None:
    monkeypatch.chdir(folder)
    for name in ("empty", "hf"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "hf/config.json").touch()
    given, said = REFUSED[keys]
    words = [f"checkpoint.weights={folder}/runs/base", "name=tuned", *given]
    if command == "submit":
        (folder / "site.yaml").write_text("ranks_per_node: 1")
        with pytest.raises(BadInputError, match=re.escape(said.format(folder / "runs/base"))):
            plan_job("tiny.yaml", [*words, "parallel.data=1"], load_site(folder / "site.yaml"), None)
    else:
        assert main([command, "tiny.yaml", *words, *(["--nproc", "1", "--dry-run"] if command == "run" else [])]) == 2
        assert said.format(folder / "runs/base") in " ".join(capsys.readouterr().err.split())
    assert not (folder / "runs/tuned").exists()


def test_the_start_refuses_another_model_itself(train: Train, folder: Path) -> None:
    """Ranks check the checkpoint that they load, whatever was found before."""
    with pytest.raises(BadInputError, match=r"model\.hidden is 64 in the recipe but 32 in"):
        train("name=tuned", f"checkpoint.weights={folder}/runs/base", "model.hidden=64")
    assert not (folder / "runs/tuned/metrics.jsonl").exists()


def test_longer_sequences_with_other_frequencies(
    train: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with weights alone may have other frequencies of RoPE; one that continues may not."""
    llama = ("model.family=llama", "train.steps=4")
    scaled = "model.rope_scaling={factor: 4, original_positions: 16}"
    longer = ("model.rope_theta=1e6", scaled, "data.sequence_length=32")
    train("name=short", *llama, "model.positions=16")
    tuned = train("name=long", *llama, f"checkpoint.weights={folder}/runs/short", *longer, SAVED)
    assert [row["step"] for row in steps_of(tuned)] == [1, 2, 3, 4]
    # The recipe may also just have left the keys out, so each that differs is named.
    short, said = f"in {folder}/runs/short/checkpoints/step-00000004", capsys.readouterr().out
    said = " ".join(said.split())
    assert f"model.positions is 32, and 16 {short}" in said
    assert f"model.rope_theta is 1000000.0, and 10000.0 {short}; set it to that unless the run is to change it" in said
    assert f'"low_freq_factor": 1.0, "high_freq_factor": 4.0}}, and null {short}' in said
    first = states(folder / "runs/long/checkpoints/step-00000000", "master")
    given = states(folder / "runs/short/checkpoints/step-00000004", "master")
    assert all(torch.equal(values, given[name]) for name, values in first.items())
    with pytest.raises(BadInputError, match=r"model\.rope_theta is 1000000\.0 in the recipe but 10000\.0 in"):
        train("name=next", *llama, f"checkpoint.resume={folder}/runs/short", *longer)
    with pytest.raises(BadInputError, match=r"model\.hidden is 64 in the recipe but 32 in"):
        train("name=wide", *llama, f"checkpoint.weights={folder}/runs/short", *longer, "model.hidden=64")


def test_what_differs_is_named_before_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = ["tiny.yaml", "name=tuned", f"checkpoint.weights={folder}/runs/base", "model.dropout=0.1"]
    said = f"model.dropout is 0.1, and 0.0 in {folder}/runs/base/checkpoints/step-00000008; set it to that unless"
    for command in (["plan", *words], ["run", *words, "--nproc", "1", "--dry-run"]):
        assert main(command) == 0
        assert said in " ".join(capsys.readouterr().out.split())
    (folder / "site.yaml").write_text("ranks_per_node: 1")
    job = plan_job("tiny.yaml", [*words[1:], "parallel.data=1"], load_site(folder / "site.yaml"), None)
    assert any(remark.startswith(said) for remark in job.remarks)


def test_a_plan_says_that_the_weights_are_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan may be for other machines; a run needs the folder."""
    monkeypatch.chdir(folder)
    words = ["tiny.yaml", "name=tuned", "checkpoint.weights=gone"]
    said = "checkpoint.weights is gone, which is not here, so this plan does not say whether its model fits"
    assert main(["plan", *words]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["run", *words, "--nproc", "1", "--dry-run"]) == 2
    assert "checkpoint.weights is gone, which is not a folder; expected that of a run" in capsys.readouterr().err
    # A run that has begun needs the folder no more.
    (folder / "runs/tuned/checkpoints/step-00000004").mkdir(parents=True)
    assert main(["plan", *words]) == 0
    assert "which is not here" not in capsys.readouterr().out
    assert main(["run", *words, "--nproc", "1", "--dry-run"]) == 0


def test_the_record_keeps_the_key(train: Train, folder: Path) -> None:
    train("name=tuned", f"checkpoint.weights={folder}/runs/base", "train.steps=4")
    record = load_recipe(str(folder / "runs/tuned/recipe.resolved.yaml"))
    assert record.checkpoint.weights == f"{folder}/runs/base"
