"""Evaluations, which a request to stop cuts short, and what a run shows of what it does."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llmtrain.comm import activity
from llmtrain.comm.activity import Activity
from llmtrain.errors import PreemptedError
from llmtrain.launch.stop import StopRequest
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.training import evaluate, loop

from tests.in_process import train_here
from tests.tiny import rows, write_run

RECIPE = """
model: {{family: gpt2, layers: 1, hidden: 16, heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 20, global_batch: 8, microbatch: 2, eval_every: 10}}
optimizer: {{lr: 1.0e-2, warmup: 0}}
checkpoint: {{every: 6}}
logging: {{every: 1, dir: {folder}/runs}}
"""

Train = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, RECIPE)


@pytest.fixture
def train(folder: Path) -> Train:
    """Train by the tiny recipe with overrides."""

    def run(*overrides: str) -> None:
        train_here(folder / "tiny.yaml", *overrides)

    return run


def test_an_evaluation_in_parts(train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate four microbatches, three at a time; a request to stop is heeded after one, two and one of them."""
    keys = ("train.steps=5", "train.eval_every=5", "train.eval_batches=1")
    train(*keys)
    monkeypatch.setattr(evaluate, "TOGETHER", 3)
    monkeypatch.setattr(evaluate, "BETWEEN", 1e9)
    shares: list[str] = []
    moving = Activity.moving

    def noted(activity: Activity, share: float | None = None) -> None:
        moving(activity, share)
        shares.append(activity.doing())

    monkeypatch.setattr(Activity, "moving", noted)
    train("name=parts", *keys)
    parts_done = [share.partition(": ")[2] for share in shares if share.startswith("evaluating ")]
    assert list(dict.fromkeys(parts_done)) == ["0%", "25%", "75%", "100%"]
    whole, parts = (
        [row["loss"] for row in rows(folder / "runs" / name) if row.get("event") == "eval"]
        for name in ("tiny", "parts")
    )
    assert len(whole) == 2
    assert parts == pytest.approx(whole, rel=1e-12)


def ask_in_evaluation(monkeypatch: pytest.MonkeyPatch, number: int, interrupted: bool) -> None:
    """Ask to stop while the first microbatch of an evaluation is computed. number: which evaluation, from 1."""
    original, begun = Executor.evaluate, list[Executor]()
    asked = list[StopRequest]()

    class Noted(StopRequest):
        def __init__(self) -> None:
            super().__init__()
            asked.append(self)

    def evaluated(executor: Executor, batches: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        begun.append(executor)
        # Four microbatches: parts of one, and then of two, and of what is left.
        if len(begun) == 3 * (number - 1) + 1:
            asked[-1].asked, asked[-1].interrupted = True, interrupted
        assert len(begun) <= 3 * (number - 1) + 1
        yield from original(executor, batches)

    monkeypatch.setattr(loop, "StopRequest", Noted)
    monkeypatch.setattr(evaluate, "BETWEEN", 1e9)
    monkeypatch.setattr(Executor, "evaluate", evaluated)


@pytest.mark.parametrize("last", [False, True])
def test_an_evaluation_that_is_cut_short_is_made_at_the_next_start(
    train: Train, folder: Path, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """last: after the last step."""
    keys = ("train.eval_batches=1", "train.eval_every=5", f"train.steps={5 if last else 7}")
    train("name=calm", *keys)
    with monkeypatch.context() as patch:
        ask_in_evaluation(patch, 2, interrupted=True)
        with pytest.raises(PreemptedError, match="stopped after step 5 and saved; the same command resumes from there"):
            train(*keys)
    stopped = rows(folder / "runs" / "tiny")
    assert [row["step"] for row in stopped if row.get("event") == "eval"] == [0]
    assert stopped[-1]["outcome"] == "stopped"
    train(*keys)
    train(*keys)
    calm, ended = (rows(folder / "runs" / name) for name in ("calm", "tiny"))
    for key in ("loss", "step"):
        assert [row[key] for row in ended if key in row and row.get("event") != "end"] == [
            row[key] for row in calm if key in row and row.get("event") != "end"
        ]


@pytest.mark.parametrize(("interrupted", "error"), [(True, KeyboardInterrupt), (False, PreemptedError)])
def test_a_stop_in_the_first_evaluation_has_nothing_to_save(
    train: Train, folder: Path, interrupted: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_in_evaluation(monkeypatch, 1, interrupted)
    with pytest.raises(error, match=None if interrupted else "told to stop before anything was done"):
        train("train.eval_batches=1")
    (end,) = rows(folder / "runs" / "tiny")
    assert (end["outcome"], end["step"]) == ("stopped", 0)
    assert not list((folder / "runs" / "tiny").glob("checkpoints/step-*"))


def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the user is shown whenever something begins or moves on."""
    found: list[str] = []

    def noting(name: str) -> None:
        original = getattr(Activity, name)

        def noted(activity: Activity, *given: Any) -> None:
            original(activity, *given)
            found.append(activity.doing())

        monkeypatch.setattr(Activity, name, noted)

    for name in ("begin", "begin_step", "moving", "show"):
        noting(name)
    return found


def test_what_is_done_of_a_step_is_shown(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first step nothing is done at its begin, though all of an evaluation was; later steps say when they are
    slow."""
    found = shown(monkeypatch)
    train("name=fast", "train.steps=2")
    first = [text for text in found if text.startswith("first step, of 4 microbatches")]
    assert list(dict.fromkeys(first)) == [
        "first step, of 4 microbatches",
        *(f"first step, of 4 microbatches: {share}%" for share in (25, 50, 75, 100)),
    ]
    assert not [text for text in found if text.startswith("this step")]
    found.clear()
    monkeypatch.setattr(activity, "LONG", 0.0)
    train("name=slow", "train.steps=2")
    later = [text for text in found if text.startswith("this step")]
    assert list(dict.fromkeys(later)) == [f"this step: {share}%" for share in (25, 50, 75, 100)]


def test_only_what_is_there_is_loaded_or_waited_for(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shown(monkeypatch)
    train("train.steps=6")
    assert not [text for text in found if text.startswith("loading the checkpoint")]
    found.clear()
    train("train.steps=6")
    assert "loading the checkpoint step-00000006" in found
    assert not [text for text in found if "to be on disk" in text or "first step" in text]
