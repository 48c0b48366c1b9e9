"""`llmtrain bench comm` in emulated clusters: it measures their rates, and runs use the description that it writes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llmtrain.cluster.description import Cluster, Nic
from llmtrain.cluster.load import load_cluster
from llmtrain.cluster.quantity import quantity
from llmtrain_data.indexed import IndexedWriter

from tests.tiny import rows
from tools.netlab.lab import Lab, LabResult
from tools.netlab.spec import of_cluster, plain

pytestmark = pytest.mark.netlab

RECIPE = """
name: run
model: {{family: llama, layers: 4, hidden: 128, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 8, global_batch: 8, microbatch: 1, eval_every: 0}}
zero: {{partition: {{weights: node, gradients: node, optimizer: all}}}}
optimizer: {{warmup: 0}}
logging: {{every: 1, dir: {folder}}}
cluster: {folder}/measured.yaml
"""
UNEVEN = """
node: {ranks: 1}
clusters:
  - {name: a, nodes: 1, nic: {kind: infiniband, interface: ib0, bandwidth: 400mbit}}
  - {name: b, nodes: 3, nic: {kind: roce, interface: roce0, bandwidth: 150mbit}}
between: {interface: eth0, bandwidth: 50mbit}
"""
TWO_CARDS = """
node: {ranks: 2}
clusters:
  - {name: c, nodes: 2, nics: [{interface: eth0, bandwidth: 200mbit}, {interface: eth1, bandwidth: 100mbit}]}
"""


def llmtrain(*words: str) -> list[str]:
    return [sys.executable, "-m", "llmtrain", *words]


def bench(lab: Lab, output: Path, *words: str) -> tuple[Cluster, LabResult]:
    result = lab.run(llmtrain("bench", "comm", "--output", str(output), *words), timeout=300)
    assert result.returncode == 0, result.output
    return load_cluster(output), result


def rate(card: Nic | None) -> float:
    assert card is not None
    assert card.bandwidth is not None
    return quantity(card.bandwidth, "byte/s")


def seconds(card: Nic) -> float:
    assert card.latency is not None
    return quantity(card.latency, "s")


def test_rates_are_found_and_a_run_takes_the_file(lab: Lab, tmp_path: Path) -> None:
    file, plot = tmp_path / "measured.yaml", tmp_path / "plot.png"
    cluster, result = bench(lab, file, "--plot", str(plot), "--json")
    assert [(group.nodes, len(group.cards)) for group in cluster.clusters] == [(2, 1)]
    # Both ranks of a node together.
    assert rate(cluster.clusters[0].cards[0]) == pytest.approx(12.5e6, rel=0.1)
    assert cluster.node.tiers[0].ranks == 2

    said = next(line for line in result.output[0] if line.startswith("{"))
    assert [lines for lines in result.output[1:] if lines] == []
    measured = json.loads(said)
    assert {timing["operation"] for timing in measured["links"][1]["timings"]} == {
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send and receive",
    }  # fmt: skip
    assert plot.read_bytes().startswith(b"\x89PNG")

    writer = IndexedWriter(tmp_path / "set", np.dtype(np.uint16))
    for document in np.random.default_rng(0).integers(0, 64, size=(50, 100)):
        writer.add(document, np.array([100]))
    writer.commit()
    (tmp_path / "run.yaml").write_text(RECIPE.format(folder=tmp_path))
    shown = subprocess.run(
        llmtrain("cluster", "show", str(tmp_path / "run.yaml"), "--json"), capture_output=True, check=True
    )
    assert json.loads(shown.stdout)["tiers"][-1]["bandwidth"] == rate(cluster.clusters[0].cards[0])
    trained = lab.run(llmtrain("run", str(tmp_path / "run.yaml")), timeout=300)
    assert trained.returncode == 0, trained.output
    assert f"interface: {cluster.clusters[0].cards[0].interface}" in (tmp_path / "run/recipe.resolved.yaml").read_text()

    logged = rows(tmp_path / "run")
    carried = {int(node): links for node, links in logged[-1]["links"].items()}
    assert set(carried) == {0, 1}
    for links in carried.values():
        sent = links["nic eth0"]["sent"]
        assert 0 < sent["average"] <= sent["peak"] < 1.1 * 12.5e6
        # Half of the exchanged bytes stay in the node.
        assert links["nic lo"]["sent"]["average"] > 0
    steps = [row for row in logged if "event" not in row]
    assert 0 < steps[-1]["link_bytes_per_s"]["nic eth0"]["average"] <= 1.1 * 2 * 12.5e6


@pytest.mark.soak
@pytest.mark.parametrize("asked", ["50mbit", "200mbit", "1gbit"])
def test_rates(asked: str, tmp_path: Path) -> None:
    with Lab(plain(nodes=2, ranks_per_node=2, inter=asked, intra="800mbit")) as lab:
        cluster, _ = bench(lab, tmp_path / "measured.yaml")
    assert rate(cluster.clusters[0].cards[0]) == pytest.approx(quantity(asked, "byte/s"), rel=0.1)
    # Both ranks share the loopback's rate.
    inside = cluster.node.tiers[0].bandwidth
    assert inside is not None
    assert 2 * quantity(inside, "byte/s") == pytest.approx(100e6, rel=0.1)


@pytest.mark.soak
def test_latency(tmp_path: Path) -> None:
    with Lab(plain(nodes=2, ranks_per_node=1, inter="100mbit", latency="20ms")) as lab:
        cluster, _ = bench(lab, tmp_path / "measured.yaml")
    (card,) = cluster.clusters[0].cards
    assert seconds(card) == pytest.approx(0.02, rel=0.1)
    assert rate(card) == pytest.approx(12.5e6, rel=0.1)


@pytest.mark.soak
@pytest.mark.parametrize("given", [True, False], ids=["described", "found"])
def test_clusters_and_what_is_between(given: bool, tmp_path: Path) -> None:
    description = tmp_path / "uneven.yaml"
    description.write_text(UNEVEN)
    with Lab(of_cluster(load_cluster(description))) as lab:
        cluster, _ = bench(lab, tmp_path / "measured.yaml", *(["--cluster", str(description)] if given else []))
    assert [group.nodes for group in cluster.clusters] == [1, 3]
    assert rate(cluster.clusters[1].cards[0]) == pytest.approx(150e6 / 8, rel=0.1)
    assert rate(cluster.between) == pytest.approx(50e6 / 8, rel=0.1)
    if given:
        # With no other rank to measure with, the figure does not change.
        assert cluster.clusters[0] == load_cluster(description).clusters[0]


@pytest.mark.soak
def test_each_card_of_a_node(tmp_path: Path) -> None:
    description = tmp_path / "two.yaml"
    description.write_text(TWO_CARDS)
    with Lab(of_cluster(load_cluster(description))) as lab:
        cluster, _ = bench(lab, tmp_path / "measured.yaml")
    rates = {card.interface: rate(card) for card in cluster.clusters[0].cards}
    assert rates == {"eth0": pytest.approx(25e6, rel=0.1), "eth1": pytest.approx(12.5e6, rel=0.1)}
