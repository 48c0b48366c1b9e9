"""Any sharding of model states trains the same model as a single process."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from harness import STEPS, Case, Result, worst_difference
from strategies import COVERING, cases

Trained = Callable[[Case], Result]


def check(trained: Trained, case: Case, quantized: bool, rtol: float = 1e-5) -> None:
    ours, theirs = trained(case), trained(case.reference)
    assert len(theirs.rows) == STEPS
    assert theirs.rows[-1]["loss"] < theirs.rows[0]["loss"] - 0.5
    difference, where = worst_difference(ours.curve, theirs.curve)
    assert difference < (0.01 if quantized else rtol), f"loss at {where} differs by {difference:.2e}"
    if not quantized:
        difference, where = worst_difference(settled(ours), settled(theirs))
        assert difference < rtol, f"{where} differs by {difference:.2e}"


def settled(result: Result) -> dict[str, torch.Tensor]:
    """Return every weight but the keys' biases: such a bias moves all scores of a query equally, so its gradient is
    only rounding, which AdamW makes as large as any other."""
    return {name: values for name, values in result.states().items() if not name.endswith("attention.k.bias")}


@pytest.mark.parametrize(("case", "quantized"), COVERING, ids=str)
def test_strategies(case: Case, quantized: bool, trained: Trained) -> None:
    check(trained, case, quantized)


TIED = ("model.tie_embeddings=true",)
TIED_CASES = {
    "one stage": Case(2, ("zero.stage=3",), TIED, accumulation=4),
    "recomputed, no lookahead": Case(2, ("zero.stage=3", "zero.resident=0", "activation_checkpointing=full"), TIED),
    "two stages": Case(4, ("zero.stage=3",), TIED, accumulation=4, pipeline=2),
    "zero-bubble": Case(4, ("zero.stage=3", "pipeline.schedule=zero-bubble"), TIED, accumulation=4, pipeline=2),
    "weights on the host": Case(2, ("zero.stage=1", "offload.parameters=host"), TIED, accumulation=4),
    "tensor and two stages": Case(8, ("zero.stage=3",), TIED, accumulation=4, tensor=2, pipeline=2),
}


@pytest.mark.parametrize("name", TIED_CASES)
def test_tied_embeddings(name: str, trained: Trained) -> None:
    """The output projection computes with the embedding's gathered weights, in its forward pass alone."""
    check(trained, TIED_CASES[name], False)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_compiled_blocks(trained: Trained) -> None:
    """The weights of torch.compile's code are gathered in time, forward and backward."""
    check(trained, Case(2, ("zero.stage=3", "train.compile=true"), accumulation=4), False)


EVERY = [
    each
    for (world, nodes), accumulation in product({2: (1, 2), 4: (2, 4), 6: (2, 3), 8: (2, 4)}.items(), (1, 4))
    for node in nodes
    for each in cases(world, node, accumulation)
]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("case", "quantized"), EVERY, ids=str)
def test_every_strategy(case: Case, quantized: bool, trained: Trained) -> None:
    check(trained, case, quantized)
