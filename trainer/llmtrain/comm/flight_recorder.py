"""Which rank a hang of GPUs comes from, by the collectives that torch's flight recorder has seen on each rank.

The host runs ahead of its GPU and waits for it in one place of a step, so that what hosts do last is the same on all
ranks. Their collectives differ: the others have queued one that the late rank has not.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# torch's names of errors that another rank or the network has caused.
_LOST = ("COMM_ERROR", "REMOTE_ERROR")


class GroupProgress(NamedTuple):
    """The collectives of one process group, on one rank. queued, completed: the number of the last one, from 1; all
    ranks of a group number them the same way. next: the name of the first that is queued and not complete, empty if
    none is.
    """

    queued: int
    completed: int
    next: str


Groups = Mapping[str, GroupProgress]
"""By the group's name, which its ranks share."""


class FlightRecorder:
    """Reads what torch has recorded. dump: torch's function, given whether it is to list collectives and whether only
    those that are not complete; returns JSON. has_failed: returns whether a collective has failed on this rank, for
    which its host may wait without end."""

    def __init__(self, dump: Callable[[bool, bool], bytes | str], has_failed: Callable[[], bool]) -> None:
        self._dump, self.has_failed = dump, has_failed

    def numbers(self) -> Any:
        """Return something that changes whenever a collective is queued or completes. It costs little."""
        return json.loads(self._dump(False, True)).get("pg_status")

    def groups(self) -> dict[str, GroupProgress]:
        """Return the progress of each group of which the recorder still has collectives: it keeps some thousands."""
        return groups_of(json.loads(self._dump(True, False)).get("entries", []))


def recorder_of(backend: str) -> FlightRecorder | None:
    """Return the recorder of a backend's groups; None if this torch has none. Only hosts of GPUs run ahead."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None) if backend == "nccl" else None
    return None if dump is None else FlightRecorder(dump, nccl_has_failed)


def nccl_has_failed() -> bool:
    """Return whether NCCL has found that a collective cannot complete: another rank or the network is gone."""
    groups = [group for group, (name, _) in list(dist.distributed_c10d._world.pg_map.items()) if name == "nccl"]
    # The run may leave a group meanwhile. An error here would end the watchdog.
    with suppress(RuntimeError):
        return any(group._get_backend(torch.device("cuda")).get_error().name in _LOST for group in groups)
    return False


def groups_of(entries: list[dict[str, Any]]) -> dict[str, GroupProgress]:
    """Return the progress of each group. entries: of the recorder, oldest first. Messages between two ranks have
    numbers of their own, and count as another group."""
    found: dict[str, GroupProgress] = {}
    for entry in entries:
        name = entry["process_group"][0] + (" messages" if entry["is_p2p"] else "")
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        queued, completed, pending = found.get(name, (0, 0, ""))
        if entry["state"] == "completed" or entry["retired"]:
            completed = max(completed, number)
        else:
            pending = pending or entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        found[name] = GroupProgress(max(queued, number), completed, pending)
    return found


def late_rank(ranks: Mapping[int, Groups]) -> tuple[int, str] | None:
    """Return the rank for which the others wait, and the name of their collective; None if the records do not tell.

    A rank waits for those of its group that have not queued what it waits in. The late rank waits for none itself.
    """
    waits: dict[int, dict[int, str]] = {}
    for rank, groups in ranks.items():
        for name, own in groups.items():
            for other, progress in _others(ranks, rank, name):
                if own.completed < own.queued and progress.queued <= own.completed:
                    waits.setdefault(rank, {})[other] = own.next
    late = {other: what for waited in waits.values() for other, what in waited.items() if other not in waits}
    return min(late.items(), default=None)


def queued_by_all(ranks: Mapping[int, Groups]) -> str | None:
    """Return the name of a collective that is not complete though all ranks of its group have queued it, if any."""
    for rank, groups in ranks.items():
        for name, own in groups.items():
            others = [progress.queued for _, progress in _others(ranks, rank, name)]
            if own.completed < own.queued and others and min(others) > own.completed:
                return own.next
    return None


def _others(ranks: Mapping[int, Groups], rank: int, name: str) -> list[tuple[int, GroupProgress]]:
    return [(other, groups[name]) for other, groups in ranks.items() if other != rank and name in groups]
