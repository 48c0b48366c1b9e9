"""What a thread of a rank is sending for, known by the code that sends. Nothing here knows the plan."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from llmtrain.comm.ranks import Ranks
from llmtrain.parallel.tensor.collectives import TensorMesh
from llmtrain.sharding import gradient_reduction, offloaded_gradients, weight_updates
from llmtrain.sharding.collectives import HopStep
from llmtrain.sharding.gradient_reduction import ShardedReduction
from llmtrain.sharding.offloaded_gradients import OffloadedReduction
from llmtrain.sharding.offloaded_weights import OffloadedGather
from llmtrain.sharding.replica_groups import ReplicaGroups
from llmtrain.sharding.replicated import ReplicatedParameters
from llmtrain.sharding.secondary_copy import SecondaryCopy
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weight_gathers import ShardGather, SharedShards

# The purpose of what these send while they are called.
CALLS: list[tuple[type, str, str]] = [
    (TensorMesh, "all_gather", "tensor"),
    (TensorMesh, "all_reduce", "tensor"),
    (TensorMesh, "reduce_scatter", "tensor"),
    (ReplicaGroups, "sum_partial", "replicated"),
    (ReplicaGroups, "finish", "replicated"),
    (Ranks, "sums", "scalars"),
]
# The purpose of these, and of the steps that they return, which are run later.
STEPS: list[tuple[Any, str, str]] = [
    (ShardGather, "steps", "weights"),
    (SharedShards, "steps", "weights"),
    (OffloadedGather, "steps", "weights"),
    (SecondaryCopy, "steps", "secondary"),
    (ShardedReduction, "steps", "gradients"),
    (OffloadedReduction, "steps", "gradients"),
    (weight_updates, "all_gather", "update"),
    (weight_updates, "all_gather_packed", "update"),
    (ReplicatedParameters, "steps", "update"),
]


class Purposes:
    """The purpose of each thread, the innermost of those that it is in."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def now(self) -> str:
        """Of this thread; "unknown" where no code has said one."""
        return getattr(self._thread, "purpose", "unknown")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name purposes until the block ends."""
        with ExitStack() as patches:
            for owner, name, purpose in CALLS:
                patches.enter_context(_patch(owner, name, partial(self._within, purpose)))
            for owner, name, purpose in STEPS:
                patches.enter_context(_patch(owner, name, partial(self._later, purpose)))
            for module in (gradient_reduction, offloaded_gradients):
                patches.enter_context(_patch(module, "reduce_to_optimizer_shard", self._last_hops))
            yield

    def _within(self, purpose: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            before = self.now
            self._thread.purpose = purpose
            try:
                return inner(*args, **options)
            finally:
                self._thread.purpose = before

        return call

    def _later(self, purpose: str, inner: Callable[..., list[HopStep]]) -> Callable[..., list[HopStep]]:
        now = self._within(purpose, inner)
        return lambda *args, **options: self._of(purpose, now(*args, **options))

    def _of(self, purpose: str, steps: list[HopStep]) -> list[HopStep]:
        return [replace(step, job=self._within(purpose, step.job)) for step in steps]

    def _last_hops(self, inner: Callable[..., list[HopStep]]) -> Callable[..., list[HopStep]]:
        """The first hops sum to the optimizer shard, the others over ranks that hold the same one."""

        def steps(unit: ShardedUnit, *args: Any) -> list[HopStep]:
            found, degrees = inner(unit, *args), unit.degrees
            count = len(unit.hops.reduce(degrees.gradients, degrees.optimizer))
            return [*self._of("gradients", found[:count]), *self._of("replicas", found[count:])]

        return steps


def _patch(owner: Any, name: str, wrapped: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, wrapped(getattr(owner, name)))
