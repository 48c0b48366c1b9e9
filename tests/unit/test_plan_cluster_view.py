"""`llmtrain cluster show`: its input, and its output on tiers, cards and groups."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cli.main import main
from llmtrain.cluster.description import Cluster
from llmtrain.cluster.topology import nodes_of
from llmtrain.plan.resolve.cluster_source import topology_of
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.views.cluster_view import describe


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["cluster", "show", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def described(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(capsys, *words, "--json"))
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["cluster", "show", *words]) == 2
    return capsys.readouterr().err


def test_holmes_placement(capsys: pytest.CaptureFixture[str]) -> None:
    found = described(capsys, "two-sites", "parallel.pipeline=2", "parallel.tensor=8")
    assert (found["ranks"], found["ranks_per_node"], found["advice"]) == (32, 8, [])
    assert [(each["name"], each["ranks"][0], each["ranks"][-1]) for each in found["clusters"]] == [
        ("ib", 0, 15),
        ("roce", 16, 31),
    ]
    axes = {
        axis: {(each["lies"], (each["card"] or {}).get("interface")) for each in shown["groups"]}
        for axis, shown in found["axes"].items()
    }
    assert axes == {
        "pipeline": {("across ib, roce", "eth0")},
        "data": {("inside ib", "ib0"), ("inside roce", "eth1")},
        "tensor": {("inside a node", None)},
    }
    assert found["axes"]["data"]["groups"][8]["ranks"] == [16, 24]
    assert [tier["ranks"] for tier in found["axes"]["data"]["tiers"]] == [1, 2]


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "two-sites", "parallel.pipeline=2", "parallel.tensor=4")
    assert "32 ranks on two-sites, 8 on each node" in text
    for cells in (
        ("node", "8", "300 GB/s per rank", "-"),
        ("cluster", "16", "25.0 GB/s per node", "-"),
        ("all", "32", "3.12 GB/s per node", "-"),
        ("roce", "2", "16-31"),
        ("tensor", "4", "8", "inside a node", "-", "0-3"),
    ):
        rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
        assert any(row[: len(cells)] == list(cells) for row in rows), cells
    assert "set parallel.pipeline to 2" in shown(capsys, "two-sites")


def test_clusters_of_unequal_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("node: {ranks: 2}\nclusters: [{name: a, nodes: 2}, {name: b, nodes: 1}]\n")
    lines = shown(capsys, str(own)).splitlines()
    assert ["cluster", "4, 2", "-", "-"] in [re.split(r" {2,}", line.strip()) for line in lines]
    found = described(capsys, str(own))["tiers"]
    assert [(tier["name"], tier["ranks"], tier["sizes"]) for tier in found] == [
        ("node", 2, []),
        ("cluster", 2, [4, 2]),
        ("all", 6, []),
    ]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (64, {"die": (200e9, "rank"), "node": (50e9, "rank"), "all": (100e9, "node")}),
        # In a single node, all ranks have the links of the node.
        (8, {"die": (200e9, "rank"), "all": (50e9, "rank")}),
    ],
)
def test_whose_bandwidth_it_is(
    ranks: int, expected: dict[str, tuple[float, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = described(capsys, "frontier", "--ranks", str(ranks))
    for tiers in (found["tiers"], found["axes"]["data"]["tiers"]):
        assert {tier["name"]: (tier["bandwidth"], tier["bandwidth_per"]) for tier in tiers} == expected


def test_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = described(capsys, "quickstart", "cluster=frontier", "parallel.tensor=2", "--ranks", "64")
    assert {each["lies"] for each in found["axes"]["tensor"]["groups"]} == {"inside a die"}
    assert [(tier["name"], tier["ranks"]) for tier in found["axes"]["data"]["tiers"]] == [
        ("die", 1),
        ("node", 4),
        ("all", 32),
    ]
    assert described(capsys, "quickstart", "parallel.tensor=2", "parallel.data=2")["ranks"] == 4
    own = tmp_path / "own.yaml"
    own.write_text("node: {ranks: 2}\nclusters: [{name: a, nodes: 1, speed: 2}, {name: b, nodes: 1}]\n")
    found = described(capsys, str(own), "parallel.pipeline=2")
    assert (found["name"], found["ranks"], found["stage_speeds"]) == ("own", 4, [2.0, 1.0])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: quickstart\ncluster: {own}\nparallel: {{pipeline: 2}}\n")
    assert described(capsys, str(recipe))["stage_speeds"] == [2.0, 1.0]
    assert "stages: 2, 1" in shown(capsys, str(recipe))


def test_names_are_no_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own[x].yaml"
    own.write_text("node: {ranks: 2}\nclusters: [{name: 'a[red]', nodes: 1}, {name: '[/b]', nodes: 1}]\n")
    text = shown(capsys, str(own))
    assert "on own[x], 2 on each node" in text
    assert "across a[red], [/b]" in text


def test_without_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    found = described(capsys, "--ranks", "4")
    assert (found["name"], found["clusters"], found["tiers"][0]["ranks"]) == (None, [], 4)
    assert {each["lies"] for each in found["axes"]["data"]["groups"]} == {"on one machine"}
    assert "4 ranks on one machine" in shown(capsys, "--ranks", "4")


def test_overrides_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("parallel.pipeline=2", "parallel.tensor=2", "--ranks", "8")
    assert [described(capsys, *words)["axes"][axis]["degree"] for axis in ("pipeline", "tensor", "data")] == [2, 2, 2]


def test_a_description_without_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("clusters: [{name: a, nodes: 1}]\n")
    said = refused(capsys, str(own))
    assert "node is missing; every description" in said
    own.write_text("[clusters]\n")
    assert "is not a recipe" in refused(capsys, str(own))


def test_ranks_that_fill_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert described(capsys, "p4d")["ranks"] == 8
    assert described(capsys, "p4d", "parallel.tensor=8", "parallel.pipeline=2")["ranks"] == 16


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no description of a cluster p4; did you mean p4d?" in refused(capsys, "p4")
    assert "no recipe quickstar; did you mean quickstart?" in refused(capsys, "quickstar")
    neither = r"no recipe and no cluster's description nosuch; .*\bquickstart\b.*\bfrontier\b"
    assert re.search(neither, refused(capsys, "nosuch"))
    assert "parallel.tensr is not a recipe key" in refused(capsys, "p4d", "parallel.tensr=2")
    assert "'tensor' is not an override" in refused(capsys, "p4d", "tensor")
    assert "is 3, but the run has 16 ranks" in refused(capsys, "p4d", "parallel.tensor=3", "--ranks", "16")
    assert "start it with 32" in refused(capsys, "two-sites", "--ranks", "16")
    assert "keys of cluster, which is two-sites here" in refused(capsys, "two-sites", "cluster.node.ranks=4")


def test_a_description_takes_keys_of_any_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert described(capsys, "two-sites", "data.sequence_length=64") == described(capsys, "two-sites")


def test_work_grows_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of each group is looked up a few times, however many ranks and groups there are."""
    looked_up = [0]

    def counting(cluster: Cluster, ranks: Iterable[int]) -> Sequence[int]:
        found = list(ranks)
        looked_up[0] += len(found)
        return nodes_of(cluster, found)

    for module in ("llmtrain.cluster.nic", "llmtrain.plan.views.cluster_view"):
        monkeypatch.setattr(f"{module}.nodes_of", counting)
    counts = []
    for nodes in (64, 256):
        looked_up[0] = 0
        given = (
            f"cluster={{node: {{ranks: 8}}, clusters: [{{name: a, nodes: {nodes}}}, {{name: b, nodes: {nodes}}}], "
            "between: {kind: ethernet}}"
        )
        described = describe(topology_of(None, [given, "parallel.pipeline=8", "parallel.tensor=8"], None))
        assert described["ranks"] == 16 * nodes
        counts.append(looked_up[0] / described["ranks"])
    assert counts[0] == counts[1] <= 3 * 3


@pytest.mark.parametrize("keys", [(), ("parallel.pipeline=2", "parallel.order=data-pipeline-tensor")])
def test_a_plan_has_the_ranks_that_are_shown(keys: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "model: {preset: gpt2-124m}\ndata: {path: set}\nparallel: {tensor: 4}\ncluster: {node: {ranks: 8}}\n"
    )
    shown = topology_of(str(tmp_path / "r.yaml"), keys, 16)
    recipe, facts = described_run(str(tmp_path / "r.yaml"), keys, 16)
    plan = make_plan(recipe, facts)
    assert (plan.cluster, plan.tiers, plan.grid) == (shown.cluster, shown.tiers, shown.grid)
    assert facts.topology(recipe.parallel) == shown
