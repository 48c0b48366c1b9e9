"""Where a rank runs, and with how many threads it steps offloaded states."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmtrain.comm.cores import Bound
from llmtrain.comm.environment import Launched
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training import rank
from llmtrain.training.start import left_open
from tiny import curve, write_corpus

PLAN = cast(Plan, None)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with 8 cores, of which a rank is bound to some. asked: what was asked for."""
    machine = SimpleNamespace(gpus=["0000:10:00.0", "0000:90:00.0"], bound=Bound(1, 4), stated=None, asked=[])
    gpus = lambda: [SimpleNamespace(address=address) for address in machine.gpus]  # noqa: E731

    def bind(*arguments: Any) -> Bound | None:
        machine.asked.append(arguments)
        return cast(Bound | None, machine.bound)

    monkeypatch.setattr(rank, "gpus", gpus)
    monkeypatch.setattr(rank, "bind_to_socket", bind)
    monkeypatch.setattr(rank, "step_threads", lambda plan: machine.stated)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return machine


def launched(local_rank: int) -> Launched:
    return Launched("torchrun", local_rank, local_rank, 2, 2, {})


def test_a_rank_is_bound_and_takes_its_share_of_the_cores(machine: SimpleNamespace) -> None:
    assert rank._bound(PLAN, launched(1)) == ["rank 0 runs on socket 1, with 4 threads"]
    assert machine.asked == [((1, 2), machine.gpus)]
    assert torch.get_num_threads() == 4


def test_a_rank_that_is_not_bound_changes_nothing(machine: SimpleNamespace) -> None:
    machine.bound = None
    assert rank._bound(PLAN, None) == []
    assert machine.asked == [((0, 1), machine.gpus)]
    assert torch.get_num_threads() == 6


@pytest.mark.parametrize(("stated", "threads"), [(2, 2), (7, 7), (100, 8)])
def test_stated_cores_set_the_threads_on_a_gpu(stated: int, threads: int, machine: SimpleNamespace) -> None:
    """At most as many as the rank may use."""
    machine.stated = stated
    rank._bound(PLAN, launched(0))
    assert torch.get_num_threads() == threads


def test_stated_cores_do_not_change_what_a_cpu_computes_with(machine: SimpleNamespace) -> None:
    machine.gpus, machine.bound, machine.stated = [], None, 2
    rank._bound(PLAN, launched(0))
    assert torch.get_num_threads() == 6


def test_a_rank_without_a_number_on_its_machine_is_not_bound(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK")
    assert rank._bound(PLAN, launched(0)) == []
    assert machine.asked == []


@pytest.fixture
def _any_kernels() -> Iterator[None]:
    """Let later tests take all kernels again."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
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
    Path("tiny.yaml").write_text(
        "model: {layers: 2, hidden: 32, heads: 4, vocab: 64}\ndata: {path: set, sequence_length: 16}\n"
    )
    curves = {}
    for deterministic in (False, True):
        recipe = load_recipe("tiny.yaml", [f"name=run-{deterministic}", f"train.deterministic={deterministic}", *keys])
        facts = Facts(world=1, device="cpu")
        rank.run_rank(left_open(recipe), check_and_plan(recipe, facts), facts, None)
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cuda.mem_efficient_sdp_enabled() is not deterministic
        curves[deterministic] = curve(Path("runs") / f"run-{deterministic}")
    assert len(curves[True]) == 5
    assert curves[True] == curves[False]
