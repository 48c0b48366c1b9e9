"""`llmtrain run` on clusters whose fast cards do not reach each other: only what stages tell each other leaves them."""

from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.recipe.load import load_recipe

from tools.bench.clusters import PLACEMENTS, Bench, Setting

pytestmark = pytest.mark.netlab

STEPS = 6
# What ranks need to find each other and to sum a loss, and headers: in all steps together less than a tenth of the
# gradients that the replicas of one stage sum in one of them.
CONTROL = 500_000


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


def test_a_slower_node_gets_fewer_layers_in_its_stage(tmp_path: Path) -> None:
    """No description says how fast the nodes are: they are timed before the layers are split."""
    bench = Bench(Setting(clusters=2, nodes=1, layers=4, hidden=64), tmp_path)
    bench.lab.spec = replace(bench.lab.spec, speeds={1: 0.25})
    with bench.lab:
        bench.train([*PLACEMENTS["stages in clusters"], "pipeline.split=auto"], steps=1)
    (resolved,) = tmp_path.glob("runs/*/recipe.resolved.yaml")
    first, second = load_recipe(str(resolved), []).pipeline.split
    assert first + second == 8
    assert int(first) > int(second)
