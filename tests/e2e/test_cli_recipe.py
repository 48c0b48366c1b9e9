"""Broken recipes and command lines: one sentence, exit code 2, no traceback, nothing written."""
# ruff: noqa: E501 (one row of the table per line)

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from llmtrain.cli.main import main
from llmtrain.yaml.shipped import shipped_names
from llmtrain_data.indexed import IndexedWriter

GOOD = "model: {preset: gpt2-1m}\ndata: {path: prepared, sequence_length: 64}\n"

# (the error, the recipe's text, arguments after `run recipe.yaml`, what the sentence must contain)
BROKEN_RECIPES = [
    ("no such key", GOOD + "trian: {steps: 3}", [], "trian is not a recipe key; did you mean train?"),
    ("misspelt key", GOOD + "train: {stpes: 3}", [], "train.stpes is not a recipe key; did you mean train.steps?"),
    ("key in the wrong section", GOOD + "train: {lr: 3}", [], "train.lr is not a recipe key; did you mean optimizer.lr?"),
    ("key in no section", GOOD + "warmup: 3", [], "did you mean optimizer.warmup?"),
    ("the field's name of an alias", GOOD + "checkpoint: {asynchronous: true}", [], "did you mean checkpoint.async?"),
    ("text for a number", GOOD + "train: {steps: many}", [], "train.steps is many; expected a whole number"),
    ("quoted number", GOOD + "train: {steps: '5'}", [], 'train.steps is the text "5", in quotes; expected a whole number from 1 to 1,000,000,000\n'),
    ("quoted number of few", GOOD + "zero: {stage: '3'}", [], 'zero.stage is the text "3", in quotes; expected one of 0, 1, 2, 3\n'),
    ("fraction for a whole number", GOOD + "train: {steps: 1.5}", [], "train.steps is 1.5; expected a whole number"),
    ("number for a switch", GOOD + "train: {compile: 1}", [], "train.compile is 1; expected true or false"),
    ("list for a number", GOOD + "optimizer: {lr: [1, 2]}", [], "optimizer.lr is [1, 2]; expected a number"),
    ("word of no choice", GOOD + "precision: {compute: fp8}", [], "expected one of auto, fp32, bf16, fp16"),
    ("wrong word beside a number", GOOD + "train: {microbatch: all}", [], "expected a whole number from 1 to 16,777,216 or auto"),
    ("wrong union section", GOOD + "activation_checkpointing: {evry: 2}", [], "activation_checkpointing.every?"),
    ("boolean for a word", GOOD, ["name=off"], "name is false; expected text; YAML reads off or no or false without quotes as false: write \"off\" with its quotes, on the command line as name='\"off\"'"),
    ("number for a word", GOOD + "name: 7", [], "name is 7; expected text; YAML reads 7 without quotes as a number: write \"7\""),
    ("file that ends early", "model: {", [], "line 1, column 9: expected the node content, but found the end of the file"),
    ("tab", "model:\n\tpreset: gpt2-1m", [], "line 2, column 1: a tab is here; indent with spaces"),
    ("nothing to resume", GOOD, ["checkpoint.resume=texts"], "checkpoint.resume is texts, which holds no checkpoint; expected a run's folder"),
    ("a run that has begun", GOOD, ["checkpoint.resume=never", "logging.dir=.", "name=begun"], "begun/checkpoints holds checkpoints and checkpoint.resume is never; give the run another name"),
    ("number for a section with an alias", GOOD, ["checkpoint=5"], "expected a section with the keys every, keep, async, resume"),
    ("number for a mapping", GOOD, ["cluster={node: {ranks: 1}, accelerator: {peak: 5}}"], "cluster.accelerator.peak is 5; expected keys with a speed such as 312TFLOP/s\n"),
    ("number in a mapping", GOOD, ["cluster={node: {ranks: 1}, accelerator: {peak: {bf16: 5}}}"], "cluster.accelerator.peak.bf16 is 5; expected a speed such as 312TFLOP/s\n"),
    ("number for a size", GOOD, ["cluster={node: {ranks: 1}, accelerator: {memory: 80}}"], "cluster.accelerator.memory is 80; expected a size such as 80GB or 512GiB\n"),
    ("number for a time", GOOD, ["cluster={node: {ranks: 1}, between: {latency: 5}}"], "cluster.between.latency is 5; expected a time such as 3us or 1ms\n"),
    ("fraction for a size", GOOD, ["zero.resident=1.5"], "zero.resident is 1.5; expected auto or a whole number from 0 to 1,125,899,906,842,624 or a size such as 80GB or 512GiB\n"),
    ("two shares", GOOD, ["data.split=[95,5]"], "data.split is [95, 5]; expected a list of 3 numbers from 0 to 1,000,000,000, shares of training, validation and test such as [95, 5, 0]\n"),
    ("quoted switch", GOOD + "train: {compile: 'true'}", [], 'train.compile is the text "true", in quotes; expected true or false or auto\n'),
    ("cluster without its size", GOOD, ["cluster.accelerator.memory=40GB"], "cluster.node.ranks is missing; set it in the recipe or on the command line as cluster.node.ranks=...\n"),
    ("default above the steps", GOOD, ["train.steps=10"], "optimizer.warmup is 100, its default; expected at most train.steps (10), set optimizer.warmup to that or less\n"),
    ("another program's key", GOOD + "train: {batch_size: 4}", [], "train.batch_size is not a recipe key; did you mean train.global_batch or train.microbatch?\n"),
    ("another program's key in an argument", GOOD, ["max_iters=4"], "max_iters is not a recipe key; did you mean train.steps?\n"),
    ("another program's preset", GOOD, ["model.preset=gpt2"], "model.preset is gpt2, which is no preset; did you mean gpt2-124m?\n"),
    ("another program's dtype", GOOD, ["precision.compute=float16"], "; did you mean fp16?\n"),
    ("word for a section", GOOD, ["precision=bf16"], "; did you mean precision.compute=bf16?\n"),
    ("number for a section", GOOD, ["zero=3"], "; did you mean zero.stage=3?\n"),
    ("number that fits no key of a section", GOOD, ["zero=7"], "zero is 7; expected a section with the keys preset, stage, partition, secondary, hierarchical, resident, registered\n"),
    ("switch for a word", GOOD, ["activation_checkpointing=true"], "; did you mean full?\n"),
    ("extends in an argument", GOOD, ["extends=foo.yaml"], "extends is read only in a recipe's file; write it there"),
    ("section as text", GOOD + "train: fast", [], "train is fast; expected a section with the keys steps"),
    ("empty section", GOOD + "train:", [], "train is null; expected a section"),
    ("short list", GOOD + "optimizer: {betas: [0.9]}", [], "optimizer.betas is [0.9]; expected a list of 2 numbers"),
    ("negative size", GOOD + "train: {steps: -5}", [], "train.steps is -5; expected a whole number from 1 to 1,000,000,000"),
    ("negative layers", GOOD, ["model.layers=-2"], "model.layers is -2; expected a whole number from 1 to 2,048"),
    ("negative rate", GOOD, ["optimizer.lr=-1e-3"], "optimizer.lr is -0.001; expected a number from 0 to 1,000,000,000"),
    ("beta of 1", GOOD, ["optimizer.betas=[0.9,1]"], "optimizer.betas[1] is 1; expected a number from 0 and below 1\n"),
    ("speed in a list", GOOD, ["cluster={node: {ranks: 1}, clusters: [{name: a, speed: 0}]}"], "cluster.clusters[0].speed is 0; expected a number above 0"),
    ("misspelt key in a list", GOOD, ["cluster={node: {ranks: 1}, clusters: [{name: a, sped: 1}]}"], "cluster.clusters[0].sped is not a recipe key; did you mean cluster.clusters[].speed?"),
    ("key that is not in a list", GOOD, ["cluster={node: {ranks: 1}, clusters: [{nodes: 1}]}"], "cluster.clusters[0].name is missing; set it in the recipe\n"),
    ("no list", GOOD, ["cluster={node: {ranks: 1}, clusters: 3}"], "cluster.clusters is 3; expected a list of sections with the keys name"),
    ("section within a word's place", GOOD, ["cluster={node: {ranks: two}}"], "cluster.node.ranks is two; expected a whole number"),
    ("nan", GOOD, ["optimizer.lr=.nan"], "optimizer.lr is nan; expected a finite number"),
    ("infinity", GOOD, ["optimizer.clip=.inf"], "optimizer.clip is inf; expected a finite number"),
    ("huge number", GOOD, ["train.steps=99999999999999999999999"], "train.steps is 1e+23; expected a number below 2^63"),
    ("heads that do not divide", GOOD, ["model.heads=7"], "model.hidden is 128; it must be a multiple of model.heads (7)"),
    ("impossible batch", GOOD, ["--nproc", "3"], "train.global_batch is 8; expected a multiple of the 3 data-parallel ranks"),
    ("impossible microbatch", GOOD, ["train.microbatch=3"], "train.microbatch is 3; expected a divisor of 8, the sequences of a data-parallel rank in train.global_batch (8)"),
    ("degree that is not there", GOOD, ["parallel.data=4"], "parallel.data is 4, but the run has 1 rank"),
    ("sequence longer than positions", GOOD, ["data.sequence_length=512"], "expected at most model.positions (256)"),
    ("long warm-up", GOOD, ["optimizer.warmup=5000"], "optimizer.warmup is 5000; expected at most train.steps (1000), set"),
    ("nothing to validate on", GOOD, ["data.split=[1,0,0]"], "data.split leaves nothing to validate on"),
    ("malformed blend", GOOD, ["data.path=[prepared,0.5]"], "expected a blend [weight, prefix"),
    ("weights that overflow", GOOD, ["data.path=[1e308,prepared,1e308,prepared]"], "data.path[0] is 1e+308; expected text or a number from 0 to 1,000,000,000\n"),
    ("pipe as data", GOOD, ["data.path=pipe"], "data.path is pipe, but pipe.bin is not a regular file\n"),
    ("unknown preset", GOOD, ["model.preset=gpt2-124"], "model.preset is gpt2-124, which is no preset; did you mean gpt2-124m?"),
    ("two models", GOOD, ["model.family=llama"], "model.preset is gpt2-1m and model.family is llama; expected one of them"),
    ("no model", "model: {}\ndata: {path: prepared}", [], "the recipe has no model; set model.preset, model.hf, or model.family with its sizes\n"),
    ("no model section", "data: {path: prepared}", [], "the recipe has no model; set model.preset"),
    ("half a model", "model: {family: llama, layers: 2, heads: 2}\ndata: {path: prepared}", [], "model.hidden is missing"),
    ("key of another family", GOOD, ["model.rope_theta=1e6"], "model.rope_theta does not apply to family gpt2"),
    ("scaling of another family", GOOD, ["model.rope_scaling={factor: 8, original_positions: 64}"], "model.rope_scaling does not apply to family gpt2"),
    ("scaling upside down", GOOD, ["model.preset=llama-1m", "model.rope_scaling={factor: 8, original_positions: 64, low_freq_factor: 4}"], "low_freq_factor is 4.0; it must be below high_freq_factor (4.0)"),
    ("alpha without speeds", GOOD, ["pipeline.split=uniform", "pipeline.alpha=1.1"], "pipeline.alpha is 1.1, but pipeline.split is uniform"),
    ("no data", "model: {preset: gpt2-1m}", [], "data.path is missing; set it in the recipe or on the command line as data.path=..."),
    ("data that is not there", GOOD, ["data.path=nowhere"], "there is no file nowhere.bin"),
    ("no tokenizer", GOOD, ["data.tokenizer=nowhere"], "data.tokenizer is nowhere, which is not a folder; expected one that `llmtrain data tokenizer` made"),
    ("misspelt tokenizer", GOOD, ["data.tokenizer=./text"], "data.tokenizer is ./text, which is not a folder; did you mean texts?"),
    ("no hf folder", GOOD, ["model.preset=null", "model.hf=org/name"], "model.hf is org/name, which is not a folder"),
    ("no run with weights", GOOD, ["checkpoint.weights=nowhere"], "checkpoint.weights is nowhere, which is not a folder; expected that of a run or a checkpoint\n"),
    ("no run to resume", GOOD, ["checkpoint.resume=nowhere"], "checkpoint.resume is nowhere, which is not a folder"),
    ("file as folder", GOOD, ["logging.dir=recipe.yaml"], "logging.dir is recipe.yaml, but recipe.yaml is a file"),
    ("apex without a GPU", GOOD, ["optimizer.backend=apex"], "optimizer.backend is apex, which needs NVIDIA's apex and a GPU"),
    ("name with a slash", GOOD, ["name=a/b"], "name is 'a/b'; it names the run's folder"),
    ("name with a line end", GOOD + 'name: "a\\nb"', [], "name is 'a\\nb'; expected text of printable characters"),
    ("negative seed", GOOD, ["seed=-1"], "seed is -1; expected a whole number from 0 and below"),
    ("python tag", GOOD + "name: !!python/object/apply:os.system [id]", [], "could not determine a constructor"),
    ("path tag", GOOD + "name: !!python/object/apply:pathlib.Path [x]", [], "name is PosixPath('x'); expected plain YAML"),
    ("set tag", GOOD + "train: !!set {steps, seed}", [], "recipe.yaml is not a recipe"),
    ("long name", GOOD, [f"name={'x' * 300}"], "it names the run's folder"),
    ("binary tag", GOOD + "name: !!binary aGk=", [], "name is b'hi'; expected plain YAML"),
    ("duplicate key", GOOD + "model: {preset: gpt2-3m}", [], "found duplicate key model"),
    ("list", "- 1\n- 2\n", [], "it holds a list, expected sections with keys"),
    ("scalar", "just words", [], "recipe.yaml is not a recipe: it holds plain text, expected sections with keys"),
    ("empty file", "", [], "recipe.yaml has no keys; a recipe needs at least a model and data.path, or `extends`\n"),
    ("broken YAML", "model: {preset: gpt2", [], "recipe.yaml is not a recipe"),
    ("tab", "model:\n\tpreset: gpt2-1m\n", [], "recipe.yaml is not a recipe"),
    ("number as key", GOOD + "3: 4", [], "has the key 3; expected keys that are words"),
    ("secret of the environment", GOOD + "name: ${oc.env:HOME}", [], "name is ${oc.env:HOME}; a recipe may only refer"),
    ("reference to nowhere", GOOD + "name: ${train.stops}", [], "name has ${train.stops}, but train.stops is not a recipe key; did you mean train.steps?\n"),
    ("reference of an argument", GOOD, ["name=${train.stops}"], "llmtrain: name has ${train.stops}, but train.stops is not a recipe key; did you mean train.steps?\n"),
    ("reference to what is not set", GOOD, ["name=x${zero.stage}"], "name has ${zero.stage}, but nothing sets zero.stage; set it in the recipe too\n"),
    ("reference to itself", GOOD + "name: ${name}", [], "name has a reference that leads in a circle or cannot be read; write the value out\n"),
    ("value left to the user", GOOD + "seed: ???", [], "seed is missing; recipe.yaml leaves it to you"),
    ("extends nothing", GOOD + "extends: other.yaml", [], "extends in recipe.yaml is other.yaml: there is no recipe other.yaml; "),
    ("extends itself", GOOD + "extends: recipe.yaml", [], "recipe.yaml extends itself: recipe.yaml -> recipe.yaml"),
    ("extends a number", GOOD + "extends: 3", [], "extends in recipe.yaml is 3; expected another recipe"),
    ("override without value", GOOD, ["train.steps"], "'train.steps' is not an override; expected key=value"),
    ("override of no key", GOOD, ["steps=3"], "steps is not a recipe key; did you mean train.steps?"),
    ("override with broken YAML", GOOD, ["data.path=[a"], "'data.path=[a' cannot be read as key=value"),
    ("override without a space", GOOD, ["train={stpes:5}"], "llmtrain: train has 'stpes:5'; put a space after the colon: stpes: 5\n"),
    ("override of a part of a list", GOOD, ["optimizer.betas[0]=0.9"], "optimizer.betas[0] is a part of a list, which is set as a whole: optimizer.betas=[...]\n"),
    ("override of a part of sections", GOOD, ["cluster.clusters.0.nics.0.bandwidth=1GB/s"], "is a part of a list, which is set as a whole: cluster.clusters=[{name: ...}]\n"),
    ("text for a list", GOOD, ["offload.paths=/scratch"], "offload.paths is /scratch; expected a list of texts; write offload.paths=[/scratch]\n"),
    ("null in a list", GOOD, ["optimizer.betas=[0.9,null]"], "optimizer.betas[1] is null; expected a number from 0 and below 1\n"),
    ("other indentation", "train:\n  steps: 5\n    global_batch: 8\n", [], "line 3, column 17: this line is indented differently from its section, or a text in it has a colon and no quotes\n"),
    ("TOML", "[train]\nsteps = 5\n", [], "line 2, column 1: this is no YAML; expected lines such as `train: {steps: 5}`\n"),
    ("override without key", GOOD, ["=3"], "'=3' is not an override"),
    ("override with spaces", GOOD, ["train.steps = 3"], "'train.steps = 3' is not an override"),
    ("unicode override", GOOD, ["träin.steps=3"], "träin.steps is not a recipe key; did you mean train.steps?"),
    ("MPI without mpirun", GOOD, ["--nproc", "2", "parallel.pipeline=2", "pipeline.transport=mpi"], "no MPI has started this run; start it with mpirun -n 2"),
    ("no ranks", GOOD, ["--nproc", "0"], "--nproc"),
    ("ranks in words", GOOD, ["--nproc", "two"], "--nproc"),
    ("steps in words", GOOD, ["--nproc", "2.5"], "'2.5' is not a whole number\n"),
    ("misspelt family", GOOD, ["model.preset=null", "model.family=lama"], "model.family is lama; expected one of gpt2, llama, neox; did you mean llama?"),
    ("folder as data", GOOD, ["data.path=texts"], "data.path is texts, but there is no file texts.bin; texts itself is there: if it is text, prepare it with `llmtrain data prepare texts --tokenizer DIR --output PREFIX`, and give PREFIX"),
    ("file of a prepared set", GOOD, ["data.path=prepared.bin"], "there is no file prepared.bin.bin; give prepared\n"),
    ("misspelt prefix", GOOD, ["data.path=perpared"], "there is no file perpared.bin; did you mean prepared?"),
    ("folder of a prepared set", GOOD, ["data.path=."], "there is no file ..bin; did you mean prepared?"),
    ("unknown option", GOOD, ["--nprocs", "2"], "No such option: --nprocs"),
]  # fmt: skip

