"""All microbatches pass a stage before the next one: the same model as in one process, with fewer bytes."""

from dataclasses import replace

import pytest

from tests.ranks.harness import Case, Trained, assert_same_states
from tests.ranks.strategies import BF16, INT4, NARROW
from tests.ranks.test_grid import grid
from tests.ranks.test_offload import ALL_IN_FILES, HOST
from tests.ranks.test_parity import check, settled, worst_difference

BREADTH = "breadth-first"
STAGE3, RECOMPUTED, TIED = "zero.stage=3", "activation_checkpointing=full", ("model.tie_embeddings=true",)


def tied(case: Case) -> Case:
    return replace(case, base=(*case.base, *TIED))


# Of 8 layers, each is a stage where `pipeline.chunks` is not given.
SOON = [
    grid(1, 1, 2, STAGE3, RECOMPUTED, schedule=BREADTH),
    tied(grid(1, 1, 2, STAGE3, "pipeline.chunks=3", schedule=BREADTH, node=1)),
    grid(2, 1, 2, "zero.preset=mics", "pipeline.chunks=4", schedule=BREADTH, sequence=True, family="gpt2"),
    grid(1, 2, 2, STAGE3, schedule=BREADTH, family="neox"),
]
LATER = [
    grid(1, 1, 1, schedule=BREADTH),
    tied(grid(1, 2, 2, STAGE3, "zero.secondary=2", schedule=BREADTH)),
    grid(1, 1, 4, "zero.partition={weights: 2, gradients: 2, optimizer: 4}", schedule=BREADTH, node=2),
    grid(1, 1, 4, STAGE3, "zero.hierarchical=false", schedule=BREADTH, node=2),
    grid(2, 2, 2, "zero.stage=2", "pipeline.chunks=2", schedule=BREADTH, sequence=True, family="gpt2"),
    tied(grid(2, 2, 2, STAGE3, RECOMPUTED, schedule=BREADTH, sequence=True)),
    grid(1, 4, 2, "zero.stage=1", schedule=BREADTH),
]
QUANTIZED = [
    grid(1, 1, 4, "zero.preset=zero++", schedule=BREADTH, node=2),
    grid(2, 1, 4, "zero.preset=topo", schedule=BREADTH, node=4, sequence=True),
    grid(2, 1, 2, "zero.stage=2", INT4, schedule=BREADTH),
]


@pytest.mark.parametrize("case", [*SOON, *(pytest.param(case, marks=pytest.mark.soak) for case in LATER)], ids=str)
def test_parity(case: Case, trained: Trained) -> None:
    check(trained, case, False)


@pytest.mark.soak
@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_quantized(case: Case, trained: Trained) -> None:
    check(trained, case, True)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("zero.stage=1", BF16), marks=pytest.mark.soak),
        pytest.param(("zero.stage=1", "precision.compute=fp16", "precision.loss_scale=1.0e+9"), marks=pytest.mark.soak),
        pytest.param(("zero.stage=0", RECOMPUTED), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_order_alone_changes_no_bit(keys: tuple[str, ...], trained: Trained) -> None:
    """Where sums of gradients are not sharded, microbatches are added in the same order."""
    ours, theirs = (trained(grid(1, 1, 2, *keys, schedule=name)) for name in (BREADTH, "1f1b"))
    assert ours.curve == theirs.curve
    assert_same_states(ours, theirs)


REST = {
    "all in files": (*ALL_IN_FILES, RECOMPUTED, "offload.activations=nvme"),
    "gradients on the host": ("offload.gradients=host", "offload.bucket=1024"),
    "stepped ahead": (*HOST, "offload.spare=1"),
}


@pytest.mark.parametrize(
    ("rest", "stage"),
    [
        pytest.param(rest, stage, marks=() if (rest, stage) == ("all in files", 3) else pytest.mark.soak)
        for rest in REST
        for stage in (1, 2, 3)
    ],
)
def test_offload_changes_no_bit(rest: str, stage: int, trained: Trained) -> None:
    base = (f"zero.stage={stage}", BF16, "optimizer.clip=0.4")
    kept = (*base, RECOMPUTED) if RECOMPUTED in REST[rest] else base
    ours = trained(grid(1, 1, 2, *base, *REST[rest], schedule=BREADTH))
    theirs = trained(grid(1, 1, 2, *kept, schedule=BREADTH))
    assert ours.curve == theirs.curve
    assert_same_states(ours, theirs)


@pytest.mark.soak
def test_bf16_sums_lose_nothing(trained: Trained) -> None:
    """Gradients of a run of microbatches are summed in fp32 before they are sent: at least as close to sums that are
    never rounded as gradients that are sent one by one."""
    exact = trained(grid(1, 1, 2, "zero.stage=0", BF16, schedule="1f1b"))
    one_by_one, runs, narrow = (
        worst_difference(settled(trained(grid(1, 1, 2, STAGE3, BF16, *keys))), settled(exact))[0]
        for keys in (
            ("pipeline.schedule=1f1b",),
            (f"pipeline.schedule={BREADTH}",),
            (f"pipeline.schedule={BREADTH}", NARROW),
        )
    )
    assert runs <= 1.5 * one_by_one
    assert runs < narrow


@pytest.mark.soak
def test_weights_come_twice_and_gradients_leave_once(trained: Trained) -> None:
    """Whatever the number of microbatches: ZeRO-3 sends what it does without accumulation."""
    sent = {}
    for name, microbatches in ((BREADTH, 4), ("1f1b", 4), ("1f1b", 1)):
        keys = (STAGE3, RECOMPUTED, "train.steps=6", "train.eval_every=6")
        case = replace(grid(1, 1, 2, *keys, schedule=name), accumulation=microbatches)
        sent[name, microbatches] = trained(case).rows[5]["comm_bytes"]
    once = sent["1f1b", 1]
    assert sent[BREADTH, 4]["gradients"] == once["gradients"]
    assert sent["1f1b", 4]["gradients"] == {op: 4 * size for op, size in once["gradients"].items()}
    # The last block stays between its forward and its backward pass, and the first one for the next step.
    assert sent[BREADTH, 4]["weights"]["all_gather"] <= 1.05 * once["weights"]["all_gather"]
