"""An optimizer step that is launched before its norm is known."""

from functools import partial
from math import nan
from pathlib import Path

import pytest
from llmtrain.sharding.engine import Engine
from llmtrain.training import loop
from llmtrain.training.passes import Passes
from llmtrain.training.run import Run
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from tests.in_process import train_here
from tests.tiny import rows, write_corpus

RECIPE = """
model: {{family: gpt2, layers: 2, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 12, global_batch: 8, microbatch: 2, eval_every: 6}}
optimizer: {{lr: 1.0e-2, warmup: 5, clip: 0.3, backend: torch}}
logging: {{every: 1, dir: {folder}/runs}}
"""


def train(folder: Path, *overrides: str) -> list[float]:
    """Train the tiny recipe; return the losses of its steps and evaluations."""
    write_corpus(folder / "set", 200)
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    plan = train_here(folder / "tiny.yaml", *overrides)
    return [row["loss"] for row in rows(folder / "runs" / plan.name) if "loss" in row]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_device_clips_and_skips_as_the_host_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """The CPU plays the device. The host launches each step before it reads the norm."""
    key, passed = f"precision.compute={precision}", loop.forward_backward

    def spoilt(run: Run, step: int) -> Passes:
        passes = passed(run, step)
        passes.sums[2] *= nan if step in {0, 5} else 1
        return passes

    monkeypatch.setattr(loop, "forward_backward", spoilt)
    on_host, order, launch = train(tmp_path, "name=host", key), list[str](), Engine.step

    def launched(engine: Engine, numbers: AdamWStep) -> None:
        order.append("launches")
        launch(engine, numbers)

    def wait(values: Tensor) -> Tensor:
        order.append("waits")
        return values

    monkeypatch.setattr(Engine, "step", launched)
    monkeypatch.setattr(loop, "start_to_host", lambda values: partial(wait, values))
    monkeypatch.setattr(loop, "decided_on_device", lambda plan: True)
    assert train(tmp_path, "name=device", key) == on_host
    assert order == ["launches", "waits"] * 12
    found = rows(tmp_path / "runs" / "device")
    assert found[-1]["skipped_steps"] == 2
    assert max(row.get("grad_norm") or 0 for row in found) > 0.3
