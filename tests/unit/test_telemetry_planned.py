"""What was planned, beside what a run measured, in its metrics and on the console."""

from pathlib import Path

import pytest
import torch
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.traffic import Traffic
from llmtrain.recipe.load import parse_recipe
from llmtrain.telemetry.about import RunInfo
from llmtrain.telemetry.logger import RunLogger
from llmtrain.telemetry.metrics import read_metrics
from llmtrain.telemetry.run_file import checked_run_file
from llmtrain.telemetry.step_record import StepRecord
from llmtrain_data import units

RECIPE = {
    "name": "tiny",
    "model": {"family": "gpt2", "layers": 2, "hidden": 32, "heads": 2, "vocab": 50},
    "data": {"path": "corpus", "sequence_length": 16},
    "train": {"steps": 2, "global_batch": 4},
    "precision": {"compute": "fp32"},
}


def test_the_end_has_what_was_planned_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(parse_recipe(RECIPE), Facts(world=2, device="cpu"))
    about = RunInfo(device=torch.device("cpu"), model_state_bytes=77)
    with RunLogger(tmp_path, plan, about, True) as log:
        log.start(0, [])
        started = capsys.readouterr().out
        for step in (1, 2):
            log.comm.add([Traffic("weights", "all_gather", "node", 1000, 500, packed=False)])
            log.step(StepRecord(step=step, tokens=64 * step, loss=5.0, lr=1e-3, grad_norm=0.5, seconds=0.5))
        log.end({})
    run, (*_, last, end) = checked_run_file(tmp_path), read_metrics(tmp_path / "metrics.jsonl")
    planned = run["planned"]
    assert end["planned"] == planned
    # fp32, two ranks: the reduction of all gradients in halves, and the gather of the sums.
    padded = planned["comm_bytes"]["replicas"]["all_to_all"]
    assert planned["comm_bytes"] == {"replicas": {"all_to_all": padded, "all_gather": padded}}
    assert padded >= 4 * run["parameters"]
    assert end["measured"]["comm_bytes"] == {"weights": {"all_gather": 1000}}
    assert end["measured"]["memory_bytes"] >= last["memory_bytes"]["peak_rss"]
    memory = units.size(planned["memory_bytes"])
    assert f"planned         {memory} of memory, {units.size(2 * padded)} handed" in started
    ended = capsys.readouterr().out
    assert f"replicas all_to_all   {units.size(padded)} planned, - measured" in ended
    assert f"weights all_gather    - planned, {units.size(1000)} measured" in ended
