"""Times of messages between stages from a cluster's description: sharing, tiers, and `pipeline show --flops`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.cli.main import main
from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.load import load_cluster
from llmtrain.plan.pipeline.actions import Schedule
from llmtrain.plan.pipeline.message_times import message_times

SITES = """
node: {ranks: 4, tiers: [{name: node, ranks: 4, bandwidth: 8MB/s, latency: 1ms}]}
clusters:
  - {name: ib, nodes: 2, nic: {kind: infiniband, bandwidth: 4MB/s, latency: 2ms}}
  - {name: roce, nodes: 2, nic: {kind: roce, bandwidth: 2MB/s, latency: 3ms}}
between: {bandwidth: 1MB/s, latency: 50ms}
"""
MB = 1_000_000
# Seconds of a megabyte if all four ranks of a node send one, and the latency.
IB, ROCE, BETWEEN = (4 / 4, 0.002), (4 / 2, 0.003), (4 / 1, 0.05)


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    path = tmp_path / "sites.yaml"
    path.write_text(SITES)
    return path


def times(cluster: Cluster | None, layout: Layout, stages: Schedule) -> list[tuple[float, float]]:
    once, twice = (message_times(cluster, layout, stages, size) for size in (MB, 2 * MB))
    assert twice == replace(once, transfer=tuple(2 * seconds for seconds in once.transfer))
    return list(zip(once.transfer, once.latency, strict=True))


def layout(pipeline: int, data: int, tensor: int) -> Layout:
    return Layout({Axis.PIPELINE: pipeline, Axis.DATA: data, Axis.TENSOR: tensor})


def test_ranks_of_a_node_share_what_leaves_it(sites: Path) -> None:
    stages = Schedule(ranks=4, chunks=1, microbatches=0, actions=())
    for data, tensor in ((1, 4), (2, 2), (4, 1)):
        assert times(load_cluster(sites), layout(4, data, tensor), stages) == [IB, BETWEEN, ROCE]


def test_inside_a_node_each_has_its_own(sites: Path) -> None:
    hops = times(load_cluster(sites), layout(16, 1, 1), Schedule(ranks=16, chunks=1, microbatches=0, actions=()))
    assert [hop for place, hop in enumerate(hops) if place % 4 < 3] == [(1 / 8, 0.001)] * 12
    # Of a node's ranks, only the last communicates with another node.
    assert hops[3::4] == [(1 / 4, 0.002), (1.0, 0.05), (1 / 2, 0.003)]


def test_chunks_go_around(sites: Path) -> None:
    """From the last rank to the first, a message crosses between clusters; a folded pipeline turns around inside a
    rank."""
    cluster = load_cluster(sites)
    around = times(cluster, layout(4, 1, 4), Schedule(ranks=4, chunks=2, microbatches=0, actions=()))
    assert around == [IB, BETWEEN, ROCE, BETWEEN, IB, BETWEEN, ROCE]
    folded = times(cluster, layout(4, 1, 4), Schedule(ranks=4, chunks=2, microbatches=0, actions=(), folded=True))
    assert folded == [IB, BETWEEN, ROCE, (0.0, 0.0), ROCE, BETWEEN, IB]


def test_clusters_of_unlike_sizes(sites: Path) -> None:
    """Two nodes of one cluster stay neighbours if the other cluster has one node."""
    sites.write_text(SITES.replace("{name: roce, nodes: 2", "{name: roce, nodes: 1"))
    assert times(load_cluster(sites), layout(3, 1, 4), Schedule(ranks=3, chunks=1, microbatches=0, actions=())) == [
        IB,
        BETWEEN,
    ]


def test_clusters_on_one_network(sites: Path) -> None:
    """A message between the clusters is as slow as the slower cluster's cards; a node sends through all of its cards at
    once."""
    both = {"name": "a", "nodes": 1, "nics": [{"bandwidth": "2MB/s", "latency": "1ms"}] * 2}
    one = {"name": "b", "nodes": 1, "nic": {"bandwidth": "8MB/s", "latency": "9ms"}}
    for clusters in ([both, one], [one, both]):
        cluster = load_cluster({"node": {"ranks": 4}, "clusters": clusters})
        assert times(cluster, layout(2, 1, 4), Schedule(ranks=2, chunks=1, microbatches=0, actions=())) == [
            (4 / 4, 0.009)
        ]


def test_what_is_not_stated_takes_no_time() -> None:
    pair, one_of_two = (
        Schedule(ranks=2, chunks=1, microbatches=0, actions=()),
        [{"bandwidth": "2MB/s", "latency": "1ms"}, {"latency": "2ms"}],
    )
    for cluster, latency in (
        (None, 0.0),
        (load_cluster({"node": {"ranks": 1}}), 0.0),
        (load_cluster({"node": {"ranks": 1}, "clusters": [{"name": "a", "nics": one_of_two}]}), 0.002),
    ):
        assert times(cluster, layout(2, 1, 1), pair) == [(0.0, latency)]
        assert message_times(cluster, layout(2, 1, 1), pair, MB).unknown


def test_both_ways_from_a_node_go_through_its_card(sites: Path) -> None:
    """A rank's backward messages wait for its forward messages, unless those go to another cluster."""
    cluster = load_cluster(sites)
    links = message_times(cluster, layout(4, 1, 4), Schedule(ranks=4, chunks=1, microbatches=0, actions=()), MB).links
    assert links == (((0, "cards"), (1, "cards")), ((1, "between"), (2, "between")), ((2, "cards"), (3, "cards")))
    # Three nodes have two stages each: in the middle node, one stage sends forward and one backward, through one card.
    nodes = load_cluster({"node": {"ranks": 2}, "clusters": [{"name": "a", "nodes": 3, "nic": {"bandwidth": "1MB/s"}}]})
    assert [
        seconds for seconds, _ in times(nodes, layout(6, 1, 1), Schedule(ranks=6, chunks=1, microbatches=0, actions=()))
    ] == [0, 2, 0, 2, 0]


