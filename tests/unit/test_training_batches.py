"""What a run reads of its data, and when: each batch once, also after a rewind; no thread is left at the end."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmtrain.checkpoint import save
from llmtrain.comm import device
from llmtrain.comm.device import DeviceCopies
from llmtrain.errors import PreemptedError, RunFailedError
from llmtrain.training import loop
from llmtrain.training.passes import Passes
from llmtrain.training.run import Run
from llmtrain_data.dataset import Samples
from llmtrain_data.errors import DataError

from tests.in_process import train_here
from tests.tiny import curve, write_corpus

RECIPE = """
model: {{family: gpt2, layers: 1, hidden: 16, heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 10, global_batch: 8, microbatch: 4, eval_every: 4}}
optimizer: {{lr: 1.0e-2, warmup: 1}}
checkpoint: {{every: 4}}
logging: {{every: 1, dir: {folder}/runs}}
"""
SEED = 1234
REWIND = ("on_spike.threshold=3.0", "on_spike.window=3", "on_spike.action=rewind")

Train = Callable[..., None]
Change = Callable[[Run, int, Passes], Passes]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Train by the tiny recipe with overrides; no thread that reads may be left."""
    write_corpus(tmp_path / "set", 100)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=tmp_path))

    def run(*overrides: str) -> None:
        train_here(tmp_path / "tiny.yaml", *overrides)

    yield run
    end = time.monotonic() + 60
    while any(thread.name == "batches" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of the batches that were read for training."""
    positions: list[int] = []
    batch = Samples.batch

    def noted(samples: Samples, seed: int, first: int, count: int) -> np.ndarray:
        if seed == SEED:
            positions.append(first)
        return batch(samples, seed, first, count)

    monkeypatch.setattr(Samples, "batch", noted)
    return positions


def change(monkeypatch: pytest.MonkeyPatch, changed: Change) -> None:
    """Change the results of passes."""
    original = loop.forward_backward
    monkeypatch.setattr(loop, "forward_backward", lambda run, step: changed(run, step, original(run, step)))


def test_a_run_reads_each_batch_once(train: Train, read: list[int]) -> None:
    train()
    assert read == list(range(0, 80, 8))


def test_a_stopped_run_resumes_with_the_batch_after_its_last(
    train: Train, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(run: Run, step: int, passes: Passes) -> Passes:
        passes.sums[1] += step == 4
        return passes

    with monkeypatch.context() as patch:
        change(patch, stops)
        with pytest.raises(PreemptedError, match="step 5"):
            train()
    # One was read ahead.
    assert read == list(range(0, 48, 8))
    read.clear()
    train()
    assert read == list(range(40, 80, 8))


@pytest.mark.parametrize("at", [6, 9])
def test_a_rewind_passes_over_what_was_read(
    at: int, train: Train, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the last step, after which nothing was to be read."""
    taken: list[int] = []

    def spoilt(run: Run, step: int, passes: Passes) -> Passes:
        taken.append(run.progress.samples)
        passes.sums[0] *= 10 if step == at and not run.progress.rewinds else 1
        return passes

    change(monkeypatch, spoilt)
    train("train.eval_every=0", *REWIND)
    assert taken == read == list(range(0, 8 * len(read), 8))
    assert len(read) == 10 + at + 1 - at // 4 * 4


@pytest.mark.parametrize("error", [DataError, RunFailedError])
def test_damage_ends_the_run_at_the_step_of_its_batch(
    error: type[Exception], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before it are done, and the checkpoint that is being written is completed."""
    batch, damage, commit = Samples.batch, threading.Event(), save.commit

    def damaged(samples: Samples, seed: int, first: int, count: int) -> np.ndarray:
        if seed == SEED and first == 48:
            damage.set()
            raise error("set.bin does not match its checksums")
        return batch(samples, seed, first, count)

    def late(*given: Any) -> None:
        damage.wait()
        time.sleep(0.2)
        commit(*given)

    monkeypatch.setattr(Samples, "batch", damaged)
    monkeypatch.setattr(save, "commit", late)
    with pytest.raises(error, match=r"^set\.bin does not match its checksums$"):
        train()
    losses = curve(tmp_path / "runs" / "tiny")
    assert max(step for kind, step in losses if kind == "step") == 6
    assert [path.name for path in (tmp_path / "runs" / "tiny" / "checkpoints").iterdir()] == ["step-00000004"]


def test_an_error_in_a_step_leaves_no_thread(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Run, step: int, passes: Passes) -> Passes:
        raise RuntimeError("broken")

    change(monkeypatch, fails)
    with pytest.raises(RuntimeError, match="broken"):
        train()


def test_a_copy_lasts_until_the_call_after_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose part the CPU plays."""
    waited: list[str] = []

    class Event:
        record = staticmethod(lambda: waited.append("copied"))
        synchronize = staticmethod(lambda: waited.append("waited"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(device, "is_cpu", lambda device: False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, pin_memory=False, **given: empty(shape, **given))
    copies, cpu = DeviceCopies((2,), torch.int64, torch.device("cpu")), torch.tensor([0, 1])
    first, second = copies.copy(cpu), copies.copy(cpu + 2)
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3])
    assert copies.copy(cpu + 4) is first
    assert (first.tolist(), second.tolist()) == ([4, 5], [2, 3])
    assert waited == ["waited", "copied"] * 3
