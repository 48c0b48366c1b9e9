"""What offload moves in a step: its lanes, their least times, and the simulated time of the step."""

import json
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cli.main import main
from llmtrain.plan.cost.offload_simulation import Computation, Order, Rates, simulate_steps
from llmtrain.plan.cost.simulated_step import merged
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.offload_moves import Moves
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.views.view import view_recipe

HIDDEN, VOCAB, TOKENS, LAYERS = 64, 512, 32, 2
RECIPE = """
model: {family: llama, layers: 2, hidden: 64, heads: 2, ffn: 128, vocab: 512}
data: {path: set, sequence_length: 32}
train: {global_batch: 2, microbatch: 2}
precision: {compute: bf16}
zero: {stage: 0}
activation_checkpointing: none
offload: {optimizer: nvme, share: 1}
"""
UNKNOWN: dict[str, Any] = {
    "accelerator": {"name": "nothing"},
    "node": {"ranks": 1, "nvme": [{"path": "/fast"}, {"path": "/my disk"}]},
}
# All rates are low, so that the times are as of a large model.
KNOWN: dict[str, Any] = {
    "accelerator": {"peak": {"bf16": "1GFLOP/s"}, "host_link": "2MB/s", "bandwidth": "50MB/s"},
    "node": {
        "ranks": 1,
        "host": {"bandwidth": "10MB/s"},
        "nvme": [{"path": "/fast", "bandwidth": "6MB/s"}, {"path": "/slow", "bandwidth": "2MB/s"}],
    },
}

LONG = "model.layers=8"


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


def words(cluster: dict[str, Any] | None, *keys: str) -> list[str]:
    return [*keys, *([] if cluster is None else [f"cluster={json.dumps(cluster)}"])]


def made(cluster: dict[str, Any], *keys: str, ranks: int = 1) -> Plan:
    return make_plan(*described_run("tiny.yaml", words(cluster, *keys), ranks))


