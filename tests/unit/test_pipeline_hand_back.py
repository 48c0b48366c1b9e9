"""Gradients are bit-equal, whichever gradients of a backward pass are sent first."""

from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
import torch
from llmtrain.comm.activity import Activity
from llmtrain.comm.messages import Channel
from llmtrain.model.gpt import GPT
from llmtrain.model.presets import PRESETS
from llmtrain.parallel.pipeline.action_order import FixedOrder
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.parallel.pipeline.stage import Stage, keep
from llmtrain.parallel.pipeline.stage_links import StageLinks
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.parallel.tensor.collectives import TensorMesh
from llmtrain.parallel.tensor.parallelize import parallelize
from llmtrain.parallel.weight_gradients import WeightGradientQueue
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.pipeline.stage_layout import stage_layouts_of, units_of
from llmtrain.recipe.pipeline import ScheduleName
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.unit import unsharded_unit
from torch import Tensor

from tests.programs import programs_of

CPU = torch.device("cpu")
TOKENS, MICROBATCHES = 16, 5


class Neighbours:
    """The previous and the next stage, which send numbers from a seed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._random = dtype, torch.Generator().manual_seed(1)
        self.given: dict[Channel, list[Tensor]] = {}
        self.sent: dict[Channel, list[Tensor]] = {}

    def expect(self, channel: Channel, shapes: list[torch.Size]) -> None:
        self.given[channel] = [torch.randn(shape, generator=self._random).to(self._dtype) for shape in shapes]

    def receive(self, channel: Channel) -> Tensor:
        return self.given[channel].pop(0)

    def send(self, channel: Channel, values: Tensor) -> None:
        self.sent.setdefault(channel, []).append(values.clone())

    def progress(self) -> None:
        pass

    def flush(self) -> None:
        pass


def trained(
    family: str, name: ScheduleName, ranks: int, chunks: int, dtype: torch.dtype, hands_back: bool
) -> tuple[list[Tensor], dict[Channel, list[Tensor]]]:
    """Return the last rank's summed gradients after each of three steps, and its messages."""
    config = replace(PRESETS[f"{family}-1m"], layers=2 * ranks * chunks)
    schedule = replace(make_schedule(name, ranks, chunks, MICROBATCHES), hands_back=hands_back)
    stage_layouts, weight_gradients = (
        stage_layouts_of(config, schedule, [2] * (ranks * chunks), [0] * (ranks * chunks), ranks - 1),
        WeightGradientQueue(),
    )
    model = GPT(config, CPU)
    keep(model, stage_layouts)
    parallelize(model, TensorMesh(), weight_gradients)
    units = [
        unsharded_unit(spec, model.unit(spec.name), CPU, dtype, 1) for spec in units_of(config, stage_layouts, 0, 1)
    ]
    programs = programs_of(units, stage_layouts, schedule.actions[ranks - 1])
    engine, neighbours = Engine(model, units, ShardingSpec(), programs, lambda calls: None), Neighbours(dtype)
    transport = cast(Transport, neighbours)
    links = StageLinks(
        schedule, ranks - 1, transport, lambda sequences, tokens: torch.Size((sequences, tokens, config.hidden)),
        lambda *_: None, Activity(),
    )  # fmt: skip
    stages, order = [Stage(model, stage_layout) for stage_layout in stage_layouts], FixedOrder(schedule, ranks - 1)
    executor = Executor(stages, schedule, order, links, engine, weight_gradients)
    random, found = torch.Generator().manual_seed(3), []
    for _ in range(3):
        rows = [torch.randint(0, config.vocab, (2, TOKENS + 1), generator=random) for _ in range(MICROBATCHES)]
        executor.train(rows, 1 / MICROBATCHES)
        found += [unit.gradient.clone() for unit in units]
    engine.close()
    return found, neighbours.sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_order_changes_no_bit(family: str, name: ScheduleName, chunks: int, dtype: torch.dtype) -> None:
    (sums, sent), (plain_sums, plain_sent) = (trained(family, name, 2, chunks, dtype, first) for first in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(sums, plain_sums, strict=True))
    assert any(not torch.equal(one, other) for one, other in pairwise(sums) if one.shape == other.shape)
    assert sent.keys() == plain_sent.keys()
    for channel, messages in sent.items():
        assert all(torch.equal(one, other) for one, other in zip(messages, plain_sent[channel], strict=True))
