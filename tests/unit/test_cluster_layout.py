"""Ranks, groups and shares."""

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from llmtrain.cluster.layout import Axis, Layout, even_share
from llmtrain.comm.environment import Launched, first_host, idle_nodes, launched
from llmtrain.comm.ranks import Links, Ranks, connect
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.launch.gpus import check_gpus


@given(st.integers(1, 64))
def test_groups_partition_the_ranks(world: int) -> None:
    layout = Layout({Axis.DATA: world})
    groups = layout.groups(Axis.DATA)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    for group in groups:
        assert [layout.coordinate(rank, Axis.DATA) for rank in group] == list(range(world))


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_even_shares_tile_the_range(numel: int, parts: int) -> None:
    shares = [even_share(numel, parts, index) for index in range(parts)]
    assert shares[0][0] == 0
    assert shares[-1][1] == numel
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    sizes = [end - start for start, end in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("node1", "node1"), ("gpu[003-007,12],login1", "gpu003"), ("a1,b2", "a1"), ("r[1-2]n", "r1n"), ("", "localhost")],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_launched_by_nobody() -> None:
    assert launched({}) is None
    # An interactive allocation runs one task, which is no launch of ranks.
    assert launched({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_launched_by_torchrun() -> None:
    found = launched({"RANK": "1", "WORLD_SIZE": "4"})
    assert found is not None
    assert (found.by, found.rank, found.world) == ("torchrun", 1, 4)


def test_a_hook_that_sets_the_rank_under_srun_leaves_the_node_to_slurm() -> None:
    hook = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "32", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    step = {"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}
    found = launched(hook | step)
    assert found is not None
    assert (found.by, found.rank, found.local_rank, found.ranks_per_node) == ("srun", 9, 1, 8)
    assert found.variables == {"LOCAL_WORLD_SIZE": "8"}
    # torchrun as the only task of a node has ranks of its own.
    found = launched(hook | step | {"SLURM_STEP_NUM_TASKS": "4", "LOCAL_WORLD_SIZE": "8"})
    assert found is not None
    assert (found.by, found.ranks_per_node, found.variables) == ("torchrun", 8, {})


# The port is below the range that Linux gives to any program, for every job number.
@pytest.mark.parametrize(("job", "port"), [("42", "20042"), ("15042", "23042"), ("11999", "31999"), ("12000", "20000")])
def test_launched_by_srun(job: str, port: str) -> None:
    environment = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": job,
    }
    found = launched(environment)
    assert found is not None
    assert found.by == "srun"
    assert dict(found.variables) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": port,
    }


def test_steps_of_one_job_have_different_ports() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "42"}
    found = [launched(step | {"SLURM_STEP_ID": str(number)}) for number in range(20)]
    # The next jobs have their own, too.
    found += [launched(step | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"}) for job in range(43, 143)]
    ports = {int(one.variables["MASTER_PORT"]) for one in found if one is not None}
    assert len(ports) == 120
    assert 20000 <= min(ports) < max(ports) < 32000


def test_a_hook_that_sets_nothing_but_the_rank_leaves_the_rest_to_slurm() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}
    found = launched({"RANK": "3", "WORLD_SIZE": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]"} | step)
    assert found is not None
    assert (found.rank, found.local_rank, found.ranks_per_node) == (3, 1, 2)
    assert found.variables == {
        "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "20007",
    }  # fmt: skip


def test_ranks_dealt_out_to_nodes_one_by_one_are_refused() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
    assert launched(step | {"SLURM_PROCID": "2", "SLURM_NODEID": "1"}) is not None
    with pytest.raises(BadInputError, match=r"rank 2 on node 0.* --distribution=block"):
        launched(step | {"SLURM_PROCID": "2", "SLURM_NODEID": "0"})
    # Nodes with different numbers of tasks say nothing.
    assert launched(step | {"SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1,3"}) is not None


def test_a_shell_of_several_tasks_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40000"}
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert launched(shell) is None
    # A step that is started from such a shell inherits its variables, and has no terminal.
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    assert launched(shell) is not None
    # With nohup or in the background, a command of the shell has none either, but the shell has.
    ours, theirs = os.openpty()
    with subprocess.Popen(["sleep", "60"], stdin=theirs) as task:
        assert launched(shell | {"SLURM_TASK_PID": str(task.pid)}) is None
        task.kill()
    os.close(ours)
    os.close(theirs)
    assert launched(shell | {"SLURM_TASK_PID": str(task.pid)}) is not None


@pytest.mark.parametrize(("nodes", "idle"), [("1", False), ("2", True), ("many", False)])
def test_nodes_of_a_job_on_which_nothing_starts(nodes: str, idle: bool) -> None:
    assert (idle_nodes({"SLURM_JOB_NUM_NODES": nodes}) is not None) is idle
    assert idle_nodes({}) is None


def test_launched_by_mpich() -> None:
    place = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
    found = launched(place | {"MPI_LOCALNRANKS": "4"})
    assert found is not None
    assert (found.by, found.rank, found.local_rank, found.world, found.ranks_per_node) == ("mpirun", 3, 1, 4, 4)
    with pytest.raises(BadInputError, match="-genv MASTER_ADDR node1"):
        launched(place | {"MPI_LOCALNRANKS": "2"})
    # Slurm gives its tasks such variables too, and starts MPICH's daemons as tasks.
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "n[1-2]", "MPI_LOCALNRANKS": "2"}
    found = launched(place | step | {"SLURM_STEP_NUM_TASKS": "4"})
    assert found is not None
    assert found.by == "srun"
    found = launched(place | step | {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "n1"})
    assert found is not None
    assert (found.by, found.variables["MASTER_PORT"]) == ("mpirun", "29500")
    assert launched({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None
    with pytest.raises(BadInputError, match="MPI_LOCALRANKID is not"):
        launched({"PMI_RANK": "3", "PMI_SIZE": "4"})


def test_launched_by_mpiexec_of_cray() -> None:
    place = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
    found = launched(place | {"MASTER_ADDR": "n1"})
    assert found is not None
    assert (found.by, found.rank, found.local_rank, found.world, found.ranks_per_node) == ("mpirun", 3, 1, 4, 2)
    with pytest.raises(BadInputError, match="set MASTER_ADDR"):
        launched(place)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def test_launched_by_mpirun_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getppid", lambda: 4_015_042)
    found = launched({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert found is not None
    assert (found.by, found.rank, found.world, found.ranks_per_node) == ("mpirun", 3, 4, 4)
    assert dict(found.variables) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "24048",
    }


def test_ranks_that_mpirun_starts_through_scripts_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: dict[str, str] = {}
    for name, parent in (("123.1", 7), ("123.1", 8), ("124.1", 9)):
        monkeypatch.setattr("os.getppid", lambda parent=parent: parent)
        found = launched({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": name})
        assert found is not None
        assert ports.setdefault(name, found.variables["MASTER_PORT"]) == found.variables["MASTER_PORT"]
    assert len(set(ports.values())) == 2


def test_mpirun_inside_a_slurm_job() -> None:
    """mpirun's ranks inherit the variables of the srun that started mpirun's daemon, which name another rank and
    world."""
    daemon = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_JOB_ID": "5"}
    found = launched({**daemon, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n1"})
    assert found is not None
    assert (found.by, found.rank, found.world) == ("mpirun", 3, 4)


def test_launched_by_mpirun_on_several_machines() -> None:
    environment = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(BadInputError, match="set MASTER_ADDR to the first machine's name"):
        launched(environment)
    found = launched({**environment, "MASTER_ADDR": "n1"})
    assert found is not None
    assert (found.ranks_per_node, found.variables["MASTER_ADDR"], found.variables["MASTER_PORT"]) == (2, "n1", "29500")
    ports = set()
    for name in ("123.1", "124.1"):
        found = launched({**environment, "MASTER_ADDR": "n1", "PMIX_NAMESPACE": name})
        assert found is not None
        ports.add(found.variables["MASTER_PORT"])
    assert len(ports - {"29500"}) == 2


def test_the_main_rank_stays_until_all_have_heard_it() -> None:
    """The main rank may end the run because of the text, and the store ends with it."""
    layout, store, device = Layout({Axis.DATA: 3}), dist.HashStore(), torch.device("cpu")
    main, *others = [Ranks(rank, rank, layout, device, Links(store)) for rank in range(3)]
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(main.from_main, "refusal", "no")
        assert others[0].from_main("refusal", "") == "no"
        assert not wait([saying], timeout=0.3).done
        assert others[1].from_main("refusal", "") == "no"
        assert saying.result(timeout=10) == "no"


def test_an_exchange_is_not_an_earlier_one_of_the_same_name() -> None:
    """A rank that is ahead of the main rank would hear what that said before."""
    layout, store, device = Layout({Axis.DATA: 2}), dist.HashStore(), torch.device("cpu")
    main, other = [Ranks(rank, rank, layout, device, Links(store)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for text in ("training", "validation"):
            heard = pool.submit(other.from_main, "data", "")
            assert not wait([heard], timeout=0.1).done
            assert pool.submit(main.from_main, "data", text).result(10) == heard.result(10) == text


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RunFailedError, match=rf"at localhost:{port}, but another program has that port"):
            connect(Layout({Axis.DATA: 2}), timeout=timedelta(seconds=20))


@pytest.mark.parametrize(("rank", "world"), [("4", "4"), ("x", "2"), ("-1", "2")])
def test_contradicting_environment_is_refused(rank: str, world: str) -> None:
    with pytest.raises(BadInputError, match="WORLD_SIZE"):
        launched({"RANK": rank, "WORLD_SIZE": world})


def test_ranks_that_are_asked_for_beside_those_of_a_launcher() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "4"}
    assert launched(torchrun, 4) == launched(torchrun)
    assert launched({}, 2) is None
    with pytest.raises(BadInputError, match="--nproc is 2, but torchrun has started 4 ranks already; leave it out"):
        launched(torchrun, 2)


def _place(local_rank: int) -> Launched:
    # This launcher does not give the number of ranks on each machine.
    return Launched("torchrun", local_rank, local_rank, 16, 16, {})


@pytest.mark.parametrize(
    ("gpus", "place"),
    [(0, None), (16, None), (0, _place(7)), (8, _place(7)), pytest.param(1, _place(7), id="a GPU for each rank")],
)
def test_as_many_gpus_as_ranks(gpus: int, place: Launched | None) -> None:
    check_gpus(gpus, place, 16)


@pytest.mark.parametrize(("gpus", "place"), [(1, None), (8, None), (4, _place(4))])
def test_more_ranks_than_gpus(gpus: int, place: Launched | None) -> None:
    with pytest.raises(BadInputError, match=rf"on a machine with {gpus} GPUs"):
        check_gpus(gpus, place, 16)
