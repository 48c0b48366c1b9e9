"""A run that does not fit the stated memory: what the sentence advises, and that the advice, followed, fits."""

import re
from pathlib import Path

import pytest
from llmtrain.cluster.load import given_cluster
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.changes import changes, file_changes
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain_data import units

from tests.unit.test_plan_budget import EIGHT, RECIPE, cluster, made, planned


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


LARGE = ("model.hidden=4096", "model.layers=16", "model.ffn=16384")
LONG = ("data.sequence_length=4096", "model.positions=4096")
TENSOR = ("parallel.tensor=8", "train.microbatch=2")
STAGES = ("parallel.pipeline=8", "train.microbatch=1", *LONG)
CHUNKS = (*STAGES, "model.layers=32", "pipeline.schedule=interleaved", "activation_checkpointing=full")
ZERO_AND_FULL = ("zero.stage=3", "activation_checkpointing=full")
FULL_AND_ONE = ("activation_checkpointing=full", "train.microbatch=1")
OFFLOAD = "offload.optimizer=host"
ZERO_STATES = ("optimizer", "gradients", "weights")
HALVED = (*LARGE, "zero.partition={weights: 2, gradients: 2, optimizer: 2}")
LEAST = (*LARGE, "zero.stage=3", *FULL_AND_ONE)


