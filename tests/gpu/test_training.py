"""Training on a GPU follows training on a CPU. Every test also runs on the CPU, so that it is known to work."""

import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from llmtrain.checkpoint.read import CheckpointReader
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm import ranks as ranks_module
from llmtrain.comm.ranks import connect
from llmtrain.errors import PreemptedError
from llmtrain.inference.generate import Sampling, generate
from llmtrain.inference.trained import evaluate_on, open_model
from llmtrain.plan.facts import Device, Facts
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.telemetry.metrics import read_metrics
from llmtrain.training import compilation, loop
from llmtrain.training.attention import take_planned
from llmtrain.training.run import Run

from tests.tiny import Curve, curve, write_corpus
from tools.bench.gpu import run_part
from tools.bench.gpu_parts import TINY

STEPS = 8
RECIPE = """
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 96, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 8, microbatch: 4, eval_every: 4, eval_batches: 1, compile: false}}
precision: {{compute: fp32}}
optimizer: {{lr: 1.0e-2, warmup: 2}}
checkpoint: {{every: 4}}
logging: {{every: 1, dir: {folder}/runs}}
"""
# Trains as the command does, and is killed in the last step but one, when there is a checkpoint.
KILLED = f"""
import os, signal, sys
from llmtrain.cli.main import main
from llmtrain.training import loop
step = loop.train_step
def killed(run, number):
    if number == {STEPS - 1}:
        run.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(run, number)
loop.train_step = killed
main(sys.argv[1:])
"""
BUCKETS = "offload.bucket=2048"
HOST = ("offload.optimizer=host", BUCKETS)
NVME = ("offload.optimizer=nvme", "offload.paths=[.]", BUCKETS)
ON_DEVICE = "offload.step=device"
WAITING = ("offload.spare=1", "offload.spare_weights=device")
# A machine with a GPU has no time for the cases that others run.
HERE: Device = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[HERE])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device on which the test's runs train."""
    use(request.param, monkeypatch)
    return cast(Device, request.param)


def use(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks compute on `device`, also where the machine has a GPU."""
    monkeypatch.setattr(ranks_module, "device_of", lambda local_rank: torch.device(device, 0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its data; volumes of offload are in it."""
    write_corpus(tmp_path / "set", 100)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=tmp_path, steps=STEPS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(folder: Path, name: str, device: Device, *keys: str) -> Curve:
    """Train the recipe with `keys` to its last step; return its losses."""
    recipe = load_recipe(str(folder / "tiny.yaml"), [f"name={name}", *keys])
    plan = check_and_plan(recipe, Facts(world=1, device=device))
    take_planned(plan)
    loop.train(plan, connect(Layout({Axis.DATA: 1})).on_grid(plan.grid, plan.tiers), [])
    return curve(folder / "runs" / name)


@pytest.mark.parametrize(("compute", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 1e-2)])
def test_the_curve_is_that_of_fp32_on_a_cpu(
    compute: str, tolerance: float, folder: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"precision.compute={compute}"] + ["precision.loss_scale=1024"] * (compute == "fp16")
    found = trained(folder, "found", device, *keys)
    use("cpu", monkeypatch)
    expected = trained(folder, "expected", "cpu")
    assert found.keys() == expected.keys()
    assert len(found) > STEPS
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=tolerance)


def test_recomputation_changes_no_loss(folder: Path, device: Device) -> None:
    plain = trained(folder, "plain", device)
    found = trained(folder, "recomputed", device, "activation_checkpointing=full")
    assert list(found.values()) == pytest.approx(list(plain.values()), rel=1e-6)


