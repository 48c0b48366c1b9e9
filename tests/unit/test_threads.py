"""Whose number of threads a rank finds in its environment: the user's, or its launcher's."""

import os
import socket
import subprocess
import sys

import pytest
from llmtrain.comm import threads

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
        # The first time, each rank sends and knows of itself alone; then it hears what all have sent.
        return threads.even_cores(lambda own: sent if len(sent) == len(places) else sent.append(own) or [own])

    assert [share(*place) for place in places] == [5, 5, 3, 5]
    assert [share(*place) for place in places] == [2, 2, 3, 5]
    assert all(0 < own < 2**63 for [own] in sent)
