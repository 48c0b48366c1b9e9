"""The peak of a GPU's memory in a step is at most what is planned, and not much less."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.fake_cuda.library import compiler

SETTINGS = {
    "nothing recomputed": ("activation_checkpointing=none",),
    "fully recomputed": ("activation_checkpointing=full",),
    "groups recomputed": ("activation_checkpointing={every: 3}",),
    "one sequence": ("activation_checkpointing=none", "train.microbatch=1"),
    "sums in bf16": ("activation_checkpointing=none", "precision.gradients=compute"),
    "dropout": ("activation_checkpointing=full", "model.dropout=0.1"),
    "fp32": ("activation_checkpointing=none", "precision.compute=fp32"),
    # A block's backward pass takes most, and not the loss.
    "many sequences": ("activation_checkpointing=full", "train.microbatch=64", "train.global_batch=64"),
    "many sequences, nothing recomputed": (
        "activation_checkpointing=none",
        "train.microbatch=64",
        "train.global_batch=64",
    ),
}
PRESETS = ("gpt2-124m", "llama3.2-1b", "pythia-160m")
AHEAD = ("offload.spare=1", "offload.spare_weights=device")
NOTHING, BLOCKS = "activation_checkpointing=none", "activation_checkpointing=full"
ALL = "train.global_batch=32"
SEVERAL = {
    **{f"stage {stage}": (4, 4, (f"zero.stage={stage}", NOTHING)) for stage in range(4)},
    "stage 3, 2 nodes": (4, 2, ("zero.stage=3", NOTHING)),
    "stage 3, recomputed": (4, 4, ("zero.stage=3", BLOCKS)),
    "stage 3, int8, int4": (4, 2, ("zero.stage=3", "quantize.weights=int8", "quantize.gradients=int4", NOTHING)),
    "zero++": (4, 2, ("zero.preset=zero++", NOTHING)),
    "mics": (4, 2, ("zero.preset=mics", NOTHING)),
    "topo": (8, 4, ("zero.preset=topo", NOTHING)),
    "tensor": (4, 4, ("parallel.tensor=4", NOTHING)),
    "tensor, sequence, stage 1": (4, 4, ("parallel.tensor=2", "parallel.sequence=true", "zero.stage=1", NOTHING)),
    "1f1b": (2, 2, ("parallel.pipeline=2", NOTHING)),
    "1f1b, stage 3": (4, 4, ("parallel.pipeline=2", "zero.stage=3", NOTHING)),
    "zero bubble, stage 1": (
        4,
        4,
        ("parallel.pipeline=2", "zero.stage=1", "pipeline.schedule=zero-bubble", NOTHING),
    ),
    "optimizer on the host": (2, 2, ("zero.stage=1", "offload.optimizer=host", NOTHING)),
    "stepped on the device": (2, 2, ("zero.stage=1", "offload.optimizer=host", "offload.step=device", NOTHING)),
    "weights on the host": (2, 2, ("zero.stage=3", "offload.optimizer=host", "offload.parameters=host", NOTHING)),
    "weights ahead on the device": (2, 2, ("zero.stage=1", "offload.optimizer=host", *AHEAD, NOTHING)),
    # Little else than states, as they are made.
    "optimizer on the host, short sequences": (
        1,
        1,
        ("offload.optimizer=host", "train.microbatch=1", "data.sequence_length=64", BLOCKS),
    ),
    "activations on the host": (1, 1, ("offload.activations=host", BLOCKS)),
    "secondary copy": (4, 2, ("zero.stage=3", "zero.secondary=2", NOTHING)),
    "gpipe": (2, 2, ("parallel.pipeline=2", "pipeline.schedule=gpipe", NOTHING)),
    "interleaved": (2, 2, ("parallel.pipeline=2", "pipeline.schedule=interleaved", NOTHING)),
    "breadth-first": (2, 2, ("pipeline.schedule=breadth-first", NOTHING)),
    "breadth-first, stage 3": (2, 2, ("pipeline.schedule=breadth-first", "zero.stage=3", NOTHING)),
    "zero bubble v": (2, 2, ("parallel.pipeline=2", "pipeline.schedule=zero-bubble-v", NOTHING)),
    "message-driven": (2, 2, ("parallel.pipeline=2", "pipeline.schedule=message-driven", NOTHING)),
}
CASES: dict[tuple[str, str], dict[str, object]] = {
    **{
        (preset, name): {"preset": preset, "world": 1, "node": 1, "keys": list(keys)}
        for preset in PRESETS
        for name, keys in SETTINGS.items()
    },
    **{
        (preset, name): {"preset": preset, "world": world, "node": node, "keys": [ALL, *keys]}
        for preset in PRESETS
        for name, (world, node, keys) in SEVERAL.items()
    },
}
# The others are soak tests: each takes seconds.
FEW = {"stage 3, 2 nodes", "zero++", "tensor, sequence, stage 1", "zero bubble, stage 1", "weights on the host", "1f1b"}
SOON = {("gpt2-124m", name) for name in {*SETTINGS, *FEW}}
SOON |= {("llama3.2-1b", "nothing recomputed"), ("pythia-160m", "groups recomputed")}
# Ids of tokens, tables and statistics are not planned.
SMALL = 2**20
Peaks = Callable[[str, str], list[tuple[int, int]]]


@pytest.fixture(scope="module")
def peaks(request: pytest.FixtureRequest) -> Peaks:
    """The planned and the counted bytes of each selected case, of the first rank and of the fullest one."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler to build the device that computes nothing")
    here = [item for item in request.session.items if item.path == Path(__file__) and isinstance(item, pytest.Function)]
    chosen = [(str(item.callspec.params["preset"]), str(item.callspec.params["name"])) for item in here]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    script = str(Path(__file__).with_name("step_peak.py"))
    command = [sys.executable, script, json.dumps([CASES[key] for key in chosen])]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    found = dict(zip(chosen, json.loads(ran.stdout), strict=True))
    return lambda preset, name: found[preset, name]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("preset", "name"), [pytest.param(*key, marks=() if key in SOON else pytest.mark.soak) for key in CASES]
)
def test_the_plan_holds(preset: str, name: str, peaks: Peaks) -> None:
    for planned, counted in peaks(preset, name):
        assert 0.95 * planned <= counted <= planned + SMALL
