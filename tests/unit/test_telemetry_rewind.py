"""What W&B keeps of a run that goes back to an earlier step."""

from pathlib import Path

import pytest
from llmtrain.telemetry import wandb_sink

from tests.unit.test_telemetry_wandb import wandb_reads


def test_wandb_keeps_the_steps_after_a_rewind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    # A loaded machine takes long.
    for name in ("_START_TIMEOUT", "_FINISH_TIMEOUT", "_WAIT_AT_END"):
        monkeypatch.setattr(wandb_sink, name, 120.0)
    warned = list[str]()
    sink = wandb_sink.WandbSink(tmp_path, mode="offline", project="p", name="n", config={}, warn=warned.append)
    for step, loss in ((720, 1.0), (510, 2.0)):
        sink.log(step, {"loss": loss})
    sink.finish({}, 0)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    _, records = wandb_reads(folder)
    assert [(item["step"], item["loss"]) for record in records if (item := record.get("history", {}).get("item"))] == [
        (720, 1.0),
        (510, 2.0),
    ]
    assert warned == []
