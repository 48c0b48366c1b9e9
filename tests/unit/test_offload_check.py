"""Folders that cannot hold offloaded states are refused before a process starts; the plan knows what they take."""

import errno
import shutil
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from llmtrain.comm.activity import Activity
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.tensors import parameter_count
from llmtrain.offload.optimizer_states import open_states
from llmtrain.offload.place import open_offload
from llmtrain.offload.weight_stores import FileWeights, HostWeights
from llmtrain.plan import direct_file
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.memory.offload_memory import OffloadMemory, offload_memory
from llmtrain.plan.offload import PARTS
from llmtrain.plan.per_rank.offloaded_weights import is_direct
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.per_rank.states import most_states
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.record import decisions
from llmtrain.plan.resolve.check import advice
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.offload_check import offload_problem, offload_remarks
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.plan.views.view import PlanView, view_recipe
from llmtrain.recipe.load import load_recipe, parse_recipe

RECIPE = """
model: {family: gpt2, layers: 2, hidden: 64, heads: 2, vocab: 512}
data: {path: set, sequence_length: 32}
"""


def planned(tmp_path: Path, *overrides: str, world: int = 2) -> Plan:
    (tmp_path / "r.yaml").write_text(RECIPE)
    return make_plan(load_recipe(str(tmp_path / "r.yaml"), overrides), Facts(world=world, device="cpu"))


def planned_on(tmp_path: Path, *overrides: str) -> Plan:
    """The plan on the cluster that the recipe describes."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = load_recipe(str(tmp_path / "r.yaml"), overrides)
    return make_plan(recipe, named_facts(recipe, Facts(world=2, device="cpu")))


def nvme(*paths: Path | str) -> tuple[str, str]:
    return "offload.optimizer=nvme", f"offload.paths=[{','.join(map(str, paths))}]"


def problem(tmp_path: Path, *paths: Path | str) -> str:
    found = offload_problem(planned(tmp_path, *nvme(*paths)), 2)
    assert found is not None
    return found


def test_a_good_folder(tmp_path: Path) -> None:
    assert offload_problem(planned(tmp_path, *nvme(tmp_path)), 2) is None
    assert offload_problem(planned(tmp_path), 2) is None
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_bad_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nowhere, which is no folder on this machine" in problem(tmp_path, tmp_path / "nowhere")
    assert "r.yaml, which is no folder" in problem(tmp_path, tmp_path / "r.yaml")
    assert "/dev/shm, which is on a tmpfs, in memory" in problem(tmp_path, "/dev/shm")
    (tmp_path / "b").mkdir()
    assert "which are on one volume; leave one of them out" in problem(tmp_path, tmp_path, tmp_path / "b")
    with monkeypatch.context() as changed:
        changed.setattr("os.access", lambda path, mode: False)
        assert "may not be written to" in problem(tmp_path, tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    assert "where 1000 B are free, and the offload of 2 ranks takes" in problem(tmp_path, tmp_path)


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may open a file and then refuse what a run does with it."""

    def refuse(file: int, memory: object, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("os.pwritev", refuse)
    said = f"{tmp_path}, where a file has no direct reads and writes (O_DIRECT): Invalid argument; set offload.paths"
    assert said in problem(tmp_path, tmp_path)
    assert offload_remarks(planned(tmp_path, *nvme(tmp_path))) == []
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_offload_into_the_same_memory(tmp_path: Path) -> None:
    plan = planned(tmp_path, "offload.optimizer=host", "offload.gradients=none")
    assert offload_remarks(plan) == [
        "offload to host saves no memory on CPUs, which compute in the host's memory (offload.optimizer)"
    ]
    assert offload_remarks(replace(plan, device="cuda")) == []


def test_a_file_system_that_reserves_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, *nvme(tmp_path))
    assert offload_remarks(plan) == []
    monkeypatch.setattr(direct_file, "fallocate", lambda file, nbytes: errno.EOPNOTSUPP)
    assert offload_problem(plan, 2) is None
    (said,) = offload_remarks(plan)
    assert said.startswith(f"offload.paths has {tmp_path}, whose file system cannot reserve space (fallocate)")
    assert offload_remarks(planned(tmp_path)) == []