def shown(capsys: pytest.CaptureFixture[str], cluster: dict[str, Any] | None, *keys: str, ranks: int = 1) -> Any:
    assert main(["plan", "tiny.yaml", *words(cluster, *keys), "--ranks", str(ranks), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def lane_of(found: Any, name: str, way: str) -> Any:
    (lane,) = (one for one in found["lanes"] if (one["lane"], one["way"]) == (name, way))
    return lane


def unit_elements(plan: Plan) -> list[int]:
    """Elements of the embedding, the blocks and the head, all of which fit into one bucket."""
    found = [one.numel for one in rank_buckets(plan, 0)]
    assert found[0] == found[-1] - HIDDEN == VOCAB * HIDDEN
    assert len(found) == LAYERS + 2
    return found


def test_lanes_of_two_unlike_volumes(capsys: pytest.CaptureFixture[str]) -> None:
    found, sizes = shown(capsys, KNOWN), unit_elements(made(KNOWN))
    total = sum(sizes)
    # Master and two moments, in whole pages, three quarters of them on the volume that is three times as fast.
    files = sum(3 * (-(-4 * size // 4096) * 4096) for size in sizes)
    for way in ("read", "written"):
        fast, slow = (lane_of(found, path, way) for path in ("/fast", "/slow"))
        assert fast["bytes"] + slow["bytes"] == files
        assert fast["bytes"] == pytest.approx(0.75 * files, abs=4096)
        assert (fast["bytes_per_s"], fast["seconds"]) == (6e6, fast["bytes"] / 6e6)
        assert (slow["bytes_per_s"], slow["seconds"]) == (2e6, slow["bytes"] / 2e6)
    # Gradients go down in fp32, weights come up in bf16.
    assert lane_of(found, "host link", "to the host")["seconds"] == 4 * total / 2e6
    assert lane_of(found, "host link", "to the device")["seconds"] == 2 * total / 2e6
    # States are read and written, gradients are read, weights are written.
    assert lane_of(found, "AdamW on the CPU", "read and written")["seconds"] == (24 + 4 + 2) * total / 10e6
    assert len(found["lanes"]) == 7
    assert found["unknown_rates"] == []
    least = found["least_seconds"]
    assert least["volumes"] == max(lane_of(found, path, "read")["seconds"] for path in ("/fast", "/slow"))
    assert (least["link"], least["host"]) == (4 * total / 2e6, 30 * total / 10e6)


def by_hand(
    found: Any, sizes: list[int], forward: list[float], backward: list[float], ranks: int = 1, together: int = 1
) -> float:
    """Return the seconds of a step in which one thread steps a bucket of each unit, once the norm is known.

    All four are read ahead, one after the other on each volume. Each then goes through link, processor and link. The
    next forward pass waits for each unit's weights. ranks: that share the volumes and the processor. together: units
    whose weights each unit waits for, from its own on.
    """
    rate = max(lane_of(found, path, "read")["seconds"] for path in ("/fast", "/slow"))
    read = clock = thread = 0.0
    total, stepped = sum(sizes), list[float]()
    for size in sizes:
        read += rate * size / total
        thread = max(thread, read) + 4 * size / 2e6 + 30 * size * ranks / 10e6 + 2 * size / 2e6
        stepped.append(thread)
    for unit, seconds in enumerate(forward):
        clock = max(clock, *stepped[unit : unit + together]) + seconds
    return clock + sum(backward)


def test_a_simulated_step_equals_one_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    found, sizes = shown(capsys, KNOWN), unit_elements(made(KNOWN))
    simulated = found["simulated"]
    assert (simulated["rank"], simulated["also_moved"]) == (0, None)
    assert simulated["moves"] == pytest.approx(by_hand(found, sizes, [0.0] * 4, [0.0] * 4), rel=0.01)
    # Two sequences; products of 2 FLOPs for each element of a matrix, and half of attention's two, as the mask
    # hides the rest.
    matrices = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 128
    block = 2 * TOKENS * (2 * matrices + 2 * HIDDEN * TOKENS) / 1e9
    forward = [0.0, block, block, 2 * TOKENS * 2 * HIDDEN * VOCAB / 1e9]
    backward = [2 * seconds for seconds in forward]
    assert simulated["with_compute"] == pytest.approx(by_hand(found, sizes, forward, backward), rel=0.01)
    assert sum(forward + backward) == pytest.approx(found["least_seconds"]["compute"])
    # Four microbatches are four times as much computation, of which only the first forward pass waits.
    more = shown(capsys, KNOWN, "train.global_batch=8")["simulated"]["with_compute"]
    assert more - simulated["with_compute"] == pytest.approx(3 * sum(forward + backward), rel=1e-6)
    # Activation checkpointing computes the blocks' forward passes again.
    again = shown(capsys, KNOWN, "activation_checkpointing=full")["simulated"]["with_compute"]
    last = 2 * TOKENS * 2 * HIDDEN * 128 / 1e9
    assert again - simulated["with_compute"] == pytest.approx(2 * (block - last), rel=1e-6)


@pytest.mark.parametrize(("stage", "together"), [(0, 1), (1, 2), (2, 2), (3, 1)])
def test_where_stepped_weights_are_gathered_a_unit_also_waits_for_the_next_one(
    stage: int, together: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that stay whole on each rank are gathered from those that step them."""
    slow = {**KNOWN, "accelerator": {**KNOWN["accelerator"], "peak": {"bf16": "20MFLOP/s"}}}
    two, keys = {**slow, "node": {**KNOWN["node"], "ranks": 2}}, (f"zero.stage={stage}", "train.global_batch=4")
    found = shown(capsys, two, *keys, ranks=2)
    sizes = [one.numel for one in rank_buckets(made(two, *keys, ranks=2), 0)]
    assert len(sizes) == LAYERS + 2
    block = 2 * TOKENS * (2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 128) + 2 * HIDDEN * TOKENS) / 20e6
    forward = [0.0, block, block, 2 * TOKENS * 2 * HIDDEN * VOCAB / 20e6]
    backward = [2 * seconds for seconds in forward]
    expected, other = (by_hand(found, sizes, forward, backward, 2, count) for count in (together, 3 - together))
    assert found["simulated"]["with_compute"] == pytest.approx(expected, rel=0.01)
    assert abs(other / expected - 1) > 0.02


def test_spare_memory_shortens_the_simulated_step(capsys: pytest.CaptureFixture[str]) -> None:
    slow = {**KNOWN, "accelerator": {**KNOWN["accelerator"], "peak": {"bf16": "36MFLOP/s"}}}
    none, full = (shown(capsys, slow, LONG, f"offload.spare={spare}")["simulated"]["with_compute"] for spare in (0, 1))
    computed = shown(capsys, slow, LONG)["least_seconds"]["compute"]
    assert computed < full < computed + 0.6 * (none - computed)


def test_the_device_steps_at_its_own_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    found, total = shown(capsys, KNOWN, "offload.step=device"), sum(unit_elements(made(KNOWN)))
    assert lane_of(found, "AdamW on the device", "read and written")["seconds"] == 30 * total / 50e6
    assert lane_of(found, "host link", "to the host")["seconds"] == 12 * total / 2e6
    assert "AdamW on the CPU" not in [one["lane"] for one in found["lanes"]]
    assert found["simulated"]["moves"] > 12 * total / 2e6


def test_the_ranks_of_a_node_share_volumes_and_processors(capsys: pytest.CaptureFixture[str]) -> None:
    two = {**KNOWN, "node": {**KNOWN["node"], "ranks": 2}}
    one, both = shown(capsys, KNOWN), shown(capsys, two, "train.global_batch=4", ranks=2)
    for name, way in (("/fast", "read"), ("/slow", "written"), ("AdamW on the CPU", "read and written")):
        assert lane_of(both, name, way)["ranks"] == 2
        assert lane_of(both, name, way)["bytes"] == pytest.approx(2 * lane_of(one, name, way)["bytes"], rel=0.01)
    assert lane_of(both, "host link", "to the host") == lane_of(one, "host link", "to the host")
    assert both["simulated"]["moves"] > 1.5 * one["simulated"]["moves"]


def test_unknown_rates_name_the_command_and_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, UNKNOWN)
    assert all(one["bytes"] > 0 for one in found["lanes"])
    assert {one["seconds"] for one in found["lanes"]} == {None}
    assert (found["simulated"]["moves"], found["simulated"]["with_compute"]) == (None, None)
    measured, stated = found["unknown_rates"]
    assert measured == (
        "not known of /fast, /my disk, host link, AdamW on the CPU; `llmtrain bench memory --paths /fast --paths "
        "'/my disk' --output FILE`, with --cluster and your cluster file, measures them, and cluster=FILE states them"
    )
    assert stated == "accelerator.peak.bf16 of the cluster file is not stated; take it from the datasheet"
    assert main(["plan", "tiny.yaml", *words(UNKNOWN)]) == 0
    said = capsys.readouterr().out
    assert "not known without all rates" in said
    compute = " ".join(next(line for line in said.splitlines() if line.startswith("compute")).split())
    assert compute == "compute unknown: give cluster.accelerator.name or cluster.accelerator.peak.bf16"
    assert "`llmtrain bench memory --paths /fast" in said
    # That datasheet has no bf16.
    old = shown(capsys, UNKNOWN | {"accelerator": {"name": "V100-32GB"}}, "precision.compute=bf16")
    assert old["unknown_rates"] == [measured]


def test_the_command_keeps_what_a_shipped_description_has() -> None:
    keys = "data.path=set", "cluster=card-80gb-2-nvme", "offload.optimizer=nvme", "offload.share=1"
    view = view_recipe("offload-llama-1b", keys, 1)
    (said,) = view.as_data()["unknown_rates"]
    command = "llmtrain bench memory --cluster card-80gb-2-nvme --paths /scratch0 --paths /scratch1 --output FILE"
    assert f"; `{command}` measures them, and cluster=FILE states them" in said


def test_the_moves_are_simulated_without_a_peak(capsys: pytest.CaptureFixture[str]) -> None:
    unstated = {**KNOWN, "accelerator": {"host_link": "2MB/s"}}
    found = shown(capsys, unstated)
    assert found["simulated"]["moves"] == shown(capsys, KNOWN)["simulated"]["moves"]
    assert found["simulated"]["with_compute"] is None
    (said,) = found["unknown_rates"]
    assert "accelerator.peak.bf16" in said


def test_what_a_gpu_copies_of_weights_gradients_and_activations(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and sums of gradients on the host, two microbatches, memory for units in use alone."""
    keys = ("offload.optimizer=none", "offload.share=0", "offload.parameters=host", "zero.resident=0")
    many = ("train.global_batch=4", "model.layers=8", "activation_checkpointing=full", "offload.activations=host")
    plan = make_plan(*described_run("tiny.yaml", words(KNOWN, *keys, *many), 1))
    found, total = shown(capsys, KNOWN, *keys, *many), 0
    for name, placement in plan.sharding.placements.items():
        assert placement.moves_weights, name
    total = found["parameters"]
    down, up = (lane_of(found, "host link", way)["bytes"] for way in ("to the host", "to the device"))
    activations = found["memory"]["roles"][0]["activations_moved"]
    assert activations > 0
    # The gradients of both microbatches in bf16, and the weights once they are stepped.
    assert down == pytest.approx(2 * 2 * total + 2 * total + activations, rel=0.01)
    # The weights of nearly all units for each pass, and the sums, in fp32, which the device steps.
    assert 4 * total + 3 * 2 * total < up - activations <= 4 * total + 4 * 2 * total
    # The first gradients are copied into the sums in fp32, and the second ones are added to them.
    sums = lane_of(found, "sums of gradients on the CPU", "read and written")
    assert sums["bytes"] == pytest.approx((2 + 4) * total + (2 + 4 + 4) * total, rel=0.01)
    assert sums["seconds"] == sums["bytes"] / 10e6
    assert found["simulated"] is None


def test_other_states_are_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, KNOWN, "offload.parameters=nvme", "offload.gradients=none")
    assert found["simulated"] == {"rank": 0, "moves": None, "with_compute": None, "also_moved": "weights"}
    assert main(["plan", "tiny.yaml", *words(KNOWN, "offload.parameters=nvme", "offload.gradients=none")]) == 0
    assert "not known, as weights move too; no step is shorter than its busiest lane, " in capsys.readouterr().out


def test_nothing_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("offload.optimizer=none", "offload.share=0")
    for cluster in (None, KNOWN):
        found = shown(capsys, cluster, *keys)
        assert (found["lanes"], found["simulated"], found["unknown_rates"]) == ([], None, [])
        assert main(["plan", "tiny.yaml", *words(cluster, *keys)]) == 0
        assert "lane of a step" not in capsys.readouterr().out


def test_a_cpu_steps_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, None, "offload.paths=[/scratch]")
    assert [(one["lane"], one["ranks"]) for one in found["lanes"]] == [
        ("/scratch", 1), ("/scratch", 1), ("AdamW on the CPU", 1),
    ]  # fmt: skip
    (said,) = found["unknown_rates"]
    assert "--paths /scratch " in said


def test_neighbours_are_simulated_as_one() -> None:
    moves = [
        Moves(
            unit=unit,
            spare=place % 2 == 0,
            elements=10,
            on_device=False,
            there=40,
            back=20,
            back_ahead=0,
            commit=20,
            files=(90, 30),
        )
        for unit in (0, 1)
        for place in range(64)
    ]
    few = merged(moves, 16)
    assert len(few) == 16
    for name in ("elements", "down", "up"):
        assert sum(getattr(one, name) for one in few) == sum(getattr(one, name) for one in moves)
    assert [sum(one.files[volume] for one in few) for volume in (0, 1)] == [128 * 90, 128 * 30]
    given = Computation([0.1, 0.1], [0.2, 0.2]), Rates(down=1e4, up=1e4, step=1e4, files=(1e4, 5e3)), Order(4)
    exact, rough = (simulate_steps(some, *given).seconds for some in (moves, few))
    assert rough == pytest.approx(exact, rel=0.1)
    assert merged(moves, 1000) == sorted(moves, key=lambda one: (one.unit, not one.spare))


@pytest.mark.parametrize(
    ("recompute", "passes", "skipped"),
    [("none", 3, 0), ("full", 4, LAYERS), (f"{{every: {LAYERS}}}", 4, 1), ("full model.dropout=0.1", 4, 0)],
)
def test_the_least_time_counts_what_is_computed(
    recompute: str, passes: int, skipped: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention's kernels skip what the mask hides; recomputed blocks pass forward twice, the head and the last product
    of each group once."""
    found = shown(
        capsys,
        KNOWN,
        *f"activation_checkpointing={recompute}".replace(" model", "|model").split("|"),
        "offload.optimizer=none",
        "offload.share=auto",
    )
    block = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * 128) + 2 * HIDDEN * TOKENS
    step = 2 * TOKENS * (passes * LAYERS * block + 3 * 2 * HIDDEN * VOCAB - skipped * 2 * HIDDEN * 128)
    assert found["least_seconds"]["compute"] == pytest.approx(step / 1e9)


SLOW = {
    "accelerator": {"peak": {"bf16": "10TFLOP/s"}},
    "node": {"ranks": 2},
    "clusters": [{"name": "a", "nodes": 2, "nic": {"kind": "ethernet", "bandwidth": "1Mbit/s"}}],
}


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (("zero.stage=2",), "zero.partition.gradients=node"),
        (("zero.stage=3",), "zero.partition.weights=node zero.partition.gradients=node"),
        (("zero.stage=1",), None),
        (("zero.stage=3", "train.global_batch=4"), None),
        (("zero.stage=3", "zero.partition.weights=node", "zero.partition.gradients=node"), None),
    ],
    ids=str,
)
def test_gradients_that_cross_slow_links_often_are_told(
    keys: tuple[str, ...], parts: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("offload.optimizer=none", "offload.share=0", "train.global_batch=16", "train.microbatch=1")
    stated = {key.partition("=")[0]: key for key in (*base, *keys)}
    said = [one for one in shown(capsys, SLOW, *stated.values(), ranks=4)["advice"] if "the links of" in one]
    assert len(said) == (parts is not None)
    assert all(f"; {parts}, which takes more memory" in one for one in said)
