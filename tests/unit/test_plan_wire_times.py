"""The least times of the links between ranks: against closed forms, and as `llmtrain plan` shows them."""

import json
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cli.main import main
from llmtrain_data import units

LAYERS, HIDDEN, FFN, TOKENS = 8, 64, 256, 32
SMALL = f"""
model: {{family: llama, layers: {LAYERS}, hidden: {HIDDEN}, heads: 8, ffn: {FFN}, vocab: 64, tie_embeddings: false}}
data: {{path: set, sequence_length: {TOKENS}}}
train: {{global_batch: 24, microbatch: 1}}
precision: {{compute: bf16}}
"""
# Bytes of all weights in bf16: the blocks, the embedding, the head and the last norm.
WEIGHTS = 2 * (LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN) + 2 * 64 * HIDDEN + HIDDEN)
NODE = "ranks: 4, tiers: [{name: node, ranks: 4, bandwidth: 2GB/s}]"
ONE_NETWORK = "cluster={node: {%s}, clusters: [{name: a, nic: {bandwidth: %s}}]}"
# Units are padded.
NEAR = 0.01


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)


def wires(capsys: pytest.CaptureFixture[str], ranks: int, *keys: str) -> dict[str, dict[str, Any]]:
    """Return the least time of each tier."""
    assert main(["plan", "small.yaml", *keys, "--ranks", str(ranks), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["wires"]
    for one in found:
        assert one["seconds"] == one["bytes"] / one["bytes_per_s"]
    return {one["tier"]: one for one in found}


def test_closed_forms_of_a_reduction_and_an_update(capsys: pytest.CaptureFixture[str]) -> None:
    """Of p ranks in nodes of k, a rank sends (k - 1) / k of the weights inside its node, and a node (p - k) / p."""
    found = wires(capsys, 8, ONE_NETWORK % (NODE, "1Gbit/s"), "zero.stage=1")
    assert [(name, one["per"], one["rank"], one["bytes_per_s"]) for name, one in found.items()] == [
        ("node", "rank", 0, 2e9),
        ("all", "node", 0, 125e6),
    ]
    assert found["node"]["seconds"] == pytest.approx(2 * 3 / 4 * WEIGHTS / 2e9, rel=NEAR)
    assert found["all"]["seconds"] == pytest.approx(2 * (8 - 4) / 8 * WEIGHTS / 125e6, rel=NEAR)


def test_half_the_rate_takes_twice_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (wires(capsys, 8, ONE_NETWORK % (NODE, rate), "zero.stage=3") for rate in ("1Gbit/s", "500Mbit/s"))
    assert slow["all"]["seconds"] == 2 * fast["all"]["seconds"] > 0
    assert slow["node"] == fast["node"]
    # All cards of a node together.
    cards = ONE_NETWORK.replace("nic: {bandwidth: %s}", "nics: [{bandwidth: %s}, {bandwidth: 500Mbit/s}]")
    assert wires(capsys, 8, cards % (NODE, "500Mbit/s"), "zero.stage=3")["all"] == fast["all"]


def test_one_ring_of_all_ranks_must_send_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    """What the ranks of a node gather together has to come in once."""
    keys = (ONE_NETWORK % (NODE, "1Gbit/s"), "zero.stage=3", "zero.resident=0")
    hops, ring = (wires(capsys, 8, *keys, f"zero.hierarchical={one}")["all"] for one in ("true", "false"))
    assert ring["bytes"] == hops["bytes"]


def test_groups_that_cut_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Shards of 6 ranks, 4 of which are in the first node. In each reduction, each of the 4 sends the parts of the 2
    others. In the update, the 4 together must let out as much as the shards of the 2. Two replicas sum each shard."""
    cut = "zero.partition={weights: 1, gradients: 6, optimizer: 6}"
    found = wires(capsys, 12, ONE_NETWORK % ("ranks: 4", "1Gbit/s"), cut)
    replicas = 4 * (WEIGHTS / 12 + WEIGHTS / 12)
    reductions = 24 // 12
    assert list(found) == ["all"]
    expected = reductions * 4 * WEIGHTS * 2 / 6 + WEIGHTS * 2 / 6 + replicas
    assert found["all"]["bytes"] == pytest.approx(expected, rel=NEAR)


def test_ranks_of_a_node_that_send_unlike_amounts(capsys: pytest.CaptureFixture[str]) -> None:
    """Four stages on two nodes of two: the rank of stage 1 sends forward to the other node, stage 0 sends inside."""
    node = "ranks: 2, tiers: [{name: node, ranks: 2, bandwidth: 2GB/s}]"
    found = wires(capsys, 4, ONE_NETWORK % (node, "1Gbit/s"), "parallel.pipeline=4")
    messages = 24 * TOKENS * HIDDEN * 2
    assert (found["node"]["bytes"], found["all"]["bytes"]) == (messages, messages)


def test_the_slower_of_two_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = (
        "cluster={node: {ranks: 2}, clusters: [{name: a, nodes: 2, nic: {bandwidth: 4Gbit/s}}, "
        "{name: b, nodes: 4, nic: {bandwidth: 2Gbit/s}}], between: {bandwidth: 1Gbit/s}}"
    )
    found = wires(capsys, 12, cluster, "zero.stage=1")
    assert (found["cluster"]["rank"], found["cluster"]["bytes_per_s"]) == (4, 250e6)
    assert found["all"]["bytes_per_s"] == 125e6


@pytest.mark.parametrize(
    ("cluster", "ranks", "expected"),
    [
        ("{node: {ranks: 4}}", 8, []),
        ("auto", 8, []),
        ("{node: {ranks: 4}, clusters: [{name: a, nic: {latency: 5us}}]}", 8, []),
        (f"{{node: {{{NODE}}}}}", 8, ["node"]),
        # One node has the links of a node alone.
        (f"{{node: {{{NODE}}}}}", 4, ["all"]),
        (f"{{node: {{{NODE}}}}}", 1, []),
    ],
)  # fmt: skip
def test_a_tier_without_a_stated_rate_has_no_time(
    cluster: str, ranks: int, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(wires(capsys, ranks, f"cluster={cluster}", "zero.stage=1")) == expected


def test_shown(capsys: pytest.CaptureFixture[str]) -> None:
    keys = (ONE_NETWORK % (NODE, "1Gbit/s"), "zero.stage=1")
    node, everything = wires(capsys, 8, *keys).values()
    assert main(["plan", "small.yaml", *keys, "--ranks", "8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    inside = f"{units.seconds(node['seconds'])} on the wire, for {units.size(node['bytes'])}"
    assert f"wire of node at least {inside} that rank 0 sends at 2.00 GB/s" in said
    across = f"{units.seconds(everything['seconds'])} on the wire, for {units.size(everything['bytes'])}"
    assert f"wire of all at least {across} that the node of rank 0 sends at 125 MB/s" in said
