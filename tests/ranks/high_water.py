"""Counts what is taken of each buffer pool of a rank. Imports nothing of the plan."""

from collections.abc import Callable
from typing import Any

from llmtrain.comm.collectives import Collectives
from llmtrain.comm.shared_memory import SharedMemoryCollectives
from llmtrain.comm.workspace import Workspace
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.sharding.gradients import GradientReducer
from llmtrain.sharding.weights import GatheredWeights
from llmtrain.training.build import Assembly
from torch import Tensor

TAKE, START = Workspace.take, SharedMemoryCollectives._start
GATHER, NEW_BUFFER = GatheredWeights.gather, GradientReducer._new_buffer
# A wrapper around the last case's wrapper would keep every former run, with its process groups and their threads.
RECEIVE, EXPECT, NEXT = Transport.receive, Transport.expect, Transport._next


class HighWater:
    """The most bytes that have been taken of each buffer, as plain data after `noted`.

    pools: bytes of the pools as they were built. buffers: the ends of the highest places. workspaces, rounds: by the
    name of what uses them; of the slots, the most bytes of one round.
    """

    def __init__(self) -> None:
        self._assembly: Assembly
        self.pools: dict[str, int] = {}
        self._taken: dict[int, dict[str, int]] = {}
        self._rounds: dict[int, int] = {}
        self.receives = 0
        Transport.receive = self._watched(RECEIVE)  # type: ignore[method-assign]
        Transport.expect = self._watched(EXPECT)  # type: ignore[method-assign]
        Transport._next = self._watched(NEXT)  # type: ignore[method-assign]
        self.buffers = {"gathered_weights": 0, "gradient_buffers": 0}
        Workspace.take = self._take(TAKE)  # type: ignore[method-assign]
        SharedMemoryCollectives._start = self._start(START)  # type: ignore[method-assign]
        GatheredWeights.gather = self._gather(GATHER)  # type: ignore[method-assign]
        GradientReducer._new_buffer = self._new_buffer(NEW_BUFFER)  # type: ignore[method-assign]

    def building(self, build: Callable[..., Assembly]) -> Callable[..., Assembly]:
        """Return `build` that notes what it returns."""

        def built(*arguments: Any) -> Assembly:
            self._assembly = build(*arguments)
            self.pools = self._assembly.pools
            return self._assembly

        return built

    def noted(self) -> dict[str, Any]:
        """Return what was counted."""
        engine, named = self._assembly.engine, dict[str, Collectives | None]()
        for hops in engine._hops:
            named |= {f"gather {hop.span}": hop.collectives for hop in hops.weights}
            named |= {f"reduce {hop.span}": hop.collectives for hop in hops.gradients}
            named |= {f"flat {hop.span}": hop.collectives for hop in hops.flat}
        workspaces = {
            name: self._taken.get(id(one.workspace), {}) for name, one in named.items() if one and one.workspace
        }
        groups = engine.gradients.replica_groups
        named |= {"tensor": self._assembly.mesh.collectives, "partial": groups.partial, "stage": groups.stage}
        named["tied"] = next(iter(groups.tied.values()), None)
        for name, held in (("gathers", engine.weights), ("reductions", engine.gradients)):
            workspaces[name] = {}
            for slot in held.in_flight._slots:
                merge(workspaces[name], self._taken.get(id(slot.workspace), {}))
        rounds = {
            name: self._rounds.get(id(one), 0)
            for name, one in named.items()
            if isinstance(one, SharedMemoryCollectives)
        }
        last = self._assembly.pools
        return {
            "built": self.pools, "last": last, "buffers": self.buffers, "workspaces": workspaces, "rounds": rounds,
            "receives": self.receives,
        }  # fmt: skip

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(transport: Transport, *arguments: Any) -> Any:
            found = call(transport, *arguments)
            posted = [values.nbytes for inbox in transport._inboxes.values() for values, _ in inbox.posted]
            self.receives = max(self.receives, sum(posted))
            return found

        return counted

    def _take(self, take: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(workspace: Workspace, name: str, numel: int, dtype: Any) -> Tensor:
            merge(self._taken.setdefault(id(workspace), {}), {name: numel * dtype.itemsize})
            return take(workspace, name, numel, dtype)

        return counted

    def _start(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def counted(collectives: SharedMemoryCollectives, nbytes: int, *rest: Any) -> Any:
            self._rounds[id(collectives)] = max(self._rounds.get(id(collectives), 0), nbytes)
            return start(collectives, nbytes, *rest)

        return counted

    def _gather(self, gather: Callable[..., None]) -> Callable[..., None]:
        def counted(weights: GatheredWeights, issue: Any) -> None:
            end = issue.offset + weights._units[issue.unit].ranges.padded
            self._reach("gathered_weights", end * weights.pool.itemsize)
            gather(weights, issue)

        return counted

    def _new_buffer(self, new_buffer: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(gradients: GradientReducer, name: str) -> Tensor:
            buffer = new_buffer(gradients, name)
            self._reach("gradient_buffers", (int(buffer.storage_offset()) + buffer.numel()) * buffer.itemsize)
            return buffer

        return counted

    def _reach(self, name: str, end: int) -> None:
        self.buffers[name] = max(self.buffers[name], end)


def merge(most: dict[str, int], found: dict[str, int]) -> None:
    """Keep the larger of two sizes of each name in `most`."""
    for name, size in found.items():
        most[name] = max(size, most.get(name, 0))