@pytest.mark.parametrize(
    ("keys", "enough", "advice"),
    [
        ((EIGHT,), ("zero.stage=1",), "zero.stage=1"),
        ((EIGHT,), ("zero.stage=2",), "zero.stage=2"),
        ((EIGHT,), ("zero.stage=3",), "zero.stage=3"),
        ((EIGHT, "zero.stage=1"), ("zero.stage=2",), "zero.stage=2"),
        (HALVED, ("zero.partition={weights: 2, gradients: 2, optimizer: 4}",), "zero.partition.optimizer=4"),
        (
            HALVED,
            ("zero.partition={weights: 8, gradients: 8, optimizer: 8}",),
            " ".join(f"zero.partition.{one}=all" for one in ZERO_STATES),
        ),
        (LEAST, ("parallel.tensor=2",), "parallel.tensor=2"),
        ((*LEAST, "model.heads=1"), ("parallel.pipeline=2",), "parallel.pipeline=2"),
        ((*LEAST, "parallel.data=8"), ("parallel.tensor=4", "parallel.data=2"), "parallel.tensor=4 parallel.data=2"),
        ((*LARGE, *LONG, *TENSOR), ("parallel.sequence=true",), "parallel.sequence=true"),
        ((*STAGES, "pipeline.schedule=gpipe"), ("pipeline.schedule=1f1b",), "pipeline.schedule=1f1b"),
        ((*CHUNKS, "pipeline.chunks=4"), ("pipeline.chunks=2",), "pipeline.chunks=2"),
        (
            (*CHUNKS, "pipeline.chunks=2"),
            ("pipeline.schedule=1f1b", "pipeline.chunks=auto"),
            "pipeline.schedule=1f1b pipeline.chunks=auto",
        ),
        ((*LONG, *LARGE, EIGHT), ZERO_AND_FULL, " ".join(ZERO_AND_FULL)),
        ((*LONG, *LARGE, EIGHT, "zero.stage=3"), FULL_AND_ONE, " ".join(FULL_AND_ONE)),
        (
            (*LARGE, "train.microbatch=1", "activation_checkpointing=full"),
            ("zero.stage=3", "offload.optimizer=host", "offload.share=1"),
            "zero.stage=3 offload.optimizer=host",
        ),
        ((*LARGE, OFFLOAD, "offload.share=0.5"), ("offload.share=1",), "offload.share=auto"),
        ((*LARGE, OFFLOAD, "offload.share=0"), ("offload.share=0.25",), "offload.share=auto"),
    ],
    ids=str,
)
def test_the_advice_followed_fits(
    keys: tuple[str, ...], enough: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With as much memory as a change needs, the advice is that change, and it fits."""
    alone = {key.split("=")[0]: key for key in (*keys, *enough)}
    memory = cluster(made(*alone.values(), cluster(None))[1].fullest.total)
    code, _, error = planned(capsys, *keys, memory, "--ranks", "8")
    assert code == 2
    advised = re.search(r"; set (.*), which needs (.*) \(--force", error)
    assert advised, error
    assert advised[1] == advice
    # Memory of the host is named where states leave for it.
    assert ("of the host's memory" in advised[2]) is ("offload." in advice)
    followed = {key.split("=")[0]: key for key in (*keys, *advised[1].split())}
    code, found, error = planned(capsys, *followed.values(), memory, "--ranks", "8")
    assert (code, error, found["memory"]["excess"]) == (0, "", 0)


def test_no_advice_that_does_not_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = planned(capsys, cluster(1000), "--ranks", "8")
    assert code == 2
    assert "; no change of zero.stage, " in error
    assert " set " not in error
    # What a rank takes whatever it holds is more than that.
    assert "makes it fit, so take a smaller model (--force" in error


@pytest.mark.parametrize("stated", [(), ("zero.stage=3",), ("zero.stage=3", "parallel.data=8")], ids=" ".join)
def test_more_ranks_where_they_help(stated: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """With the memory that 16 ranks need, a host without room for states, and too few layers for a long pipeline."""
    whole = ("train.microbatch=1", "activation_checkpointing=full", "checkpoint.async=false")
    keys = (*LARGE, "model.layers=7", "model.heads=1", *whole)
    _, budget = made(*keys, "zero.stage=3", cluster(None), ranks=16)
    memory = (cluster(budget.fullest.total), f"cluster.node.host.memory={8 * budget.host}B")
    code, _, error = planned(capsys, *keys, *stated, *memory, "--ranks", "8")
    assert code == 2
    advised = re.search(r"so take (\d+) ranks(?: with (.*))?, or a smaller model \(--force", error)
    assert advised, error
    assert advised[1] == "16"
    followed = {key.split("=")[0]: key for key in (*keys, *stated, *(advised[2] or "").split())}
    assert planned(capsys, *followed.values(), *memory, "--ranks", "16")[0] == 0


def test_no_more_ranks_than_the_cluster_has(capsys: pytest.CaptureFixture[str]) -> None:
    keys = (*LARGE, "zero.stage=3", "cluster.clusters=[{name: a, nodes: 1}]", "cluster.node.host.memory=16GB")
    _, _, error = planned(capsys, cluster(5 * 10**9), *keys, "--ranks", "8")
    assert "so take a smaller model (--force" in error


def test_tensor_parallelism_stays_in_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU per machine, each with the memory that a layer over eight of them would need."""
    keys = (*LARGE, "train.microbatch=1", "activation_checkpointing=full", "checkpoint.async=false")
    _, budget = made(*keys, "parallel.tensor=8", cluster(None))
    for ranks, said in ((8, True), (1, False)):
        memory = (cluster(budget.fullest.total, ranks=ranks), f"cluster.node.host.memory={ranks * budget.host}B")
        _, _, error = planned(capsys, *keys, *memory, "--ranks", "1")
        assert ("8 ranks with parallel.tensor=8" in error) is said


def test_a_host_without_room_for_the_processes(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, error = planned(capsys, cluster(10**12), "cluster.node.host.memory=13GiB", "--ranks", "8")
    fixed = "each rank's process takes 1.66 GiB of its host's memory, whatever the run is"
    assert f"; {fixed}, so take nodes with more of it, or fewer ranks of each (--force" in error


@pytest.mark.parametrize("stated", [False, True])
def test_the_host_s_memory_that_an_offload_needs(stated: bool, capsys: pytest.CaptureFixture[str]) -> None:
    keys = (*LARGE, "zero.stage=3", "train.microbatch=1", "activation_checkpointing=full")
    _, budget = made(*keys, OFFLOAD, "offload.share=1", cluster(None))
    host = ["cluster.node.host.memory=2TB"] if stated else []
    _, _, error = planned(capsys, *keys, cluster(budget.fullest.total), *host, "--ranks", "8")
    needed = "" if stated else f", and {units.size(8 * budget.host)} of the host's memory of a node"
    assert f"; set {OFFLOAD}, which needs {units.size(budget.fullest.total)}{needed} (--force" in error


@pytest.mark.parametrize("given", ["offload.optimizer=none", OFFLOAD])
def test_files_where_no_volume_is_named(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The hosts have no room for states. The advice, followed, fits."""
    keys = (*LARGE, "zero.stage=3", "train.microbatch=1", "activation_checkpointing=full", "model.heads=1", given)
    files = ("offload.optimizer=nvme", "offload.parameters=nvme", "offload.paths=[.]", "offload.spare=0")
    _, budget = made(*keys[:-1], *files, cluster(None), "checkpoint.async=false")
    memory = (cluster(budget.fullest.total), f"cluster.node.host.memory={8 * budget.host}B")
    code, _, error = planned(capsys, *keys, *memory, "--ranks", "8")
    assert code == 2
    assert "makes it fit without files, so set " in error
    advised = re.search(r"so set (.*) with the folder of an NVMe volume in place of \., which needs (.*?), or ", error)
    assert advised, error
    assert "offload.paths=[.]" in advised[1].split()
    followed = {key.split("=")[0]: key for key in (*keys, *advised[1].split())}
    code, found, error = planned(capsys, *followed.values(), *memory, "--ranks", "8")
    assert (code, error, found["memory"]["excess"]) == (0, "", 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            (),
            [
                "offload.optimizer=host",
                "offload.optimizer=nvme",
                "offload.optimizer=host offload.parameters=host",
                "offload.optimizer=nvme offload.parameters=host",
                "offload.optimizer=nvme offload.parameters=nvme",
            ],
        ),
        (
            (OFFLOAD,),
            [
                "offload.parameters=host",
                "offload.optimizer=nvme offload.parameters=host",
                "offload.optimizer=nvme offload.parameters=nvme",
            ],
        ),
        (("offload.optimizer=nvme",), ["offload.parameters=host", "offload.parameters=nvme"]),
    ],
    ids=str,
)
def test_optimizer_states_go_to_files_before_weights(given: tuple[str, ...], expected: list[str]) -> None:
    keys = ("train.microbatch=1", "activation_checkpointing=full", "cluster.node.nvme=[{path: /scratch}]", *given)
    recipe = load_recipe("tiny.yaml", [cluster(None, ranks=1), *keys])
    plan = make_plan(recipe, Facts(world=1, device="cuda", cluster=given_cluster(recipe.cluster)))
    found = [" ".join(change.keys) for change in changes(recipe, plan)]
    assert [keys for keys in found if "offload.activations" not in keys] == expected


def test_files_for_optimizer_states_alone_where_no_volume_is_named() -> None:
    keys = ("train.microbatch=1", "activation_checkpointing=full", "offload.optimizer=host", "offload.parameters=host")
    recipe = load_recipe("tiny.yaml", [cluster(None, ranks=1), *keys])
    plan = make_plan(recipe, Facts(world=1, device="cuda", cluster=given_cluster(recipe.cluster)))
    first, second, *_ = file_changes(recipe, plan)
    assert first.keys == ("offload.optimizer=nvme", "offload.paths=[.]")
    assert second.keys == ("offload.optimizer=nvme", "offload.parameters=nvme", "offload.paths=[.]")


def test_degrees_of_a_node_before_long_pipelines() -> None:
    """A tensor-parallel degree that divides a node, short pipelines, both, and then longer pipelines."""
    keys = ("train.microbatch=1", "train.global_batch=96", "activation_checkpointing=full", "model.layers=24")
    recipe = load_recipe("tiny.yaml", [cluster(None, ranks=8), *keys, "zero.stage=3", "parallel.data=48"])
    plan = make_plan(recipe, Facts(world=48, device="cuda", ranks_per_node=8, cluster=given_cluster(recipe.cluster)))
    found = [" ".join(change.keys) for change in changes(recipe, plan)]
    both = [
        f"parallel.tensor=8 parallel.pipeline={pipeline} parallel.data={6 // pipeline} parallel.sequence=true"
        for pipeline in (2, 3, 6)
    ]
    assert found[: found.index("parallel.tensor=8 parallel.data=6 parallel.sequence=true")] == [
        *(f"parallel.tensor={tensor} parallel.data={48 // tensor}" for tensor in (2, 4, 8)),
        *(f"parallel.pipeline={pipeline} parallel.data={48 // pipeline}" for pipeline in (2, 3, 4, 6, 8)),
        *both,
        *(f"parallel.pipeline={pipeline} parallel.data={48 // pipeline}" for pipeline in (12, 16, 24)),
    ]


def test_changes_in_their_order() -> None:
    recipe = load_recipe("tiny.yaml", ["train.microbatch=4", cluster(None, ranks=4)])
    plan = make_plan(recipe, Facts(world=8, device="cpu", ranks_per_node=4))
    assert [" ".join(change.keys) for change in changes(recipe, plan)] == [
        "zero.stage=1",
        "zero.stage=2",
        "zero.stage=3",
        "activation_checkpointing=auto",
        "activation_checkpointing=full",
        "train.microbatch=2",
        "train.microbatch=1",
        "parallel.tensor=2",
        "parallel.tensor=4",
        "parallel.tensor=8",
        "parallel.pipeline=2",
        "parallel.pipeline=4",
        "parallel.pipeline=8",
        "zero.stage=1 activation_checkpointing=full",
        "zero.stage=2 activation_checkpointing=full",
        "zero.stage=3 activation_checkpointing=full",
        "zero.stage=1 train.microbatch=1",
        "zero.stage=2 train.microbatch=1",
        "zero.stage=3 train.microbatch=1",
        "activation_checkpointing=full train.microbatch=1",
        "zero.stage=3 activation_checkpointing=full train.microbatch=1",
        "parallel.tensor=8 parallel.sequence=true",
        "zero.stage=3 activation_checkpointing=full train.microbatch=1 parallel.tensor=8 parallel.sequence=true",
        "zero.stage=1 offload.optimizer=host",
        "zero.stage=2 offload.optimizer=host",
        "zero.stage=3 offload.optimizer=host",
        "zero.stage=3 offload.optimizer=host offload.parameters=host",
        "offload.optimizer=host",
        "offload.optimizer=host offload.parameters=host",
        "zero.stage=3 offload.optimizer=host activation_checkpointing=full",
        "zero.stage=3 offload.optimizer=host train.microbatch=1",
        "zero.stage=3 offload.optimizer=host activation_checkpointing=full train.microbatch=1",
        "zero.stage=3 offload.optimizer=host offload.parameters=host activation_checkpointing=full",
        "zero.stage=3 offload.optimizer=host offload.parameters=host train.microbatch=1",
        "zero.stage=3 offload.optimizer=host offload.parameters=host activation_checkpointing=full train.microbatch=1",
    ]
