"""Where a rank runs, and with how many threads it steps offloaded states."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmtrain.cluster.control_groups import Quota
from llmtrain.cluster.description import Accelerator, Cluster, Node
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.cores import Bound
from llmtrain.comm.device import gpus
from llmtrain.comm.environment import Launched
from llmtrain.comm.ranks import Ranks, connect
from llmtrain.comm.threads import even_cores
from llmtrain.errors import RunFailedError
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.start.run import open_choices
from llmtrain.training import rank

from tests.tiny import curve, write_corpus

CPU, GPU = (cast(Plan, SimpleNamespace(device=device)) for device in ("cpu", "cuda"))
BOUND = Bound(1, 4)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with 8 cores, and a rank that is one of two. asked: what was asked for."""
    machine = SimpleNamespace(stated=None, asked=[], chosen=False, quota=Quota())

    def bind(*arguments: Any) -> Bound:
        machine.asked.append(arguments)
        return BOUND

    monkeypatch.setattr(rank, "gpus", lambda: [SimpleNamespace(address="0000:10:00.0")])
    monkeypatch.setattr(rank, "bind_to_socket", bind)
    monkeypatch.setattr(rank, "step_threads", lambda plan: machine.stated)
    monkeypatch.setattr(rank, "set_by_user", lambda: machine.chosen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for module in ("comm.threads", "cluster.control_groups"):
        monkeypatch.setattr(f"llmtrain.{module}.cpu_quota", lambda: machine.quota)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return machine


def share(sharing: int) -> int:
    """A rank's share of the cores; as many ranks may use them, and there is one more of another machine."""
    return even_cores(lambda own: [own] * sharing + [[0, 0]])


def test_a_rank_is_bound_where_its_gpu_is(machine: SimpleNamespace) -> None:
    assert rank._bound(Launched("torchrun", 1, 1, 2, 2, {})) == BOUND
    assert rank._bound(None) == BOUND
    assert machine.asked == [((1, 2), ["0000:10:00.0"]), ((0, 1), ["0000:10:00.0"])]


def test_a_rank_without_a_number_on_its_machine_is_not_bound(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK")
    assert rank._bound(Launched("torchrun", 0, 0, 2, 2, {})) is None
    assert machine.asked == []


@pytest.mark.parametrize(("bound", "threads"), [(BOUND, 4), (Bound(1, 9), 6), (None, 6)])
def test_a_rank_on_cpus_takes_its_share_of_a_socket(
    bound: Bound | None, threads: int, machine: SimpleNamespace
) -> None:
    """Stated cores do not change what a CPU computes with."""
    machine.stated = 2
    assert rank._take_threads(CPU, share(4), bound) == torch.get_num_threads() == threads


@pytest.mark.parametrize(("chosen", "threads"), [(False, 3), (True, 6)])
def test_a_quota_bounds_the_threads_on_cpus(chosen: bool, threads: int, machine: SimpleNamespace) -> None:
    """Those that the user has set stay."""
    machine.quota, machine.chosen = Quota(3.5, 7), chosen
    assert rank._take_threads(CPU, share(1), None) == torch.get_num_threads() == threads


@pytest.mark.parametrize(("default", "sharing", "threads"), [(1, 1, 8), (1, 2, 4), (1, 3, 2), (1, 9, 1), (6, 2, 4)])
def test_a_rank_on_a_gpu_takes_its_share_of_the_cores_in_place_of_a_launchers_default(
    default: int, sharing: int, threads: int, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's default is one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(default))
    torch.set_num_threads(default)
    assert rank._take_threads(GPU, share(sharing), None) == torch.get_num_threads() == threads


@pytest.mark.parametrize(("sharing", "threads"), [(1, 6), (2, 4)])
def test_a_rank_on_a_gpu_takes_at_most_its_share_where_no_launcher_sets_threads(
    sharing: int, threads: int, machine: SimpleNamespace
) -> None:
    assert rank._take_threads(GPU, share(sharing), BOUND) == torch.get_num_threads() == threads


@pytest.mark.parametrize("stated", [None, 2])
def test_threads_that_the_user_has_set_stay_on_a_gpu(
    stated: int | None, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.chosen, machine.stated = True, stated
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert rank._take_threads(GPU, share(4), BOUND) == torch.get_num_threads() == 6


@pytest.mark.parametrize(("stated", "threads"), [(2, 2), (4, 4), (7, 4), (100, 4)])
def test_stated_cores_set_the_threads_on_a_gpu(stated: int, threads: int, machine: SimpleNamespace) -> None:
    """At most as many as the rank's share of the cores that it may use: the description may be of a whole machine."""
    machine.stated = stated
    assert rank._take_threads(GPU, share(2), None) == torch.get_num_threads() == threads


def offloads(device: str = "cuda", part: float = 1.0, on_device: bool = False) -> Plan:
    """A plan of which a part of the optimizer states leaves the device."""
    sharding = SimpleNamespace(offload=SimpleNamespace(share=part, on_device=on_device))
    return cast(Plan, SimpleNamespace(device=device, sharding=sharding))


@pytest.mark.parametrize(
    ("plan", "threads", "stated", "could"),
    [
        (offloads(), 1, None, 4),
        (offloads(), 2, None, 4),
        (offloads(), 3, None, None),
        # The description lets the rank take fewer.
        (offloads(), 1, 2, 2),
        (offloads(), 2, 2, None),
        (offloads(part=0.0), 1, None, None),
        (offloads(on_device=True), 1, None, None),
        (offloads("cpu"), 1, None, None),
    ],
)
def test_few_threads_of_the_user_are_told_where_they_step_states(
    plan: Plan, threads: int, stated: int | None, could: int | None, machine: SimpleNamespace
) -> None:
    machine.stated, machine.chosen = stated, True
    said = f"OMP_NUM_THREADS is {threads}, and a rank could step offloaded states with {could} threads; unset it "
    found = rank._few_threads(plan, share(2), threads)
    assert [sentence.startswith(said) for sentence in found] == ([] if could is None else [True])
    machine.chosen = False
    assert rank._few_threads(plan, share(2), threads) == []


TINY = "model: {layers: 2, hidden: 32, heads: 4, vocab: 64}\ndata: {path: set, sequence_length: 16}\n"


@pytest.mark.parametrize(
    ("keys", "kernel", "layers", "said"),
    [
        ([], "cudnn", (1, 3), ["speeds", "kernels"]),
        (["train.attention=flash-attn-2"], "flash-attn-2", (1, 3), ["speeds"]),
        (["pipeline.split=uniform"], "cudnn", (2, 2), ["kernels"]),
        (["pipeline.split=uniform", "train.attention=torch"], "torch", (2, 2), []),
    ],
)
def test_what_ranks_measure_makes_a_new_plan(
    keys: list[str],
    kernel: str,
    layers: tuple[int, ...],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record says what was measured, and what the recipe says is not measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank, "measure", lambda plan, ranks: ((0.5, 1.0), "speeds"))
    monkeypatch.setattr(rank, "quickest", lambda plan, ranks: ("cudnn", ["kernels"]))
    write_corpus(Path("set"), 100)
    Path("tiny.yaml").write_text(TINY)
    keys = ["model.family=gpt2", "model.layers=4", "parallel.pipeline=2", "train.global_batch=8", *keys]
    recipe, facts = load_recipe("tiny.yaml", keys), Facts(world=2, device="cuda", ranks_per_node=1)
    plan = check_and_plan(recipe, facts)
    made, sentences = rank.as_measured(open_choices(recipe), plan, facts, cast(Ranks, None))
    assert sentences == said
    assert (made.training.attention, made.pipeline.layers) == (kernel, layers)
    assert (made.record["train"]["attention"], made.record["pipeline"]["split"]) == (kernel, list(layers))
    assert (made is plan) is (said == [])


@pytest.mark.parametrize(("short", "layers"), [(0, (3, 1)), (1, (2, 2))])
def test_a_split_by_speed_that_exceeds_the_memory_is_not_taken(
    short: int, layers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """short: bytes that the faster stage lacks for the layers that it would get."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank, "measure", lambda plan, ranks: ((1.0, 0.5), "speeds"))
    write_corpus(Path("set"), 100)
    Path("tiny.yaml").write_text(TINY)
    keys = [
        "model.family=gpt2",
        "model.layers=4",
        "parallel.pipeline=2",
        "train.attention=torch",
        "train.compile=false",
    ]
    recipe = load_recipe("tiny.yaml", [*keys, "zero.resident=0"])
    machine = Cluster(accelerator=Accelerator(memory="80GB"), node=Node(ranks=2))
    facts = Facts(world=2, device="cuda", machine=machine)
    needed = memory_budget(check_and_plan(recipe, replace(facts, speeds=(1.0, 0.5)))).fullest.total
    facts = replace(facts, machine=replace(machine, accelerator=Accelerator(memory=f"{needed - short}B")))
    made, said = rank.as_measured(open_choices(recipe), check_and_plan(recipe, facts), facts, cast(Ranks, None))
    assert made.pipeline.layers == layers
    assert any("does not fit the memory" in sentence for sentence in said) == bool(short)


@pytest.mark.parametrize(
    ("keys", "compiled"), [((), True), (("train.compile=false",), False), (("train.compile=true",), True)], ids=str
)
def test_whether_blocks_are_compiled_is_measured_where_it_is_open(
    keys: tuple[str, ...], compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank, "compiles", lambda plan, ranks: (True, ["a block"]))
    write_corpus(Path("set"), 100)
    Path("tiny.yaml").write_text(TINY)
    recipe, facts = (
        load_recipe("tiny.yaml", ["model.family=gpt2", "train.attention=torch", *keys]),
        Facts(world=1, device="cuda"),
    )
    made, said = rank.as_measured(open_choices(recipe), check_and_plan(recipe, facts), facts, cast(Ranks, None))
    assert made.training.compile == made.record["train"]["compile"] == compiled
    assert said == ([] if keys else ["a block"])


def test_a_cpu_times_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(rank, "quickest")
    write_corpus(Path("set"), 100)
    Path("tiny.yaml").write_text(TINY)
    recipe, facts = load_recipe("tiny.yaml", ["model.family=gpt2"]), Facts(world=1, device="cpu")
    plan = check_and_plan(recipe, facts)
    assert rank.as_measured(open_choices(recipe), plan, facts, cast(Ranks, None)) == (plan, [])


@pytest.fixture
def _any_kernels() -> Iterator[None]:
    """Let later tests take all kernels again."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.backends.cuda.enable_mem_efficient_sdp(True)


@pytest.mark.usefixtures("_any_kernels")
@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
def test_deterministic_kernels_change_no_bit_on_cpus(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is such a kernel for every operation, and it is the one that runs without the key too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank, "restore_handlers", lambda: None)
    write_corpus(Path("set"), 100)
    keys = [f"model.family={family}", "train.steps=3", "train.eval_every=3", "optimizer.warmup=1", "logging.every=1"]
    Path("tiny.yaml").write_text(TINY)
    curves = {}
    for deterministic in (False, True):
        recipe = load_recipe("tiny.yaml", [f"name=run-{deterministic}", f"train.deterministic={deterministic}", *keys])
        facts = Facts(world=1, device="cpu")
        rank.run_rank(open_choices(recipe), check_and_plan(recipe, facts), facts, None)
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cuda.mem_efficient_sdp_enabled() is not deterministic
        curves[deterministic] = curve(Path("runs") / f"run-{deterministic}")
    assert len(curves[True]) == 5
    assert curves[True] == curves[False]


def test_a_gpu_that_cuda_cannot_use_is_told_in_one_sentence(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its rank, as it connects, and not by all that look for the GPUs' sockets."""

    def fails(*index: int) -> None:
        raise RuntimeError("Error 802: system not yet initialized\nmore")

    monkeypatch.setattr(rank, "gpus", fails)
    assert rank._bound(None) is None
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setattr("llmtrain.comm.ranks.device_of", lambda local_rank: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", fails)
    with pytest.raises(RunFailedError) as found:
        connect(Layout({Axis.DATA: 1}))
    assert str(found.value).startswith("rank 5 on ")
    assert str(found.value).endswith(
        " cannot use its GPU: Error 802: system not yet initialized; see llmtrain doctor there"
    )


def test_a_gpu_that_torch_counts_and_the_driver_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(index: int) -> None:
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    with pytest.raises(RuntimeError, match="Invalid device id"):
        gpus()