def test_checkpoints_on_the_volume_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save would find it full. A run that has a folder has checkpoints already, most likely."""
    plan = planned(tmp_path, *nvme(tmp_path), f"logging.dir={tmp_path}/runs", "checkpoint.keep=2")
    files, size = offload_memory(plan, 0).files, 3 * 12 * parameter_count(plan.model)
    for more, warned in ((0, True), (size - 1, True), (size, False)):
        usage = SimpleNamespace(free=plan.grid.world * files + more)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        found = offload_remarks(plan)
        assert len(found) == warned
        assert all("and 3 checkpoints take" in one for one in found)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    Path(plan.logging.dir, plan.name).mkdir(parents=True)
    assert offload_remarks(plan) == []


def test_a_faster_volume_takes_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two volumes, one 3 times as fast: it needs 3 quarters of the room, and the other one quarter."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    for path in (fast, slow):
        path.mkdir()
    volumes = f"[{{path: {fast}, bandwidth: 3GB/s}}, {{path: {slow}, bandwidth: 1GB/s}}]"
    plan = planned_on(tmp_path, *nvme(fast, slow), f"cluster={{node: {{ranks: 2, nvme: {volumes}}}}}")
    files = 2 * offload_memory(plan, 0).files
    usage = namedtuple("usage", "total used free")
    # Both are on one file system here.
    monkeypatch.setattr("llmtrain.plan.resolve.offload_check._shared", lambda key, paths: [])
    for room, full in (
        ({fast: 0.76, slow: 0.26}, None),
        ({fast: 0.74, slow: 0.26}, fast),
        ({fast: 0.76, slow: 0.24}, slow),
    ):
        free = {path: int(files * share) for path, share in room.items()}
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(files, 0, free[path]))
        found = offload_problem(plan, 2)
        assert found is None if full is None else f"offload.paths has {full}, where" in str(found)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("offload.optimizer=nvme",), "neither offload.paths nor the cluster file's node.nvme names a folder"),
        (("offload.paths=[/scratch]",), "paths is given, but nothing rests in files"),
        ((*nvme("/scratch"), "offload.share=-0.1"), "offload.share is -0.1"),
        ((*nvme("/scratch"), "offload.share=1.01"), "offload.share is 1.01"),
        ((*nvme("/scratch"), "offload.bucket=1023"), "offload.bucket is 1023"),
        (("offload.optimizer=disk",), "offload.optimizer is disk; expected one of none, host, nvme"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_bad_keys(keys: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        planned(tmp_path, *keys)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("keys", [(), ("zero.stage=3", "quantize.weights=int8"), ("zero.stage=3",)])
def test_planned_memory_is_what_weights_and_gradients_take(compute: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    keys = (*keys, f"precision.compute={compute}", "offload.bucket=2048")
    paths = f"offload.paths=[{tmp_path}]"
    for tier in ("host", "nvme"):
        given = (f"offload.parameters={tier}", *((paths,) if tier == "nvme" else ()))
        plan = planned(tmp_path, *given, *keys)
        expected = offload_memory(plan, 0)
        ranks = cast(Ranks, SimpleNamespace(rank=0, device=torch.device("cpu"), activity=Activity()))
        outside = open_offload(plan, ranks, Programs(ProgramSpec.of(plan, 0)))
        assert outside.weights is not None
        assert outside.gradients is not None
        taken = cast(HostWeights | FileWeights, outside.weights.store).nbytes + outside.gradients.nbytes
        # Each buffer of a page more begins at a page: the ring, and those of weights that are not whole pages.
        pages = 0 if tier == "host" else 4096 * (1 if is_direct(plan, 0) else 3)
        assert taken == expected.weights + expected.gradients + expected.buffers - pages
        outside.close()


def test_the_watchdog_sees_optimizer_steps(tmp_path: Path) -> None:
    """Those of all buckets may last longer than its patience."""
    plan, activity = planned(tmp_path, "offload.optimizer=host"), Activity()
    ranks = cast(Ranks, SimpleNamespace(rank=0, device=torch.device("cpu"), activity=activity))
    outside = open_offload(plan, ranks, Programs(ProgramSpec.of(plan, 0)))
    assert outside.states is not None
    activity.moved = 0.0
    outside.states.stepper.moving()
    assert activity.moved > 0
    outside.close()


@pytest.mark.parametrize(("compute", "gradients"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "compute")])
@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("bucket", ["auto", 2048])
@pytest.mark.parametrize(("spare", "where"), [(0, "host"), (0.4, "host"), (0, "device"), (1, "device")])
def test_planned_memory_is_what_a_tier_takes(
    compute: str, gradients: str, share: float, bucket: str | int, spare: float, where: str, tmp_path: Path
) -> None:
    sizes = (f"offload.share={share}", f"offload.bucket={bucket}", f"offload.spare={spare}", f"offload.step={where}")
    keys = (f"precision.compute={compute}", f"precision.gradients={gradients}", "zero.stage=1", *sizes)
    for plan in (planned(tmp_path, *nvme(tmp_path), *keys), planned(tmp_path, "offload.optimizer=host", *keys)):
        expected = offload_memory(plan, 0)
        offload, buckets = plan.sharding.offload, rank_buckets(plan, 0)
        states = open_states(offload, buckets, torch.device("cpu"), DTYPES[plan.compute], DTYPES[plan.gradients])
        assert states is not None
        pages = 2 * 4096 if offload.tier == "nvme" else 0
        assert states.nbytes == expected.host + expected.spare + expected.buffers - pages
        assert states.device_nbytes == expected.slots + expected.ahead
        states.close()
        without = most_states(planned(tmp_path, "zero.stage=1", f"precision.compute={compute}")).optimizer
        left = without - most_states(plan).optimizer
        ahead = [one for one in buckets if one.spare]
        rest = expected.host or expected.files - sum(one.nbytes for one in ahead)
        assert left <= rest <= left + 3 * 4096 * len(rank_buckets(plan, 0))
        elements = sum(one.numel for one in buckets)
        assert 0 <= spare * elements - sum(one.numel for one in ahead) <= max(one.numel for one in buckets)


def test_volumes_of_the_cluster_file(tmp_path: Path) -> None:
    """Folders come from the description, and bytes are shared out by its bandwidths."""
    fast, slow = "{path: /fast, bandwidth: 6GB/s}", "{path: /slow, bandwidth: 2GB/s}"
    keys = (f"cluster={{node: {{ranks: 2, nvme: [{fast}, {slow}]}}}}", "offload.optimizer=nvme")
    offload = planned_on(tmp_path, *keys).sharding.offload
    assert (offload.paths, offload.bandwidths) == (("/fast", "/slow"), (6e9, 2e9))
    offload = planned_on(tmp_path, *keys, "offload.paths=[/slow, /other]").sharding.offload
    assert (offload.paths, offload.bandwidths) == (("/slow", "/other"), (1.0, 1.0))


def test_states_outside_are_planned(tmp_path: Path) -> None:
    """On a GPU, what is offloaded is in the host's or in files, and the host's buffers are counted."""
    keys = ("precision.compute=bf16", "zero.stage=0")

    def on_gpus(*overrides: str) -> Plan:
        return replace(planned(tmp_path, *keys, *overrides), device="cuda")

    (beside,) = memory_budget(on_gpus()).rows
    (host,) = memory_budget(on_gpus("offload.optimizer=host")).rows
    plan = on_gpus(*nvme("/scratch"))
    (files,) = memory_budget(plan).rows
    assert host.device["optimizer"] == files.device["optimizer"] == 0
    # Each of two ranks copies half of the states for checkpoints.
    assert held(beside.host) == {"checkpoint_copies": 12 * beside.role.parameters // 2}
    # In the foreground, it reads them block by block.
    (foreground,) = memory_budget(on_gpus("checkpoint.async=false")).rows
    largest = max(tensor.numel for unit in beside.role.units for tensor in unit.tensors)
    assert held(foreground.host) == {"checkpoint_buffers": 4 * largest}
    # A checkpoint reads offloaded states while it is written, and copies none.
    # A bucket's fp32 gradient and bf16 weight for each of four threads; for the one thread of files.
    slot = max(bucket.end for bucket in rank_buckets(plan, 0)) * 6
    # A block of a checkpoint is at most a tensor; on its way from files, at most itself again, and three pages for each
    # part of a bucket.
    block = 4 * max(tensor.numel for unit in host.role.units for tensor in unit.tensors)
    assert held(host.host) == {
        "host_states": beside.device["optimizer"], "offload_buffers": 4 * slot, "checkpoint_buffers": block
    }  # fmt: skip
    assert offload_memory(plan, 0).buffers - offload_memory(replace(plan, device="cpu"), 0).buffers == slot
    assert held(files.host) == {
        "offload_buffers": offload_memory(plan, 0).buffers, "checkpoint_buffers": 2 * block + PARTS * 3 * 4096
    }  # fmt: skip
    assert (host.files, files.files) == (0, offload_memory(plan, 0).files)
    assert files.files >= beside.device["optimizer"]
    # A CPU's own memory is the host's.
    (row,) = memory_budget(planned(tmp_path, *keys, "offload.optimizer=host")).rows
    assert (row.host, row.device["host_states"]) == ({}, beside.device["optimizer"])
    assert row.device["checkpoint_copies"] == 0
    (row,) = memory_budget(planned(tmp_path, *keys, "checkpoint.async=false")).rows
    assert row.device["checkpoint_copies"] == 0


def held(memory: Mapping[str, int]) -> dict[str, int]:
    """Return what takes memory beside the process."""
    assert memory["process"] > 10**9
    return {name: count for name, count in memory.items() if count and name != "process"}


def test_host_memory_is_a_budget(tmp_path: Path) -> None:
    """A rank's share holds the states, or the plan is refused; following the advice, it fits."""
    planned(tmp_path)

    def view(bytes_of_a_rank: int, *keys: str) -> PlanView:
        host = f"host: {{memory: {2 * bytes_of_a_rank}B}}, nvme: [{{path: /scratch}}]"
        cluster = f"cluster={{accelerator: {{name: A100-80GB, memory: 80GB}}, node: {{ranks: 2, {host}}}}}"
        fixed = ("precision.compute=fp32", "offload.share=1", "offload.overlap=1", "offload.spare=0")
        return view_recipe(str(tmp_path / "r.yaml"), [cluster, *fixed, *keys], 2)

    states = view(10**9, "offload.optimizer=host").budget.host
    assert view(states, "offload.optimizer=host").problem is None
    assert (refused := view(states - 1, "offload.optimizer=host").problem) is not None
    assert "1 B more than its share of cluster.node.host.memory" in refused
    # The buffers of states in files are larger than these few states.
    assert "set offload.share=0.9, which needs" in refused
    assert view(states - 1, "offload.optimizer=host", "offload.share=0.9").problem is None
    assert view(2 * 10**9, "offload.optimizer=nvme").problem is None


