"""A checkpoint of any strategy resumes at any other, and at its own bit-exactly."""

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch

from tests.ranks.harness import STEPS, Case, Trainer, resumed, soak_except, worst_difference

HALF = STEPS // 2
PARTITION = "zero.partition={{weights: {}, gradients: {}, optimizer: {}}}"
STRATEGIES = [
    Case(4, ("zero.stage=0",), node=2),
    Case(2, ("zero.stage=1",), node=1),
    Case(4, ("zero.stage=2",), node=2),
    Case(4, ("zero.stage=3", "zero.hierarchical=false"), node=2),
    Case(8, (PARTITION.format(2, 4, 8),), node=4),
    Case(6, ("zero.preset=mics",), node=3),
    Case(4, ("zero.stage=3", "zero.secondary=2"), node=2),
    Case(1),
]
# The rounding of these, and what dropout draws, differs from degree to degree, but not from run to run.
QUANTIZED = [
    Case(4, ("model.dropout=0.1", "parallel.sequence=true"), accumulation=4, tensor=2),
    Case(4, ("zero.preset=zero++",), node=2),
    Case(4, ("zero.preset=topo",), node=2),
    # The first run evaluates before this save, and the resumed run does not.
    Case(4, ("zero.preset=topo", f"train.eval_every={HALF}"), node=2),
    Case(4, (PARTITION.format(2, 2, 4), "zero.secondary=4", "quantize.secondary=int8"), node=2, accumulation=4),
]
# Each case is the origin once, and resumes another one's checkpoint once.
CHAIN = [*pairwise(STRATEGIES), (STRATEGIES[-1], STRATEGIES[0])]
PAIRS = [pair for pair in permutations(STRATEGIES, 2) if pair not in CHAIN]


def goes_on(source: Case, target: Case, trainer: Trainer, rtol: float) -> None:
    trainer.train([source, target.reference])
    case = resumed(target, trainer.result(source), HALF)
    trainer.train([case])
    ours, whole = trainer.result(case), trainer.result(target if source == target else target.reference)
    rest = {key: loss for key, loss in whole.curve.items() if key[1] > HALF}
    assert len(rest) == STEPS - HALF + 1
    if rtol:
        assert worst_difference(ours.curve, rest)[0] < rtol
        assert worst_difference(ours.states(), whole.states())[0] < rtol
    else:
        assert ours.curve == rest
        for state in ("master", "m", "v"):
            torch.testing.assert_close(ours.states(state=state), whole.states(state=state), rtol=0, atol=0)


@pytest.mark.parametrize(("source", "target"), soak_except(CHAIN[::2], CHAIN), ids=str)
def test_goes_on_at_another(source: Case, target: Case, trainer: Trainer) -> None:
    goes_on(source, target, trainer, 1e-5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_goes_on_at_every_other(source: Case, target: Case, trainer: Trainer) -> None:
    goes_on(source, target, trainer, 1e-5)


@pytest.mark.parametrize("case", soak_except(STRATEGIES[1::2] + QUANTIZED, STRATEGIES + QUANTIZED), ids=str)
def test_goes_on_bit_exactly(case: Case, trainer: Trainer) -> None:
    goes_on(case, case, trainer, 0.0)


@pytest.mark.parametrize("target", [Case(4, tensor=2, pipeline=2), Case(2, ("offload.optimizer=host",))], ids=str)
def test_weights_alone_start_another_layout(target: Case, trainer: Trainer) -> None:
    source = STRATEGIES[3]
    trainer.train([source])
    # The reference starts with the same weights.
    case = replace(target, base=(f"checkpoint.weights={trainer.result(source).folder}",))
    trainer.train([case])
    ours, alone = trainer.result(case).curve, trainer.result(case.reference).curve
    assert ours["eval", 0] == pytest.approx(trainer.result(source).curve["eval", STEPS], rel=1e-5)
    assert worst_difference(ours, alone)[0] < 1e-5