def test_breadth_first_changes_no_loss(folder: Path, device: Device) -> None:
    """One rank sums gradients in the same order."""
    keys = ("train.microbatch=1", "activation_checkpointing=full")
    plain = trained(folder, "plain", device, *keys)
    found = trained(folder, "breadth", device, *keys, "pipeline.schedule=breadth-first")
    assert list(found.values()) == pytest.approx(list(plain.values()), rel=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_blocks_have_the_same_curve(folder: Path) -> None:
    plain = trained(folder, "plain", "cuda")
    found = trained(folder, "compiled", "cuda", "train.compile=true")
    assert list(found.values()) == pytest.approx(list(plain.values()), rel=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_that_wait_for_the_host_are_timed_compiled(folder: Path) -> None:
    recipe = load_recipe(str(folder / "tiny.yaml"), ["train.compile=auto"])
    plan = check_and_plan(recipe, Facts(world=1, device="cuda"))
    take_planned(plan)
    _, said = compilation.measure(*compilation._passes(plan, torch.device("cuda", 0)))
    assert "; compiled, " in said


def states_of(run: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return every tensor of a run's last checkpoint."""
    with CheckpointReader(run / "checkpoints" / f"step-{STEPS:08d}") as reader:
        names = [(name, state) for name in reader.manifest.tensors for state in ("master", "m", "v")]
        return {(name, state): reader.full_tensor(name, state) for name, state in names}


@pytest.mark.parametrize(
    "keys",
    [(*HOST, ON_DEVICE), HOST, (*HOST, *WAITING), (*HOST, ON_DEVICE, *WAITING), (*NVME, ON_DEVICE), NVME],
    ids=["host, step on the device", "host", "ahead", "ahead, step on the device", "nvme, step on the device", "nvme"],
)
def test_offload_keeps_the_curve(keys: tuple[str, ...], folder: Path, device: Device) -> None:
    """To the last bit: the kernels of CPUs and of GPUs have the bits of one reference."""
    same = ("checkpoint.async=false",)
    plain = trained(folder, "plain", device, *same)
    found = trained(folder, "offloaded", device, *same, *keys)
    assert found == plain
    ours, theirs = (states_of(folder / "runs" / name) for name in ("offloaded", "plain"))
    assert all(torch.equal(values, theirs[name]) for name, values in ours.items())


def test_rows_have_what_their_step_moved_alone(folder: Path, device: Device) -> None:
    trained(folder, "offloaded", device, *NVME, "offload.parameters=nvme", "train.eval_every=2")
    rows = read_metrics(folder / "runs" / "offloaded" / "metrics.jsonl")
    moved = [row["offload"] for row in rows if "offload" in row]
    assert len(moved) == STEPS
    for way in ("read_bytes", "written_bytes"):
        assert len({tuple(one[way].values()) for one in moved}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_waits_for_the_host_link_are_measured(folder: Path) -> None:
    outside = (*HOST, "offload.parameters=host", "activation_checkpointing=full", "offload.activations=host")
    trained(folder, "offloaded", "cuda", *outside)
    steps = [row for row in read_metrics(folder / "runs" / "offloaded" / "metrics.jsonl") if "offload" in row]
    assert all(0 < step["offload"]["gpu_wait_s"] < step["step_time_s"] for step in steps)
    assert all(0 < step["offload"]["activations"]["gpu_wait_s"] < step["step_time_s"] for step in steps)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_stopped_run_resumes(
    asynchronous: str, folder: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"checkpoint.async={asynchronous}"
    expected = trained(folder, "whole", device, key)
    step = loop.train_step

    def stopped(run: Run, number: int) -> bool:
        if number == STEPS // 2 + 1:
            signal.raise_signal(signal.SIGTERM)
        return step(run, number)

    monkeypatch.setattr(loop, "train_step", stopped)
    with pytest.raises(PreemptedError):
        trained(folder, "stopped", device, key)
    assert len(curve(folder / "runs" / "stopped")) < len(expected)
    monkeypatch.setattr(loop, "train_step", step)
    assert trained(folder, "stopped", device, key) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_deterministic_runs_have_the_same_bits(folder: Path) -> None:
    """Another run, and one that is killed and resumes, have the losses and the states of the first."""
    # Each start would time the kernels of attention, and might take another one.
    keys = ["--nproc", "1", "train.deterministic=true", "precision.compute=bf16", "train.attention=torch"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    usual = ("-m", "llmtrain")
    for name, program in (("one", usual), ("two", usual), ("killed", ("-c", KILLED)), ("killed", usual)):
        words = [sys.executable, *program, "run", str(folder / "tiny.yaml"), f"name={name}", *keys]
        ran = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=280, check=False)
        assert ran.returncode == (0 if program == usual else -signal.SIGKILL), ran.stderr
    expected, states = curve(folder / "runs" / "one"), states_of(folder / "runs" / "one")
    for name in ("two", "killed"):
        assert curve(folder / "runs" / name) == expected
        found = states_of(folder / "runs" / name)
        assert all(torch.equal(values, found[state]) for state, values in states.items())


def test_a_killed_run_resumes(folder: Path, device: Device) -> None:
    """It has the curve of a run that nothing killed."""
    expected = trained(folder, "whole", device)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    words = [sys.executable, "-c", KILLED, "run", str(folder / "tiny.yaml"), "name=killed", "--nproc", "1"]
    ran = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert len(curve(folder / "runs" / "killed")) < len(expected)
    assert trained(folder, "killed", device) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_stage_3_as_one_rank_of_a_fake_group(tmp_path: Path) -> None:
    """Its collectives return at once; what it trains is not looked at."""
    (part,) = (one for one in TINY if one.name == "tiny, one rank of 8 without its links")
    found = run_part(part, "cuda", tmp_path)
    assert isinstance(found, dict), found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "keys",
    [(), (*HOST, "offload.parameters=host", "activation_checkpointing=full", "offload.activations=host")],
    ids=["resident", "offloaded"],
)
def test_torch_finds_no_race_between_streams(keys: tuple[str, ...], folder: Path) -> None:
    """With asynchronous saves. torch's sanitizer sees the operators of the main thread, and no kernel of Triton."""
    if "record_stream" not in inspect.getsource(torch.cuda._sanitizer):
        pytest.skip("this torch's sanitizer takes record_stream for a write")
    words = [sys.executable, "-m", "llmtrain", "run", str(folder / "tiny.yaml"), "name=tiny", "--nproc", "1", *keys]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": paths}
    ran = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert "data race" not in ran.stderr, ran.stderr
    assert ran.returncode == 0, ran.stderr
    assert len(curve(folder / "runs" / "tiny")) > STEPS


def test_a_trained_model_generates(folder: Path, device: Device) -> None:
    trained(folder, "model", device)
    model = open_model(folder / "runs" / "model", pytest.fail).model
    assert next(model.parameters()).device.type == device
    tokens = list(generate(model, [1, 2, 3], 5, Sampling(temperature=0)))
    assert len(tokens) == 5
    assert all(0 <= token < 64 for token in tokens)


@pytest.mark.parametrize(("dtype", "tolerance"), [("auto", 1e-5), ("bf16", 1e-2)])
def test_the_loss_of_a_trained_model_is_that_of_its_run(
    dtype: str, tolerance: float, folder: Path, device: Device
) -> None:
    trained(folder, "model", device)
    rows = read_metrics(folder / "runs" / "model" / "metrics.jsonl")
    logged = [row["loss"] for row in rows if row.get("event") == "eval"]
    model = open_model(folder / "runs" / "model", pytest.fail, dtype=dtype)
    found = evaluate_on(model, None, None, count=8, microbatch=4)
    assert found["loss"] == pytest.approx(logged[-1], rel=tolerance)
