"""Loss spikes: the run skips the step, or it rewinds and passes over the data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmtrain.errors import PreemptedError, RunFailedError
from llmtrain.optim.config import SpikeConfig
from llmtrain.optim.spike import is_spike, remember
from llmtrain.training import loop as loop
from llmtrain.training.passes import Passes
from llmtrain.training.run import Run

from tests.in_process import train_here
from tests.tiny import rows, write_corpus

RECIPE = """
model: {{family: gpt2, layers: 1, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 20, global_batch: 8, microbatch: 8, eval_every: 10}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
checkpoint: {{every: 6}}
logging: {{every: 1, dir: {folder}/runs}}
on_spike: {{threshold: 3.0, window: 5}}
"""
REWIND = "on_spike.action=rewind"

FILES = ("offload.optimizer=nvme", "offload.paths=[{folder}]", "offload.bucket=1024")
OFFLOADS = {
    "host": ("offload.optimizer=host", "offload.bucket=1024"),
    "host, ahead": ("offload.optimizer=host", "offload.bucket=1024", "offload.spare=1"),
    "host 0.3, on the device, ahead": (
        "offload.optimizer=host",
        "offload.bucket=1024",
        "offload.share=0.3",
        "offload.step=device",
        "offload.spare=1",
    ),
    "nvme": FILES,
    "nvme, a quarter ahead": (*FILES, "offload.spare=0.25"),
    "all nvme": (*FILES, "offload.parameters=nvme"),
    "activations": ("activation_checkpointing=full", "offload.activations=nvme", "offload.paths=[{folder}]"),
}

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train by the tiny recipe with overrides, and return the run's rows."""
    write_corpus(tmp_path / "set", 200)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=tmp_path))

    def run(*overrides: str) -> list[dict[str, Any]]:
        return rows(tmp_path / "runs" / train_here(tmp_path / "tiny.yaml", *overrides).name)

    return run


def spoil(monkeypatch: pytest.MonkeyPatch, batches: range, stop_after: int | None = None) -> None:
    """Make the loss spike on some global batches of data, and ask the run to stop after a step."""
    original = loop.forward_backward

    def spoilt(run: Run, step: int) -> Passes:
        passes, factor = original(run, step), 10 if step + run.progress.passed in batches else 1
        passes.sums[0] *= factor
        passes.sums[1] += step + 1 == stop_after
        return passes

    monkeypatch.setattr(loop, "forward_backward", spoilt)


def steps(found: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in found if "event" not in row]


def last_validation(found: list[dict[str, Any]]) -> float:
    return float([row for row in found if row.get("event") == "eval"][-1]["loss"])


def test_what_a_spike_is() -> None:
    config, losses = SpikeConfig(threshold=2.0, window=3), list[float]()
    for loss in (9.0, 1.0, 2.0):
        assert not is_spike(config, losses, 1e9)
        remember(config, losses, loss)
    assert losses == [9.0, 1.0, 2.0]
    assert is_spike(config, losses, 4.1)
    assert not is_spike(config, losses, 4.0)
    remember(config, losses, 3.0)
    assert losses == [1.0, 2.0, 3.0]
    assert not is_spike(SpikeConfig(), losses, 1e9)
    # Those before a part of the run without spikes are no measure for what follows it.
    remember(SpikeConfig(), losses, 9.0)
    assert losses == []
    # A model can learn its data by heart.
    assert not is_spike(config, [0.0] * 3, 0.0)
    assert is_spike(config, [0.0] * 3, 0.1)


