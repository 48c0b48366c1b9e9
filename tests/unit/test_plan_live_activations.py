"""The planned peak of a rank's activations over a step, against the executor with real stages, to the byte."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, cast

import pytest
import torch
from llmtrain.cluster.layout import Axis
from llmtrain.comm.activity import Activity
from llmtrain.comm.decisions import OwnDecision
from llmtrain.comm.messages import Channel
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.gpt import GPT
from llmtrain.offload.activations import open_activations
from llmtrain.parallel.pipeline.action_order import ActionOrder, FixedOrder, MessageDrivenOrder, OrderWithOffload
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.parallel.pipeline.stage import Stage
from llmtrain.parallel.pipeline.stage_links import StageLinks
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.activations import live_activations, stage_activations
from llmtrain.plan.per_rank.rank_activations import rank_moves
from llmtrain.plan.pipeline.actions import Action
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import parse_recipe
from llmtrain.sharding.gradient_sums import Received, Take
from llmtrain_kernels.native import native_available

from tests.kept import Kept, Setup, autograd_gradients, built

MICROBATCHES = 5


class Answering:
    """Messages of random numbers; what is sent is gone at once."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype

    def expect(self, channel: Channel, shapes: object) -> None:
        pass

    def receive(self, channel: Channel) -> torch.Tensor:
        return torch.randn(self._shape).to(self._dtype)

    def send(self, channel: Channel, values: torch.Tensor) -> None:
        pass

    def arrived(self, channel: Channel) -> bool:
        return True

    def progress(self) -> None:
        pass

    def flush(self) -> None:
        pass


