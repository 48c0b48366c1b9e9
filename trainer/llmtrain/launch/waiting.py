"""How OpenMP's threads wait for each other on cores that other programs use too."""

import os
from collections.abc import MutableMapping, Sequence

import psutil
from llmtrain_data import units

from llmtrain.comm.environment import threads_per_rank

BRIEF = "1000"
"""Rounds of a wait before a thread sleeps. libgomp's default of 300,000 keeps a core for about a millisecond, which is
faster where threads have cores of their own and slower where the awaited thread needs that core."""

_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SAMPLE = 0.2


def taken_cores(threads: int, used: Sequence[float]) -> float:
    """Return how many cores other programs use, or 0.0 if they leave enough for `threads` threads. used: the share of
    each core, 0 to 1."""
    taken = sum(used)
    return taken if len(used) - taken < threads - 0.5 else 0.0


def set_waiting(environment: MutableMapping[str, str], ranks: int) -> str | None:
    """Let threads of this machine's ranks spin only briefly if other programs use their cores now. Return a sentence
    about it for a run on CPUs, None if nothing was changed.

    What the user has set stays. Libraries read the environment when they are loaded: PyTorch must not be yet.
    """
    stated = environment.get("OMP_NUM_THREADS", "")
    threads = int(stated) if stated.isdecimal() else threads_per_rank(ranks)
    if threads == 1 or any(name in environment for name in _CHOSEN):
        return None
    cores = sorted(os.sched_getaffinity(0))
    shares = psutil.cpu_percent(_SAMPLE, percpu=True)
    taken = taken_cores(ranks * threads, [shares[core] / 100 for core in cores if core < len(shares)])
    if not taken:
        return None
    environment["GOMP_SPINCOUNT"] = BRIEF
    return (
        f"the machine is busy: other programs use {taken:.1f} of its {units.count(len(cores), 'core')}; this command "
        "will take longer than on an idle machine"
    )
