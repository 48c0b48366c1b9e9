"""The bytes that ranks send in a step, by link tier and purpose: against closed forms, and as `llmtrain plan` shows
them."""

import json
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cli.main import main
from llmtrain.plan.cost.step_traffic import PURPOSES, step_traffic
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.make import make_plan

from tools.bench.wire import RECIPE, Setting, strategies

LAYERS, HIDDEN, TOKENS = 8, 64, 32
SMALL = f"""
model: {{family: llama, layers: {LAYERS}, hidden: {HIDDEN}, heads: 8, vocab: 102}}
data: {{path: set, sequence_length: {TOKENS}}}
train: {{global_batch: 16, microbatch: 1}}
precision: {{compute: bf16}}
cluster: {{node: {{ranks: 4}}}}
"""


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)


def sent(ranks: int, *keys: str, name: str = "small.yaml") -> list[dict[str, dict[str, int]]]:
    """Return the bytes by tier and purpose of each role."""
    recipe, facts = described_run(name, keys, ranks)
    plan = make_plan(recipe, facts)
    return [{tier: dict(each) for tier, each in row.sent.items()} for row in step_traffic(plan, programs_of(plan))]


@pytest.mark.parametrize(("nodes", "per_node", "microbatches"), [(2, 2, 4), (2, 4, 2), (4, 2, 1)])
def test_closed_forms_of_the_wire_benchmark(nodes: int, per_node: int, microbatches: int) -> None:
    """What all ranks of a node send between nodes is what the benchmark's own forms say, but for the embedding and the
    head (0.7% of the weights), norms, scales of packed blocks, padding and scalars."""
    Path("wire.yaml").write_text(RECIPE.format(blocks=12, folder=".", steps=1))
    setting = Setting(nodes, per_node, microbatches)
    weights = 2 * sum(12 * size for size in (192 * 192 * 4, 3 * 192 * 768))
    for strategy in strategies(nodes, per_node).values():
        keys = (*strategy.keys, f"train.global_batch={microbatches * nodes * per_node}")
        (role,) = sent(nodes * per_node, *keys, f"cluster={{node: {{ranks: {per_node}}}}}", name="wire.yaml")
        found = per_node * sum(role["all"].values())
        if "zero.hierarchical=false" in strategy.keys:
            # In a ring of all ranks, one rank of each node sends to another node.
            found -= (per_node - 1) * role["all"]["weights"]
        assert found == pytest.approx(strategy.ours(setting) * weights, rel=0.04), strategy.keys


def test_one_rank_sends_nothing() -> None:
    assert sent(1) == [{}]


def test_tiers_and_purposes_of_a_grid() -> None:
    """Tensor-parallel sums inside nodes, replicas inside nodes, stages on different nodes."""
    first, last = sent(8, "parallel.tensor=2", "parallel.pipeline=2", "zero.stage=1")
    # A ring of two ranks sends what it sums, in the forward and the backward pass.
    border = TOKENS * HIDDEN * 2
    microbatches, blocks = 16 // 2, LAYERS // 2
    messages = microbatches * border
    assert first["all"] == {"pipeline": messages, "scalars": 2 * 24 * 7 // 8}
    assert last["all"] == first["all"]
    assert set(first["node"]) == {"gradients", "update", "tensor"}
    assert first["node"]["tensor"] == microbatches * border * (4 * blocks + 1)
    # The last stage's loss sums its input's gradient, and gathers three numbers of each token in fp32.
    assert last["node"]["tensor"] == microbatches * (border * (4 * blocks + 1) + 3 * 4 * TOKENS)


UNEVEN = (
    "cluster={node: {ranks: 4}, clusters: [{name: fast, nodes: 2, nic: {kind: infiniband}}, "
    "{name: slow, nodes: 1, nic: {kind: roce}}], between: {kind: ethernet}}"
)


def test_clusters_of_unequal_size() -> None:
    """Stages of one node each: two of one cluster, and one of another."""
    keys = ("parallel.pipeline=3", "zero.stage=1", "train.global_batch=12", "pipeline.split=[3, 3, 2]")
    first, second, last = sent(12, UNEVEN, *keys)
    messages, scalars = 12 // 4 * TOKENS * HIDDEN * 2, 2 * 24 * 11 // 12
    assert (first["cluster"], first["all"]) == ({"pipeline": messages}, {"scalars": scalars})
    assert second["cluster"] == {"pipeline": messages}
    assert second["all"] == {"pipeline": messages, "scalars": scalars}
    assert last["all"] == {"pipeline": messages, "scalars": scalars}
    assert set(last) == {"node", "all"}
    # Each of a stage's four ranks sends three quarters of its gradients, and of its weights.
    for role in (first, second, last):
        assert set(role["node"]) == {"gradients", "update"}
    block = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 256 + 2 * HIDDEN)
    assert second["node"]["update"] == 3 * block * 3 // 4


@pytest.mark.parametrize(
    ("keys", "purposes"),
    [
        (("zero.stage=0",), {"replicas", "scalars"}),
        (("zero.stage=1",), {"gradients", "update", "scalars"}),
        (("zero.stage=3",), {"weights", "gradients", "scalars"}),
        (("zero.stage=3", "zero.secondary=node"), {"weights", "secondary", "gradients", "scalars"}),
        (("parallel.tensor=2", "parallel.sequence=true"), {"tensor", "replicated", "replicas", "scalars"}),
        (("parallel.pipeline=8",), {"pipeline", "scalars"}),
    ],
)
def test_purposes(keys: tuple[str, ...], purposes: set[str]) -> None:
    found = [name for role in sent(8, *keys) for tier in role.values() for name in tier]
    assert set(found) == purposes
    assert purposes <= set(PURPOSES)


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ((), 10 / 8),
        (("activation_checkpointing=full",), 13 / 10),
        (("activation_checkpointing.every=4",), 13.75 / 11.5),
        (("parallel.pipeline=2", "pipeline.schedule=zero-bubble"), 12 / 8),
    ],
)
def test_what_sequence_parallelism_sends_more(keys: tuple[str, ...], more: float) -> None:
    """In units of an activation that ranks gather or reduce, for each block; a sum over the ranks is two."""

    def of_blocks(sequence: str) -> int:
        """Return a rank's bytes of eight blocks: without the embedding and the loss."""
        grid = ("parallel.tensor=2", f"parallel.sequence={sequence}")
        few, many = (sent(4, *keys, *grid, f"model.layers={layers}")[0]["all"]["tensor"] for layers in (8, 16))
        return many - few

    assert of_blocks("true") == more * of_blocks("false")


def test_shown(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("parallel.pipeline=2", "zero.stage=3", "--ranks", "8")
    assert main(["plan", "small.yaml", *keys, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["sent"]
    assert [(row["rank"], row["ranks"], row["pipeline"]) for row in found] == [(0, 4, 0), (4, 4, 1)]
    assert [row["tiers"] for row in found] == sent(8, *keys[:2])
    assert main(["plan", "small.yaml", *keys]) == 0
    said = capsys.readouterr().out
    (head,) = [line.split() for line in said.splitlines() if line.startswith("sent by")]
    assert head == ["sent", "by", "from", "rank", "over", "weights", "gradients", "pipeline", "scalars", "total"]
    assert main(["plan", "small.yaml", "--ranks", "1"]) == 0
    assert "sent by" not in capsys.readouterr().out
