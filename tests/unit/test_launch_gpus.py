"""What NVIDIA's driver says of the GPUs, and what follows for a run."""

import json
from pathlib import Path

import pytest
import torch
from llmtrain.cluster.description import Accelerator, Cluster, Host, Node
from llmtrain.comm.environment import Launched
from llmtrain.launch import gpus
from llmtrain.launch.gpus import cluster_of_gpus, gpu_memory_problem, least_capability
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import parse_recipe
from llmtrain.start import run as start

from tests.tiny import write_corpus

RECIPE = {
    "name": "old",
    "model": {"family": "llama", "layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 64},
    "data": {"path": "set", "sequence_length": 16},
}


@pytest.mark.parametrize(
    ("said", "least"),
    [
        ("9.0\n8.0\n", (8, 0)),
        ("10.0\n9.0\n", (9, 0)),
        ("7.5\n", (7, 5)),
        ("[N/A]\n", None),
        ("No devices were found\n", None),
        ("", None),
    ],
)
def test_the_oldest_card_counts(
    said: str, least: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_tool(said, tmp_path, monkeypatch)
    assert least_capability() == least


@pytest.mark.parametrize(
    ("visible", "order", "cards", "asked"),
    [
        (None, "PCI_BUS_ID", "old\nnew\n", []),
        ("", "PCI_BUS_ID", "old\nnew\n", []),
        ("1,2", "PCI_BUS_ID", "old\nnew\n", ["--id=1,2"]),
        ("1,2", None, "new\nnew\nnew\n", []),
        # CUDA's order is another one then.
        ("1,2", None, "old\nnew\nnew\n", ["--id=the UUIDs of 1,2"]),
        ("GPU-1a,GPU-2b", None, "old\nnew\n", ["--id=GPU-1a,GPU-2b"]),
    ],
)
def test_hidden_cards_do_not_count(
    visible: str | None, order: str | None, cards: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.setenv(name, value or "")
    monkeypatch.setattr(gpus, "_uuids", lambda given: f"the UUIDs of {given}")
    monkeypatch.setattr(gpus, "_driver", lambda what, options: cards if what == "name" else str(options))
    assert gpus._asked("compute_cap") == str(asked)


@pytest.mark.parametrize(("given", "said"), [("1", True), ("8", True), ("32", False), (None, False), ("many", False)])
def test_few_hardware_queues_are_told(given: str | None, said: bool) -> None:
    found = gpus.few_queues({} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given})
    assert (found is not None) == said


@pytest.mark.parametrize(("here", "said"), [(1, "srun has started 1 of the 8 ranks"), (8, None), (9, None)])
def test_gpus_without_a_rank_are_told(here: int, said: str | None) -> None:
    found = gpus.idle_gpus(8, Launched("srun", 0, 0, 4 * here, here, {}))
    assert found is None if said is None else said in str(found)
    # --nproc asked for as many.
    assert gpus.idle_gpus(8, Launched("llmtrain", 0, 0, 1, 1, {})) is None


SLURM, MACHINE = "Slurm has given this job GPUs, and torch", "this machine has GPUs, and torch"


@pytest.mark.parametrize(
    ("environment", "on_machine", "said"),
    [
        ({}, False, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, False, SLURM),
        ({"SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, False, SLURM),
        ({"SLURM_GPUS_ON_NODE": "0"}, False, None),
        ({}, True, MACHINE),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, True, MACHINE),
        # The job has asked for none.
        ({"SLURM_JOB_ID": "7"}, True, None),
        # The user hides them.
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, False, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True, None),
    ],
)
def test_gpus_that_torch_does_not_find(
    environment: dict[str, str], on_machine: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "has_nvidia_gpus", lambda: on_machine)
    found = gpus.unseen_gpus(environment)
    assert found is None if said is None else str(found).startswith(said)


def test_triton_needs_a_compiler_and_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.sysconfig, "get_path", lambda name, scheme: str(tmp_path / "own"))
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    assert "need a C compiler" in str(gpus.triton_problem())
    monkeypatch.setattr(gpus.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert f"{tmp_path}/own has none; apt install python3-dev" in str(gpus.triton_problem())
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path}")
    assert gpus.triton_problem() is None


def test_without_the_tool_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert least_capability() is None
    assert gpu_memory_problem(with_memory("80GB")) is None


@pytest.mark.parametrize(
    ("stated", "said", "problem"),
    [
        ("80GB", "40960 MiB\n", "memory=38.8GiB (--force"),
        # The display's card does not count.
        ("80GB", "2048 MiB\n81559 MiB\n", None),
        ("80GiB", "81559 MiB\n", None),
        ("40GB", "40960 MiB\n", None),
        ("80GB", "[N/A]\n", None),
        (None, "40960 MiB\n", None),
    ],
)
def test_a_card_smaller_than_stated(
    stated: str | None, said: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_tool(said, tmp_path, monkeypatch)
    found = gpu_memory_problem(with_memory(stated))
    assert found is None if problem is None else problem in (found or "")


def test_a_run_names_a_card_smaller_than_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "set", 20)
    Path("old.yaml").write_text(
        json.dumps({**RECIPE, "cluster": {"accelerator": {"memory": "80GB"}, "node": {"ranks": 1}}})
    )
    give_tool("40960 MiB\n", tmp_path, monkeypatch)
    monkeypatch.setattr(start, "_gpus", lambda place: 1)
    for force in (False, True):
        start.start("old.yaml", [], 1, dry_run=True, force=force)
        assert ("but this machine's GPU has 40.0 GiB" in capsys.readouterr().out) is not force


@pytest.mark.parametrize(
    ("said", "ranks", "found"),
    [
        ("143771 MiB, Disabled, NVIDIA H200\n", 1, ("NVIDIA H200", "136.1GiB")),
        ("24564 MiB, [N/A], NVIDIA GeForce RTX 4090\n", 1, ("NVIDIA GeForce RTX 4090", "23.2GiB")),
        ("40960 MiB, Disabled, A100\n40960 MiB, Disabled, A100\n", 1, ("A100", "38.8GiB")),
        # Which of them is CUDA's first one is not known.
        ("2048 MiB, [N/A], T400\n24564 MiB, [N/A], RTX 4090\n", 1, None),
        ("81559 MiB, Disabled, H100\n", 2, None),
        ("81559 MiB, Enabled, H100\n", 1, None),
        ("No devices were found\n", 1, None),
    ],
)
def test_a_machine_is_described(
    said: str, ranks: int, found: tuple[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_tool(said, tmp_path, monkeypatch)
    monkeypatch.setattr(gpus, "machine_memory", lambda: 128 * 2**30)
    machine = cluster_of_gpus(ranks)
    if found is None:
        assert machine is None
        return
    assert machine is not None
    assert machine.accelerator == Accelerator(name=found[0], memory=found[1])
    assert machine.node == Node(ranks=ranks, host=Host(memory="112.0GiB"))


@pytest.mark.parametrize(
    ("said", "held"),
    [
        ("0 MiB, 24564 MiB\n", None),
        ("700 MiB, 24564 MiB\n", None),
        ("3 MiB, 81559 MiB\n20480 MiB, 81559 MiB\n", "20.0 GiB"),
        ("[N/A], [N/A]\n", None),
    ],
)
def test_memory_that_other_programs_hold(
    said: str, held: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_tool(said, tmp_path, monkeypatch)
    found = gpus.memory_held_by_others()
    assert found is None if held is None else f"hold {held} of a GPU's memory" in str(found)


def test_auto_fills_the_machine_s_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a cluster file: the batch is one microbatch, and all states that the host holds are stepped ahead."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "set", 2000)
    keys = {"train": {"global_batch": 64}, "offload": {"optimizer": "host", "share": 1.0}}
    Path("mine.yaml").write_text(json.dumps({**RECIPE, **keys}))
    monkeypatch.setattr(start, "_gpus", lambda place: 1)
    for said, microbatch, spare in (("81559 MiB, Disabled, NVIDIA H100\n", 64, 1.0), ("none\n", 8, 0.25)):
        give_tool(said, tmp_path, monkeypatch)
        start.start("mine.yaml", [], None, dry_run=True, as_json=True)
        recipe = json.loads(capsys.readouterr().out)["recipe"]
        assert (recipe["train"]["microbatch"], recipe["offload"]["spare"]) == (microbatch, spare)
    give_tool("600 MiB, Disabled, NVIDIA H100\n", tmp_path, monkeypatch)
    start.start("mine.yaml", [], None, dry_run=True)
    assert "accelerator.memory (0.5GiB)" in capsys.readouterr().out


def with_memory(memory: str | None) -> Cluster:
    return Cluster(accelerator=Accelerator(memory=memory), node=Node(ranks=8))


def give_tool(said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a driver's tool into the PATH that says this."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_torch_says_whose_cards_it_is_built_for(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version need not: a user may have built it."""
    monkeypatch.setattr(torch.version, "hip", hip)
    assert start._facts(None, 1, 1, described=True).amd is (hip is not None)


@pytest.mark.parametrize(("bf16", "compute", "attention"), [(True, "bf16", "flash"), (False, "fp16", "efficient")])
def test_old_cards_compute_in_fp16(bf16: bool, compute: str, attention: str) -> None:
    plan = make_plan(parse_recipe(RECIPE), Facts(world=1, device="cuda", bf16=bf16))
    assert (plan.compute, plan.kernels.attention) == (compute, attention)
