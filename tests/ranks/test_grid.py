"""Any grid of tensor, pipeline and data parallelism trains the same model as a single process."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from tests.ranks.harness import Case, Trained, Trainer, resumed, soak_except, worst_difference
from tests.ranks.strategies import INT4, INT8, SECOND
from tests.ranks.test_parity import check, settled

MODELS = {
    # With the default epsilon, AdamW's first step makes the rounding of a weight's gradient that is nearly zero (llama:
    # 9e-8 beside a median of 7e-5; neox: 4e-8 beside 8e-4) as large as a step: then four tensor-parallel ranks end up
    # to 1.5e-5 apart on some CPUs.
    "llama": ("model.layers=8", "model.kv_heads=4", "optimizer.eps=1.0e-6"),
    # At the harness's rate of 1e-2, two single-process programs in fp32 end up to 2e-5 apart.
    "gpt2": ("model.layers=8", "model.family=gpt2", "model.kv_heads=4", "optimizer.lr=3.0e-3"),
    "neox": ("model.layers=8", "model.family=neox", "model.kv_heads=4", "optimizer.eps=1.0e-6"),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "message-driven")
# Tensor, pipeline and data degrees, up to 8 ranks.
GRIDS = [
    (tensor, pipeline, data)
    for tensor, pipeline, data in product((1, 2, 4), (1, 2, 4), (1, 2, 4))
    if 1 < tensor * pipeline * data <= 8
]
ZERO = {
    ("zero.stage=1",): False,
    ("zero.stage=2",): False,
    ("zero.stage=3",): False,
    ("zero.preset=mics",): False,
    ("zero.preset=zero++",): True,
    ("zero.stage=0", INT4): True,
}


def grid(
    tensor: int,
    pipeline: int,
    data: int,
    *keys: str,
    family: str = "llama",
    schedule: str = "1f1b",
    sequence: bool = False,
    node: int = 0,
) -> Case:
    """Return a case with these degrees. keys: further ones. node: ranks per node; 0: one node has all ranks."""
    keys = (f"parallel.sequence={str(sequence).lower()}", f"pipeline.schedule={schedule}", *keys)
    world = tensor * pipeline * data
    return Case(world, keys, MODELS[family], node=node, accumulation=4, tensor=tensor, pipeline=pipeline)


def every() -> Iterator[Case]:
    """Yield every grid with every schedule and family, with and without sequence parallelism."""
    for tensor, pipeline, data in GRIDS:
        schedules = SCHEDULES if pipeline > 1 else ("1f1b",)
        for schedule, family, sequence in product(schedules, MODELS, (False, True)):
            if tensor > 1 or not sequence:
                yield grid(tensor, pipeline, data, family=family, schedule=schedule, sequence=sequence)


def every_zero() -> Iterator[tuple[Case, bool]]:
    """Yield ways to shard model states inside grids, and whether they quantize."""
    for (tensor, pipeline, data), (keys, quantized) in product(GRIDS, ZERO.items()):
        for schedule in SCHEDULES if pipeline > 1 else ("1f1b",):
            if data > 1 and tensor * pipeline > 1:
                # Put two neighbours of the data axis in a node, if the axis is longer.
                node = 2 * tensor if data > 2 else 0
                yield grid(tensor, pipeline, data, *keys, schedule=schedule, sequence=tensor > 1, node=node), quantized


SPLITS = [
    grid(1, 2, 2, "pipeline.split=[5,3]"),
    grid(1, 4, 1, "pipeline.split=[2,1,1,4]"),
    grid(1, 4, 2, "pipeline.split=[2,1,1,4]", "zero.stage=3", schedule="zero-bubble"),
    grid(1, 2, 1, "pipeline.split=[2,1,1,4]", schedule="zero-bubble-v"),
    grid(2, 2, 1, "pipeline.split=[2,1,1,4]", schedule="interleaved", sequence=True),
    Case(2, ("pipeline.split=[3,1]",), ("model.layers=4",), accumulation=4, pipeline=2),
]
# Each stage recomputes its blocks in groups of its own size.
BY_STAGE = [
    grid(2, 2, 1, "pipeline.split=[5,3]", "activation_checkpointing={every: [2,3]}", sequence=True),
    grid(
        1, 2, 2, "pipeline.split=[2,1,1,4]", "activation_checkpointing={every: [2,1,1,3]}", "zero.stage=3",
        "zero.resident=0", schedule="interleaved", family="gpt2",
    ),
]  # fmt: skip
COVERING = [
    BY_STAGE[1],
    grid(1, 2, 1, schedule="gpipe", family="neox"),
    grid(1, 4, 2, schedule="interleaved", family="gpt2"),
    grid(1, 2, 2, schedule="message-driven"),
    grid(2, 2, 2, schedule="zero-bubble", family="gpt2", sequence=True),
    grid(2, 1, 2, "zero.preset=mics", family="llama", sequence=True),
    SPLITS[3],
    # A stage has more blocks of sharded weights than a plain backward pass holds gathered at once.
    replace(grid(1, 2, 2, "zero.stage=3", schedule="zero-bubble"), base=("model.layers=10", "model.kv_heads=4")),
    grid(2, 2, 2, "parallel.order=data-pipeline-tensor", "zero.stage=3", sequence=True, node=4),
]
# Further ones, which are soak tests.
FURTHER = [
    BY_STAGE[0],
    grid(2, 2, 2, "zero.stage=3", schedule="1f1b", family="neox"),
    grid(2, 2, 2, "zero.stage=3", schedule="message-driven", sequence=True),
    grid(2, 4, 1, schedule="zero-bubble-v", family="gpt2", sequence=True),
    grid(2, 1, 2, "zero.stage=2", family="gpt2", sequence=True),
    grid(1, 4, 2, "zero.stage=1", schedule="message-driven", family="neox"),
    SPLITS[1],
]


@pytest.mark.parametrize("case", soak_except(COVERING, COVERING + FURTHER), ids=str)
def test_grids(case: Case, trained: Trained) -> None:
    check(trained, case, False)


# Quantization inside grids, with and without sequence parallelism, and with tiers on the data axis: in nodes of twice
# the tensor degree, two ranks of the data axis are neighbours.
QUANTIZED = [
    grid(2, 1, 2, "zero.preset=zero++"),
    # With 61 ids and partial blocks of biases, TP-replicated parameters have another place in the blocks of each rank.
    grid(2, 1, 2, "zero.stage=1", INT8, "train.compare_every=1", family="gpt2"),
]
FURTHER_QUANTIZED = [
    grid(2, 2, 2, "zero.preset=zero++", sequence=True),
    grid(2, 1, 2, "zero.stage=0", INT4),
    grid(2, 2, 2, "zero.preset=topo", node=4),
    grid(2, 2, 2, "zero.preset=topo", node=2),
    grid(2, 1, 4, "zero.preset=zero++", node=4),
    grid(2, 1, 4, "zero.preset=topo", node=4),
    grid(2, 1, 4, "zero.preset=topo", node=4, sequence=True),
    grid(2, 1, 4, "zero.stage=3", "zero.secondary=2", INT8, SECOND, INT4, node=4),
    grid(1, 2, 4, "zero.preset=topo", node=2),
]


@pytest.mark.parametrize("case", soak_except(QUANTIZED, QUANTIZED + FURTHER_QUANTIZED), ids=str)
def test_quantized(case: Case, trained: Trained) -> None:
    check(trained, case, True)


@pytest.mark.soak
@pytest.mark.parametrize("case", [*every(), *SPLITS], ids=str)
def test_every_grid(case: Case, trained: Trained) -> None:
    check(trained, case, False)


@pytest.mark.soak
@pytest.mark.parametrize(("case", "quantized"), list(every_zero()), ids=str)
def test_every_zero_inside(case: Case, quantized: bool, trained: Trained) -> None:
    check(trained, case, quantized)


WHOLE = grid(2, 2, 2, "zero.stage=2", sequence=True, schedule="zero-bubble")
OTHERS = [grid(1, 4, 2, "zero.stage=3"), grid(4, 1, 1), Case(1, (), MODELS["llama"], accumulation=4)]
PAIRS = [(WHOLE, OTHERS[2]), (OTHERS[1], WHOLE)]
LATER = [(WHOLE, OTHERS[0]), (WHOLE, OTHERS[1]), (OTHERS[0], WHOLE), (OTHERS[2], WHOLE)]


@pytest.mark.parametrize(("source", "target"), soak_except(PAIRS, PAIRS + LATER), ids=str)
def test_goes_on_at_another_grid(source: Case, target: Case, trainer: Trainer) -> None:
    trainer.train([source, target.reference])
    case = resumed(target, trainer.result(source), 10)
    trainer.train([case])
    ours, whole = trainer.result(case), trainer.result(target.reference)
    rest = {key: loss for key, loss in whole.curve.items() if key[1] > 10}
    assert len(rest) == 11
    assert worst_difference(ours.curve, rest)[0] < 1e-5
    assert worst_difference(settled(ours), settled(whole))[0] < 1e-5