def test_a_card_is_a_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """However fast the ranks, the stages in the middle send each microbatch forward and its gradient backward."""
    path = tmp_path / "line.yaml"
    path.write_text("{node: {ranks: 1}, clusters: [{name: a, nodes: 4, nic: {bandwidth: 10MB/s}}]}")
    keys = ["parallel.pipeline=4", "pipeline.split=[3,3,3,3]", "train.global_batch=32", "precision.compute=bf16"]
    message, steps = TOKENS * HIDDEN * 2 / 10e6, {}
    for schedule in ("1f1b", "message-driven"):
        words = [*keys, f"cluster={path}", f"pipeline.schedule={schedule}", "--flops", "1000TFLOP/s"]
        steps[schedule] = float(str(shown(capsys, *words, *["pipeline.limit=16"] * (schedule != "1f1b"))["step_time"]))
    assert 2 * 32 * message < min(steps.values())
    assert steps["message-driven"] < 2 * (32 + 4) * message


KEYS = ["parallel.pipeline=2", "parallel.data=1", "pipeline.split=[6,6]", "train.microbatch=1", "train.global_batch=1"]
# FLOPs of gpt2-124m per token: a layer's forward pass, of whose attention half is masked, and the head's.
LAYER, HEAD, TOKENS, HIDDEN = 2 * 12 * 768**2 + 2 * 768 * 1024, 2 * 768 * 50257, 1024, 768


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float | str | None]:
    assert main(["pipeline", "show", "gpt2-124m", "cluster=auto", *KEYS, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 1)])
def test_seconds(recompute: str, again: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One microbatch goes forward and backward; the output equals the times computed by hand."""
    path = tmp_path / "pair.yaml"
    path.write_text("{node: {ranks: 1}, clusters: [{name: a, nodes: 2, nic: {bandwidth: 10MB/s, latency: 20ms}}]}")
    keys = [f"cluster={path}", "precision.compute=bf16", f"activation_checkpointing={recompute}"]
    first, last = 6 * LAYER * TOKENS / 1e12, (6 * LAYER + HEAD) * TOKENS / 1e12
    message = TOKENS * HIDDEN * 2 / 10e6 + 0.02
    forth = first + message + last
    # The head is not recomputed.
    back = 2 * last + again * first + message + 2 * first + again * first
    found = shown(capsys, *keys, "--flops", "1TFLOP/s")
    assert found["step_time"] == pytest.approx(forth + back)
    assert found["unit"] == "s"
    assert str(found["links"]).startswith("messages are 1.50 MiB, in bf16, and take up to 177 ms; sums over ranks")
    counted = shown(capsys, *keys)
    assert counted["step_time"] == pytest.approx((forth + back - 2 * message) / (LAYER * TOKENS / 1e12))
    assert "--flops" in str(counted["links"])
    assert "no description states the bandwidth of some" in str(shown(capsys, "--flops", "1TFLOP/s")["links"])
    assert shown(capsys)["links"] is None


def test_tensor_parallel_ranks_share_the_work_and_with_sequence_the_messages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text("{node: {ranks: 2}, clusters: [{name: a, nodes: 2, nic: {bandwidth: 10MB/s}}]}")
    keys = [f"cluster={path}", "precision.compute=bf16", "parallel.tensor=2", "--flops", "1TFLOP/s"]
    whole = shown(capsys, *keys)["step_time"]
    less = shown(capsys, *keys, "parallel.sequence=true")["step_time"]
    assert isinstance(whole, float)
    assert isinstance(less, float)
    # Two ranks share a card in both directions.
    assert whole - less == pytest.approx(2 * TOKENS * HIDDEN * 2 / 10e6)


def test_a_described_accelerator_computes_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["cluster=p4d", "--ranks", "2", "--flops", "100TFLOP/s"]
    assert "in bf16" in str(shown(capsys, *keys)["links"])
    assert "in fp32" in str(shown(capsys, *keys, "precision.compute=fp32")["links"])


def test_flops_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "show", "gpt2-124m", "cluster=auto", *KEYS, "--flops", "150"]) == 2
    assert "--flops is '150'; expected a speed such as 312TFLOP/s" in capsys.readouterr().err
    assert main(["pipeline", "show", "gpt2-124m", "cluster=auto", *KEYS, "--flops", "1e-300FLOP/s"]) == 2
    assert "a step takes millions of years; check --flops" in capsys.readouterr().err