def test_skipped_spike_leaves_the_weights_alone(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("train.steps=14", "optimizer.schedule=constant")
    calm = train("name=calm", *keys)
    shorter = train("name=shorter", *keys, "train.steps=13")
    spoil(monkeypatch, range(13, 14))
    found = train(*keys)
    assert steps(found)[:13] == steps(calm)[:13]
    assert steps(found)[13] == (14, pytest.approx(10 * steps(calm)[13][1]))
    assert found[-1]["skipped_steps"] == 1
    # The final weights are those before the spike.
    assert last_validation(found) == last_validation(shorter) != last_validation(calm)


def test_rewound_run_passes_over_the_data(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = steps(train("name=calm", REWIND))
    spoil(monkeypatch, range(13, 15))
    found = train(REWIND)
    curve = steps(found)
    assert [step for step, _ in curve] == list(range(1, 21))
    assert curve[:12] == calm[:12]
    assert max(loss for _, loss in curve[12:]) < 2 * calm[12][1]
    # The run rewinds from 14 to 12 and passes over 2 batches; the next one spikes at once: 3 in all.
    assert [row["passed_batches"] for row in found if "event" not in row] == [0] * 12 + [3] * 8
    evaluations = [row["step"] for row in found if row.get("event") == "eval"]
    assert evaluations == [0, 10, 20]


# Each offload with one of the two actions; the others are soak tests.
ELSEWHERE = [
    pytest.param(keys, action, id=f"{name}-{action}", marks=pytest.mark.soak if (place + other) % 2 else ())
    for place, (name, keys) in enumerate(OFFLOADS.items())
    for other, action in enumerate(("skip", "rewind"))
]


@pytest.mark.parametrize(("keys", "action"), ELSEWHERE)
def test_a_spike_does_to_states_elsewhere_what_it_does_on_the_device(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], action: str
) -> None:
    shared = ("model.layers=4", "optimizer.clip=0.3", f"on_spike.action={action}")
    spoil(monkeypatch, range(13, 15))
    beside = train("name=beside", *shared)
    found = train("name=elsewhere", *shared, *(key.format(folder=tmp_path) for key in keys))
    assert steps(found) == steps(beside)
    assert [row for row in found if row.get("skipped_steps" if action == "skip" else "passed_batches")]
    assert last_validation(found) == last_validation(beside)


@pytest.mark.parametrize(
    ("spiking", "stops"),
    [
        *((range(13, 15), [stop]) for stop in (12, 14)),
        *(pytest.param(range(13, 15), [stop], marks=pytest.mark.soak) for stop in (9, 13, 17)),
        # A stop leaves a checkpoint of step 15; the run then rewinds to step 12, and is stopped again at step 13.
        (range(16, 17), [15, 13]),
    ],
)
def test_rewinding_survives_stops(
    train: Train, monkeypatch: pytest.MonkeyPatch, spiking: range, stops: list[int]
) -> None:
    spoil(monkeypatch, spiking)
    whole = steps(train("name=whole", REWIND))
    for stop_after in stops:
        monkeypatch.undo()
        spoil(monkeypatch, spiking, stop_after)
        with pytest.raises(PreemptedError):
            train(REWIND)
    monkeypatch.undo()
    spoil(monkeypatch, spiking)
    assert steps(train(REWIND)) == whole


def test_a_rewind_goes_to_what_was_due_whatever_was_due_before(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run that is prolonged, and the checkpoints of another interval."""
    train(REWIND, "train.steps=8")
    spoil(monkeypatch, range(9, 10))
    found = train(REWIND)
    assert [row["passed_batches"] for row in found if "event" not in row] == [0] * 8 + [2] * 12
    monkeypatch.undo()
    train("name=other", REWIND, "train.steps=12")
    spoil(monkeypatch, range(13, 14))
    found = train("name=other", REWIND, "checkpoint.every=0")
    assert [row["passed_batches"] for row in found if "event" not in row] == [0] * 12 + [2] * 8


def test_many_stops_leave_the_checkpoint_that_a_rewind_needs(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, folder = (REWIND, "checkpoint.keep=1"), tmp_path / "runs" / "tiny" / "checkpoints"
    spoil(monkeypatch, range(10, 11))
    whole = steps(train("name=whole", *keys))
    for stop_after in (7, 8, 9):
        monkeypatch.undo()
        spoil(monkeypatch, range(10, 11), stop_after)
        with pytest.raises(PreemptedError):
            train(*keys)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000006", f"step-{stop_after:08}"]
    monkeypatch.undo()
    spoil(monkeypatch, range(10, 11))
    found = train(*keys)
    assert steps(found) == whole
    assert found[-1]["tokens"] == 20 * 8 * 16
    assert [path.name for path in folder.iterdir()] == ["step-00000020"]


def test_a_rewind_takes_what_a_stop_left_where_the_other_one_is_damaged(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, range(10, 11), 8)
    with pytest.raises(PreemptedError):
        train(REWIND)
    file = tmp_path / "runs/tiny/checkpoints/step-00000006/rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.undo()
    spoil(monkeypatch, range(10, 11))
    found = train(REWIND)
    assert [row["passed_batches"] for row in found if "event" not in row] == [0] * 8 + [3] * 12


def test_run_that_began_with_another_goes_back_to_there(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("name=other", "train.steps=6")
    spoil(monkeypatch, range(8, 9))
    found = train(REWIND, f"checkpoint.resume={tmp_path}/runs/other", "checkpoint.every=0", "train.steps=12")
    assert [step for step, _ in steps(found)] == list(range(7, 13))
    assert [row["passed_batches"] for row in found if "event" not in row] == [3] * 6


def test_spike_before_the_first_checkpoint_goes_back_to_the_start(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, range(5, 6))
    found = train(REWIND, "train.steps=8")
    assert [step for step, _ in steps(found)] == list(range(1, 9))
    assert [row["step"] for row in found if row.get("event") == "eval"] == [0, 8]
    assert found[-1]["outcome"] == "finished"


@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_spikes_without_end_stop_the_run(train: Train, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    spoil(monkeypatch, range(13, 1000))
    with pytest.raises(RunFailedError, match=r"spiked \(on_spike\).*in a row"):
        train("train.max_skipped=3", f"on_spike.action={action}")