def test_the_ranks_of_a_run_share_a_node(tmp_path: Path) -> None:
    """One rank on a node of 8 may have all of its memory."""
    planned(tmp_path)

    def problem(memory: int) -> str | None:
        cluster = f"cluster={{accelerator: {{name: A100-80GB}}, node: {{ranks: 8, host: {{memory: {memory}B}}}}}}"
        return view_recipe(str(tmp_path / "r.yaml"), [cluster, "train.microbatch=1"], 1).problem

    assert problem(2 * 10**9) is None
    assert "its share of cluster.node.host.memory (1000000000B for 1 rank)" in (problem(10**9) or "")


def test_ranks_on_cpus_take_the_memory_of_their_host(tmp_path: Path) -> None:
    planned(tmp_path)

    def view(memory: int) -> PlanView:
        cluster = f"cluster={{node: {{ranks: 2, host: {{memory: {memory}B}}}}}}"
        return view_recipe(str(tmp_path / "r.yaml"), [cluster, "train.microbatch=1"], 2)

    (row,) = view(10**12).budget.rows
    assert view(2 * row.total).problem is None
    assert "1 B more than its share of cluster.node.host.memory" in (view(2 * row.total - 1).problem or "")


@pytest.mark.parametrize("device", ["A100-80GB", None])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_the_least_share_that_fits_leaves(tier: str, device: str | None, tmp_path: Path) -> None:
    """Shares are multiples of 1/64; the next smaller one does not fit. device: a GPU, or a CPU, on which states in the
    host's memory save nothing."""
    (tmp_path / "r.yaml").write_text(RECIPE)

    def view(memory: int, share: float | str) -> PlanView:
        name = "" if device is None else f"name: {device}, "
        cluster = f"cluster={{accelerator: {{{name}memory: {memory}B}}, node: {{ranks: 2, nvme: [{{path: /s}}]}}}}"
        fixed = ("precision.compute=bf16", "train.microbatch=4")
        keys = (cluster, *fixed, f"offload.optimizer={tier}", f"offload.share={share}")
        return view_recipe(str(tmp_path / "r.yaml"), keys, 2)

    def total(share: float) -> int:
        return view(10**12, share).budget.fullest.total

    assert view(10**12, "auto").plan.sharding.offload.share == 0
    half = view(total(0.5), "auto")
    if total(1) < total(0.5):
        assert half.problem is None
        assert half.plan.sharding.offload.share == half.plan.record["offload"]["share"] == 0.5
        assert "offload.share: auto -> 0.5" in half.auto
        assert view(total(0.5) - 1, "auto").plan.sharding.offload.share > 0.5
    assert view(total(1) - 1, "auto").plan.sharding.offload.share == 1
    assert view(total(1) - 1, "auto").problem is not None