# (command line, what the sentence must contain)
BROKEN_COMMANDS = [
    (["rum"], "No such command 'rum'. Did you mean 'run'?"),
    (["train", "first.yaml"], "No such command 'train'; did you mean `llmtrain run`?\n"),
    (["first.yaml"], "No such command 'first.yaml'; a recipe is run with `llmtrain run first.yaml`\n"),
    (["plan", "first.yaml", "--nproc", "8"], "No such option: --nproc; did you mean --ranks?\n"),
    (["eval", "done", "--split", "val"], "'val' is not one of 'train', 'valid', 'test'; did you mean valid?\n"),
    (["eval", "done", "--split", "all"], "'all' is not one of 'train', 'valid', 'test'.\n"),
    (["report", "mine"], "mine is not a folder; did you mean runs/mine?\n"),
    (["status", "mine"], "mine is not a folder; did you mean runs/mine?\n"),
    (["generate", "mine"], "mine is not a folder; did you mean runs/mine?\n"),
    (["eval", "runs/min"], "runs/min is not a folder; did you mean runs/mine?\n"),
    (["ckpt", "list", "min"], "min is not a folder; did you mean runs/mine?\n"),
    (
        ["logs", "min"],
        "min is not the folder of a run, nor is there one of that name in runs; did you mean runs/mine?\n",
    ),
    (["status", "elsewhere"], "elsewhere is not a folder; expected a run's, or one that holds runs (logging.dir)\n"),
    (
        ["run", "first.yaml", "--train.steps", "5"],
        "No such option: --train.steps; a recipe's key is written without dashes: train.steps=...\n",
    ),
    (
        ["plan", "first.yaml", "--tensor-model-parallel-size=2"],
        "a recipe's key is written without dashes: parallel.tensor=...\n",
    ),
    (["recipes", "show", "first.yaml", "--model", "x"], "a recipe's key is written without dashes: model.preset=...\n"),
    (["run", "first.yaml", "--context-parallel-size", "2"], "; context parallelism is not supported"),
    (["run", "first.yaml", "--precision.loss-scale=5"], "without dashes: precision.loss_scale=...\n"),
    (["run", "first.yaml", "--lr", "5"], "without dashes: optimizer.lr=...\n"),
    (["run", "first.yaml", "--trian.steps", "5"], "without dashes: train.steps=...\n"),
    (["run", "first.yaml", "--jsno"], "No such option: --jsno (Possible options: --json, --nproc)\n"),
    (["eval", "done", "--train.steps", "5"], "No such option: --train.steps\n"),
    (["run", "--config", "first.yaml"], "; a recipe is named without an option, as in `llmtrain run RECIPE`\n"),
    (["run", "first.yaml", "--resume"], "; the same command resumes a run from its last checkpoint\n"),
    (["run", "first.yaml", "--gpus", "2"], "; did you mean --nproc?\n"),
    (["--verbose"], "No such option: --verbose"),
    (["run"], "Missing argument 'RECIPE'"),
    (["run", "nowhere.yaml"], "there is no recipe nowhere.yaml"),
    (["generate", "run", "--temperature", "hot"], "'hot' is not a number\n"),
    (["run", "frist.yaml"], "there is no recipe frist.yaml; did you mean first.yaml?"),
    (["run", "quickstrat"], "there is no recipe quickstrat; did you mean quickstart?"),
    (["run", "."], "is a folder; expected a recipe's YAML file"),
    (["run", "done"], "done is a folder; its run's recipe is done/recipe.resolved.yaml"),
    (["run", "prepared.bin"], "prepared.bin has no keys"),
    (["run", "pipe.bin"], "pipe.bin cannot be read: it is not a regular file\n"),
    (["data", "inspect", "prepared.idx"], "prepared.idx.bin and prepared.idx.idx not found; give prepared\n"),
    (["run", "latin.yaml"], "latin.yaml cannot be read: it is not UTF-8 text, first at byte 9"),
    (["run", "\0"], "there is no recipe \\x00"),
    (["run", "x" * 5000], "cannot be read as a recipe's path"),
    (["recipes", "shwo"], "Did you mean 'show'?"),
    (["recipes", "show", "nowhere"], "there is no recipe nowhere"),
    (["doctor", "--jsn"], "No such option: --jsn"),
    (
        ["data", "prepare", "texts", "--output", "out"],
        "Missing option '--tokenizer'. Folder of a Hugging Face tokenizer; `llmtrain data",
    ),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for suffix in ("bin", "idx"):
        Path(f"prepared.{suffix}").touch()
    os.mkfifo("pipe.bin")
    Path("texts").mkdir()
    Path("runs/mine").mkdir(parents=True)
    Path("done").mkdir()
    Path("begun/checkpoints/step-00000001").mkdir(parents=True)
    Path("done/recipe.resolved.yaml").write_text(GOOD)
    Path("first.yaml").write_text(GOOD)
    Path("latin.yaml").write_bytes(b"name: caf\xe9\n")
    return tmp_path


def everything() -> dict[Path, bytes | None]:
    """Return every file below this folder with its content, and every folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


def expect_one_sentence(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything()
    code = main(argv)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.startswith("llmtrain: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err
    assert everything() == before


@pytest.mark.parametrize(
    ("text", "arguments", "expected"), [case[1:] for case in BROKEN_RECIPES], ids=[case[0] for case in BROKEN_RECIPES]
)
def test_broken_recipe(
    text: str, arguments: list[str], expected: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    expect_one_sentence(["run", "recipe.yaml", *arguments], expected, capsys)


@pytest.mark.parametrize(("argv", "expected"), BROKEN_COMMANDS, ids=[case[1][:30] for case in BROKEN_COMMANDS])
def test_broken_command(argv: list[str], expected: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect_one_sentence(argv, expected, capsys)


def test_the_good_recipe_is_good(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe that the broken ones are made from passes every check."""
    Path("recipe.yaml").write_text(GOOD)
    assert main(["run", "recipe.yaml", "--nproc", "2", "--dry-run"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["parallel"]["data"] == 2
    assert resolved["model"]["layers"] == 4


def test_a_dry_run_says_what_a_run_would(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output has the facts as comments, and still loads as a recipe."""
    Path("recipe.yaml").write_text(GOOD)
    keys = ["parallel.data=auto", "parallel.pipeline=4", "train.global_batch=2", "train.microbatch=1"]
    assert main(["run", "recipe.yaml", *keys, "--nproc", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert (
        "# parallel.pipeline is 4, but train.global_batch and train.microbatch give a pipeline 2 microbatches" in said
    )
    assert yaml.safe_load(said)["parallel"]["pipeline"] == 4
    assert main(["run", "recipe.yaml", *keys, "--nproc", "4", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"] == yaml.safe_load(said)
    assert f"# {found['advice'][0]}\n" in said
    assert (found["summary"]["ranks"], found["summary"]["steps"]) == (4, found["recipe"]["train"]["steps"])
    expect_one_sentence(["run", "recipe.yaml", "--json"], "--json is given without --dry-run", capsys)


def test_a_dry_run_begins_with_a_table(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = IndexedWriter(workplace / "prepared", np.dtype("uint16"))
    writer.add(np.zeros(64_000), np.full(100, 640))
    writer.commit()
    Path("recipe.yaml").write_text(
        GOOD + "train: {steps: 980, global_batch: 4}\nprecision: {compute: fp32}\noptimizer: {lr: 4.0e-3}"
    )
    assert main(["run", "recipe.yaml", "--nproc", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    table = [" ".join(line.removeprefix("# ").split()) for line in said.partition("name: recipe")[0].splitlines()]
    # 4 layers of 12 x 128^2 + 13 x 128, embeddings of 2048 tokens and 256 positions, and a norm.
    parameters = 4 * (12 * 128**2 + 13 * 128) + (2048 + 256) * 128 + 2 * 128
    flops = 980 * 4 * 64 * (6 * (4 * 12 * 128**2 + 2048 * 128) + 12 * 4 * 128 * 64)
    assert table[:8] == [
        f"parameters {parameters / 1e6:.2f}M",
        "steps 980",
        "tokens 251k, 256 per step",
        "epochs 4 of the 62.7k tokens of the training split",
        f"FLOPs {flops:.2e}",
        "learning rate 0.004 after 100 steps, 0.0004 in the last step",
        "ranks 4 x CPU",
        f"states per rank {16 * parameters / 2**20:.1f} MiB of weights, gradients and optimizer states",
    ]
    assert "train.microbatch: auto -> 1" in table
    assert yaml.safe_load(said)["train"]["steps"] == 980


def test_a_dry_run_checks_the_data_as_a_run_does(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = IndexedWriter(workplace / "prepared", np.dtype("uint16"))
    writer.add(np.where(np.arange(64_000) == 652, 2908, 7).astype(np.uint16), np.full(100, 640))
    writer.commit()
    Path("recipe.yaml").write_text(GOOD + "train: {steps: 980, global_batch: 4}")
    said = "holds id 2908 at token 12 of document 1; expected 0 to 2047"
    # A run that ends in this process would decide the process's exit code.
    words = [sys.executable, "-m", "llmtrain", "run", "recipe.yaml", "--nproc", "1"]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, said in run.stderr) == (2, True)
    assert main(["run", "recipe.yaml", "--nproc", "1", "--dry-run"]) == 2
    assert said in capsys.readouterr().err
    assert main(["run", "recipe.yaml", "--nproc", "1", "model.vocab=4096", "--dry-run"]) == 0
    assert "# ranks            1 x CPU\n" in capsys.readouterr().out


def test_a_dry_run_says_that_mpi_has_to_start_the_ranks(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text(GOOD)
    keys = ["parallel.data=auto", "parallel.pipeline=4", "pipeline.transport=mpi"]
    assert main(["run", "recipe.yaml", *keys, "--nproc", "4", "--dry-run"]) == 0
    assert "\n# pipeline.transport is mpi, but no MPI has started this run; start it with mpirun -n 4 " in (
        capsys.readouterr().out
    )


def test_a_run_that_the_machine_cannot_hold(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is refused before anything is written; a dry run, which may be for another machine, only reports it."""
    monkeypatch.setattr("llmtrain.plan.resolve.machine_refusal.machine_memory", lambda swap: 2**20)
    Path("recipe.yaml").write_text(GOOD)
    words = ["run", "recipe.yaml", "--nproc", "1"]
    sentence = "of memory, but this machine has 1.00 MiB; no change of train.microbatch"
    expect_one_sentence(words, sentence, capsys)
    assert main([*words, "--dry-run"]) == 0
    assert sentence in capsys.readouterr().out
    assert main([*words, "--dry-run", "--force"]) == 0
    assert "this machine has" not in "".join(capsys.readouterr())


def test_a_run_that_has_begun_needs_not_what_it_began_from(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text(GOOD)
    words = ["run", "recipe.yaml", "--nproc", "1", "checkpoint.resume=gone", "logging.dir=there", "--dry-run"]
    Path("there/recipe/checkpoints/step-00000004.partial").mkdir(parents=True)
    expect_one_sentence(words, "checkpoint.resume is gone, which is not a folder", capsys)
    Path("there/recipe/checkpoints/step-00000004").mkdir()
    assert main(words) == 0


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["run", "nowhere"], 2), (["--version"], 0)])
def test_process(arguments: list[str], code: int, workplace: Path) -> None:
    """Run in a separate process: the same exit code, and the sentence or nothing on stderr."""
    done = subprocess.run([sys.executable, "-m", "llmtrain", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("\n") == (1 if code else 0)


def test_recipes_commands(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list"]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert main(["recipes", "show", "quickstart", "train.steps=7"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 7
    assert main(["recipes", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["model"]
    assert main(["recipes", "show", "presets"]) == 0
    assert "124,439,808" in capsys.readouterr().out
    assert main(["recipes", "list", "--json"]) == 0
    assert [row["recipe"] for row in json.loads(capsys.readouterr().out)] == shipped_names()
    assert main(["recipes", "presets", "--json"]) == 0
    models = {row["preset"]: row for row in json.loads(capsys.readouterr().out)}
    assert (models["gpt2-124m"]["parameters"], models["gpt2-124m"]["layers"]) == (124439808, 12)


def test_doctor(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["can_train"] else 1)
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "torch", "gpu", "gloo", "memory", "apex", "mpi4py", "slurm"} <= names
