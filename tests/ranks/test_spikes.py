"""A run of several ranks rewinds after a spike as one of a single process does."""

from dataclasses import replace

import pytest

from tests.ranks.harness import STEPS, Case, Trained, worst_difference
from tests.ranks.test_parity import settled

# The loss spikes on batch 14, and checkpoints are of steps 0, 10 and 20.
REWINDS = ("on_spike={threshold: 3.0, window: 5, action: rewind}",)
CASES = [
    Case(2, ("zero.stage=3",), REWINDS, accumulation=4, spiking=True),
    pytest.param(
        Case(4, ("zero.stage=1",), REWINDS, accumulation=4, tensor=2, pipeline=2, spiking=True), marks=pytest.mark.soak
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_rewind(case: Case, trained: Trained) -> None:
    ours, theirs, calm = trained(case), trained(replace(case.reference, spiking=True)), trained(case.reference)
    assert [row["step"] for row in ours.rows] == [row["step"] for row in theirs.rows] == [*range(1, STEPS + 1)]
    for found, expected in ((ours.curve, theirs.curve), (ours.norms, theirs.norms), (settled(ours), settled(theirs))):
        assert worst_difference(found, expected)[0] < 1e-5
    # Both have passed over the data after step 10.
    assert worst_difference(ours.curve, calm.curve)[0] > 1e-3
    assert ours.rows[9]["loss"] == pytest.approx(calm.rows[9]["loss"], rel=1e-5)
