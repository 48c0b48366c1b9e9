"""Runs that only log: a small plan, steps without a model, and the rows that they leave."""

from pathlib import Path
from typing import Any

import torch
from llmtrain.model.config import GPTConfig, ModelConfig
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.traffic import Traffic
from llmtrain.recipe.logging import LoggingConfig
from llmtrain.recipe.schema import PrecisionConfig, Recipe, TrainConfig
from llmtrain.telemetry.about import RunInfo
from llmtrain.telemetry.logger import RunLogger
from llmtrain.telemetry.metrics import Row, read_metrics
from llmtrain.telemetry.step_record import StepRecord
from llmtrain_data.config import DataConfig

MODEL = GPTConfig(
    family="gpt2", layers=2, hidden=32, heads=2, kv_heads=2, ffn=128, positions=16, vocab=50, tie_embeddings=True,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="gelu_tanh", dropout=0.0,
)  # fmt: skip


def recipe(steps: int = 10, **logging: Any) -> Recipe:
    return Recipe(
        name="tiny [run]",
        model=ModelConfig(family="gpt2", layers=2, hidden=32, heads=2, vocab=50),
        data=DataConfig(path="corpus", sequence_length=16),
        train=TrainConfig(steps=steps, global_batch=4),
        precision=PrecisionConfig(compute="fp32"),
        logging=LoggingConfig(**{"every": 4, **logging}),
    )


def logger(folder: Path, of: Recipe, enabled: bool = True, world: int = 2) -> RunLogger:
    device = torch.device("cpu")
    about = RunInfo(device=device, model_state_bytes=77, unigram_entropy=4.0)
    return RunLogger(folder, make_plan(of, Facts(world=world, device="cpu")), about, enabled)


def record(step: int, **other: Any) -> StepRecord:
    made = {"step": step, "tokens": step * 64, "loss": 5 / step, "lr": 1e-3, "grad_norm": 0.5, "seconds": 0.5}
    return StepRecord(**{**made, **other})


def train(log: RunLogger, first: int, last: int) -> None:
    for step in range(first + 1, last + 1):
        log.comm.add([Traffic("weights", "all_gather", "node", 1000, 500, packed=False)])
        log.comm.add([Traffic("gradients", "all_to_all", "all", 2000, 1500, packed=True)])
        log.step(record(step))
        # Just before a logged step.
        if step % 4 == 3:
            log.comm.add([Traffic("weights", "all_gather", "node", 7, 7, packed=False)])
            log.evaluation(step, "validation", 6 / step)


def rows(folder: Path) -> list[Row]:
    return read_metrics(folder / "metrics.jsonl")
