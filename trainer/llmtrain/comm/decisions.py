"""Choices that several ranks share, such as which action of a pipeline to run next."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from llmtrain.comm.activity import Activity


class Decision(Protocol):
    """Makes choices that some ranks must share."""

    def __call__(self, choose: Callable[[], bool]) -> bool:
        """Return the choice. Collective over the ranks that share it."""

    def close(self) -> None:
        """Release process groups."""


class OwnDecision:
    """The choices of a rank that shares them with no other."""

    def __call__(self, choose: Callable[[], bool]) -> bool:
        """Return what `choose` returns."""
        return choose()

    def close(self) -> None:
        """Do nothing: there is no process group."""


class FirstRankDecides:
    """The choices of the first rank of a process group, which the others follow."""

    def __init__(self, group: dist.ProcessGroup, activity: Activity) -> None:
        """group: a process group of the gloo backend. activity: records the time spent waiting for the first rank."""
        self._group, self._activity = group, activity

    def __call__(self, choose: Callable[[], bool]) -> bool:
        """Return what `choose` returns on the first rank; the others do not call it."""
        chosen = torch.tensor([int(self._group.rank() == 0 and choose())])
        self._activity.wait(partial(dist.broadcast, chosen, group_src=0, group=self._group))
        return bool(chosen)

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group(self._group)