def test_nothing_is_decided_where_nothing_leaves(tmp_path: Path) -> None:
    cluster = "cluster={accelerator: {name: A100-80GB, memory: 80GB}, node: {ranks: 2}}"
    plan = planned_on(tmp_path, cluster)
    assert plan.record["offload"]["share"] == 0
    for given in (load_recipe(str(tmp_path / "r.yaml"), [cluster]), parse_recipe(dict(plan.record))):
        assert advice(given, plan) == []
        assert [line for line in decisions(given, plan.record) if line.startswith("offload")] == []


def test_all_leave_where_no_memory_is_stated(tmp_path: Path) -> None:
    assert planned(tmp_path, "offload.optimizer=host").sharding.offload.share == 1


def test_offload_is_advised(tmp_path: Path) -> None:
    """One card without room for the states: no other key helps."""
    (tmp_path / "r.yaml").write_text(RECIPE.replace("hidden: 64", "hidden: 8192").replace("heads: 2", "heads: 64"))
    host = "host: {memory: 1TB}"
    cluster = f"cluster={{accelerator: {{name: H100-80GB, memory: 24GB}}, node: {{ranks: 1, {host}}}}}"
    recipe = str(tmp_path / "r.yaml")
    refused = view_recipe(recipe, [cluster, "train.microbatch=1"], 1).problem
    assert refused is not None
    assert "set offload.optimizer=host, which needs" in refused
    assert view_recipe(recipe, [cluster, "train.microbatch=1", "offload.optimizer=host"], 1).problem is None


def test_nothing_is_offloaded_without_the_key(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert rank_buckets(plan, 0) == []
    assert offload_memory(replace(plan, device="cuda"), 0) == OffloadMemory()


def test_a_plans_record_makes_the_same_plan(tmp_path: Path) -> None:
    plan = planned(tmp_path, *nvme(tmp_path), "offload.share=0.5")
    decided = {"optimizer": "nvme", "share": 0.5, "spare": 0.0, "paths": [str(tmp_path)], "overlap": 3}
    assert plan.record["offload"].items() >= decided.items()
