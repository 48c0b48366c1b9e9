"""`llmtrain run` on clusters whose fast cards do not reach each other: only messages between stages leave a cluster."""

from pathlib import Path

import pytest

from tools.bench.clusters import PLACEMENTS, Bench, Setting

pytestmark = pytest.mark.netlab

STEPS = 6
# Bytes of the whole run for rendezvous, sums of losses, agreement on a checkpoint, and headers: less
# than a tenth of the gradients and weights that replicas exchange in one of its steps.
CONTROL = 1_000_000


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(clusters=2, nodes=2, ranks=2), id="tensor 2 x pipeline 2 x data 2"),
        pytest.param(Setting(clusters=3, nodes=2, ranks=1), id="pipeline 3 x data 2", marks=pytest.mark.soak),
    ],
)
def test_only_activations_and_their_gradients_leave_a_cluster(setting: Setting, tmp_path: Path) -> None:
    bench = Bench(setting, tmp_path)
    with bench.lab:
        trained = bench.train(PLACEMENTS["stages in clusters"], STEPS)
    assert 0 < trained.crossed - STEPS * setting.stage_bytes < CONTROL
    assert trained.losses[-1] < trained.losses[0]
