"""Whose number of threads a rank finds in its environment: the user's, or its launcher's."""

import os
import socket
import subprocess
import sys

import pytest
from llmtrain.cluster.control_groups import Quota
from llmtrain.comm import threads
from llmtrain.comm.environment import threads_per_rank

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
# Ranks share one pipe: a word and its end go into it in one write, also where Python does not buffer.
ASK = "import os; from llmtrain.comm.threads import set_by_user; os.write(1, str(set_by_user()).encode().ljust(6))"


def ranks_say(script: str, *command: str, **variables: str) -> list[str]:
    """Return what ranks print that `command` starts with a shell script."""
    environment = {name: value for name, value in os.environ.items() if name != threads.THREADS}
    environment |= {"ASK": f'"{sys.executable}" -c "{ASK}"', **variables}
    found = subprocess.run(
        [*command, "sh", "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return sorted(found.stdout.split())


def test_a_default_of_torchrun_is_not_the_users() -> None:
    """Both ranks have a shell between launcher and program, once as a mere wrapper, and once it sets the number."""
    script = 'eval "$ASK"; [ "$OMP_NUM_THREADS" = 1 ] && OMP_NUM_THREADS=5 sh -c \'eval "$ASK"; true\''
    assert ranks_say(script, *TORCHRUN) == ["False", "False", "True", "True"]


def test_a_number_that_the_user_gave_to_torchrun_is_the_users() -> None:
    assert ranks_say('eval "$ASK"; true', *TORCHRUN, OMP_NUM_THREADS="1") == ["True", "True"]


def test_without_a_launcher_a_number_is_the_users() -> None:
    assert ranks_say('eval "$ASK"; true', "env", OMP_NUM_THREADS="3") == ["True"]
    assert ranks_say('eval "$ASK"; true', "env") == ["False"]


def test_ranks_share_only_cores_that_they_may_all_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks: two of one socket, one of another socket, and one of another machine."""
    places = [("one", range(5)), ("one", range(5)), ("one", range(5, 8)), ("two", range(5))]
    sent = list[list[int]]()

    def share(machine: str, cores: range) -> int:
        monkeypatch.setattr(socket, "gethostname", lambda: machine)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
        monkeypatch.setattr(threads, "cpu_quota", Quota)
        # The first time, each rank sends and knows of itself alone; then it hears what all have sent.
        return threads.even_cores(lambda own: sent if len(sent) == len(places) else sent.append(own) or [own])

    assert [share(*place) for place in places] == [5, 5, 3, 5]
    assert [share(*place) for place in places] == [2, 2, 3, 5]
    assert all(0 < number < 2**63 for own in sent for number in own)


@pytest.mark.parametrize(
    ("quotas", "shares"),
    [
        # Two ranks of one container on a node with many cores.
        ([Quota(24, 7)] * 2, [12, 12]),
        # Two containers of one node, which share its name but not their quotas.
        ([Quota(24, 7), Quota(24, 7), Quota(9.5, 8)], [12, 12, 9]),
        ([Quota(0.5, 7)] * 2, [1, 1]),
        # More than there are cores.
        ([Quota(2000, 7)] * 2, [104, 104]),
        ([Quota()] * 4, [52] * 4),
    ],
)
def test_ranks_share_the_quota_of_their_container(
    quotas: list[Quota], shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(208)))
    sent = list[list[int]]()

    def share(quota: Quota) -> int:
        monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
        return threads.even_cores(lambda own: sent if len(sent) == len(quotas) else sent.append(own) or [own])

    for quota in quotas:
        share(quota)
    assert [share(quota) for quota in quotas] == shares


def test_ranks_of_several_processors_share_one_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cpu_quota", lambda: Quota(24, 7))
    sent = list[list[int]]()
    for cores in (range(104), range(104, 208)) * 2:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(cores))
        found = threads.even_cores(lambda own: sent if len(sent) == 2 else sent.append(own) or [own])
    assert found == 12


def test_a_launcher_divides_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(208)))
    monkeypatch.setattr("llmtrain.cluster.control_groups.cpu_quota", lambda: Quota(24, 7))
    assert [threads_per_rank(ranks) for ranks in (1, 2, 48)] == [24, 12, 1]