class Gradients:
    """Takes gradients as the engine of model states does, and adds them to nothing."""

    def __init__(self, model: GPT) -> None:
        self._model = model

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        yield

    def forward(self, action: Action, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        return run()

    def backward(self, action: Action, run: Callable[[], None]) -> None:
        with autograd_gradients(self._model):
            run()

    def backward_inputs(self, action: Action, run: Callable[[], None], names: object, hold: Take) -> None:
        with autograd_gradients(self._model) as received:
            run()
        for one in received:
            hold(*one)

    def unit_of(self, parameter: object) -> str:
        return "unit"

    def backward_weights(self, action: Action, gradients: Iterable[Received]) -> None:
        deque(gradients, maxlen=0)


class Measured:
    """A rank's actions; after each of them it notes what is kept."""

    def __init__(self, order: ActionOrder, kept: Kept) -> None:
        self._order, self._kept, self.most = order, kept, 0
        self.most_live = self._order.most_live

    def actions(self) -> Iterator[Action]:
        for action in self._order.actions():
            yield action
            self.most = max(self.most, self._kept.nbytes())

    def close(self) -> None:
        pass


def plan_of(family: str, schedule: str, stages: int, **more: Any) -> Plan:
    chunks = {"interleaved": 2, "breadth-first": 3, "zero-bubble-v": 2}.get(schedule, 1)
    split = [2 + (stage == 1) for stage in range(stages * chunks)]
    model: dict[str, Any] = {"family": family, "layers": sum(split), "hidden": 36, "heads": 6, "vocab": 61, "ffn": 46}
    model |= {"rotary_fraction": 0.34} if family == "neox" else {}
    degree, recompute = more.get("tensor", 1), more.get("recompute", "none")
    if recompute == BY_STAGE:
        recompute = {"every": [1 + stage % 2 for stage in range(len(split))]}
    recipe = {
        "name": "small",
        "model": {**model, "dropout": more.get("dropout", 0.0), "tie_embeddings": more.get("tied", False)},
        "data": {"path": "corpus", "sequence_length": 10},
        "train": {"global_batch": 3 * MICROBATCHES, "microbatch": 3},
        "precision": {"compute": more.get("compute", "fp32")},
        "parallel": {"pipeline": stages, "tensor": degree, "sequence": more.get("sequence", False)},
        "pipeline": {"schedule": schedule, "chunks": chunks, "split": split},
        "activation_checkpointing": recompute,
        "offload": {"activations": more.get("offload", "none")},
    }
    facts = Facts(world=stages * degree, device="cpu", native=native_available())
    return make_plan(parse_recipe(recipe), facts)


def counted_peak(plan: Plan, rank: int) -> int:
    """Run one step of a rank, and return the most bytes that it keeps between two actions."""
    schedule, layouts, degree = plan.pipeline.schedule, plan.stages_of(rank), plan.grid.degree(Axis.TENSOR)
    place, dtype = plan.grid.coordinate(rank, Axis.PIPELINE), DTYPES[plan.compute]
    defers = schedule.splits_backward or (schedule.hands_back and not layouts[0].opens)
    setup = Setup(plan.model, dtype, degree, plan.sequence_parallel, defers)
    model = built(setup, layouts)
    shape = (3, 10 // (degree if plan.sequence_parallel else 1), 36)
    transport = cast(Transport, Answering(shape, dtype))
    links = StageLinks(schedule, place, transport, lambda *_: torch.Size(shape), lambda *_: None, Activity())
    rows = [torch.randint(0, 61, (3, 11)) for _ in range(MICROBATCHES)]
    within: ActionOrder = (
        FixedOrder(schedule, place)
        if not schedule.message_driven
        else MessageDrivenOrder(layouts[0], MICROBATCHES, plan.pipeline.limit, links, OwnDecision())
    )
    activations = open_activations(plan.activation_offload, rank_moves(plan, rank), shape, dtype, torch.device("cpu"))
    blank = None
    if activations is not None:
        model.saving, within, blank = (
            activations.hooks,
            OrderWithOffload(within, activations),
            torch.empty(1, dtype=dtype),
        )
    stages = [Stage(model, layout, blank) for layout in layouts]
    with Kept() as kept:
        order = Measured(within, kept)
        Executor(stages, schedule, order, links, Gradients(model), setup.queue).train(rows, 1.0)  # type: ignore[arg-type]
    return order.most


SCHEDULES = ("gpipe", "1f1b", "interleaved", "breadth-first", "zero-bubble", "zero-bubble-v")
BY_STAGE = "by stage"
"""Stages take turns with groups of one and of two blocks."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, dropout": {"tied": True, "dropout": 0.1, "compute": "bf16"},
    "recomputed": {"recompute": {"every": 2}},
    "recomputed by stage": {"recompute": BY_STAGE},
    "sequence": {"tensor": 2, "sequence": True, "compute": "bf16"},
    "offloaded": {"recompute": "full", "offload": "host"},
    "offloaded, sequence, dropout": {
        "recompute": BY_STAGE,
        "offload": "host",
        "tensor": 2,
        "sequence": True,
        "dropout": 0.1,
    },
}


FAMILIES = ("gpt2", "neox", "llama")
# One family of each schedule and settings; the others are soak tests.
PEAKS = [
    pytest.param(*key, marks=() if (at + at // 3) % 3 == 0 else pytest.mark.soak)
    for at, key in enumerate(product(SCHEDULES, SETTINGS, FAMILIES))
]


@pytest.mark.parametrize(("schedule", "settings", "family"), PEAKS)
def test_peak(schedule: str, settings: str, family: str) -> None:
    for stages in (1, 2) if schedule == "breadth-first" else (2, 3):
        plan = plan_of(family, schedule, stages, **SETTINGS[settings])
        for place in range(stages):
            # The last tensor-parallel rank, as `last_of`.
            rank = plan.grid.group_of(0, Axis.PIPELINE)[place] + plan.grid.group_of(0, Axis.TENSOR)[-1]
            assert live_activations(plan, rank) == counted_peak(plan, rank), (family, stages, place)


def test_message_driven() -> None:
    """As many microbatches as the limit allows, but one on the last stage, which waits for no message between its two
    passes."""
    plan = plan_of("gpt2", "message-driven", 3)
    for rank, (layout,) in enumerate(plan.pipeline.stages[:-1]):
        assert live_activations(plan, rank) == 3 * stage_activations(plan, layout)
    assert live_activations(plan, 2) == counted_peak(plan, 2)


def test_ranks_of_a_group_differ() -> None:
    """61 rows of the output matrix are 30 on the first rank and 31 on the second; their gradient is fp32."""
    plan = plan_of("llama", "1f1b", 2, tensor=2)
    first, second = plan.grid.group_of(plan.grid.group_of(0, Axis.PIPELINE)[1], Axis.TENSOR)
    assert live_activations(plan, second) - live_activations(plan, first) == 4 * 36
