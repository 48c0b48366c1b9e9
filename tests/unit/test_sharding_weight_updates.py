"""Updates of weights that are still being stepped: what the host waits for, and when each gather begins."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmtrain.comm.collectives import Collectives
from llmtrain.comm.stream import Job
from llmtrain.plan.cost.optimizer_traffic import UPDATED_TOGETHER
from llmtrain.sharding.collectives import Packing
from llmtrain.sharding.hops import Hop
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weight_updates import Sending, WeightUpdates, new_update
from torch import Tensor

NAMES, NUMEL, CPU = ("a", "b", "c", "d"), 64, torch.device("cpu")
PACKED = Packing(8, 32)


class GpuStream:
    """Runs a job when it is submitted, as a GPU's stream does; a wait for it is the device's."""

    blocks = False

    def submit(self, job: Job) -> "GpuStream":
        """Run `job`."""
        job()
        return self

    def wait(self) -> None:
        """Do nothing on the host."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Stepped:
    """The ticket of a unit that is still being stepped."""

    events: list[str]
    name: str

    def wait(self) -> None:
        """Wait for the unit."""
        self.events.append(f"wait {self.name}")


class Rank:
    """One of two ranks. events: waits of the host, and gathers that began. degrees: of the units' weights, whose
    masters are cut over both ranks. moves: whether weights rest elsewhere. at_rest: whether steps write them there.
    packing: of the updates."""

    def __init__(
        self, weights: int = 1, moves: bool = False, at_rest: bool = False, packing: Packing | None = None
    ) -> None:
        self.events = list[str]()
        in_flight = InFlight(CPU, 2, {"packed": 2 * PACKED.row_bytes(NUMEL // 2)})
        units = {name: self._unit(name, weights, moves, at_rest) for name in NAMES}
        sending = Sending(packing, {}, in_flight, lambda calls: None)
        self.updates = WeightUpdates({name: new_update(unit, sending) for name, unit in units.items()})

    def start(self, done: bool = False) -> None:
        """Start the updates of all units. done: whether they are stepped."""
        for name in NAMES:
            self.updates.start(name, None if done else Stepped(self.events, name))

    def happened(self, *names: str) -> list[str]:
        """Return what happens while units are waited for."""
        self.events.clear()
        for name in names:
            self.updates.wait(name)
        return [*self.events]

    def _unit(self, name: str, weights: int, moves: bool, at_rest: bool) -> ShardedUnit:
        def all_gather(region: Tensor) -> GpuStream:
            self.events.append(f"gather {name}")
            return GpuStream()

        group = SimpleNamespace(size=2, position=0, all_gather=all_gather, all_gather_bytes=lambda nbytes: nbytes)
        hop = Hop(2, "node", cast(Collectives, group), GpuStream())
        hops = SimpleNamespace(
            gather=lambda inner, outer: (hop,) if inner < 2 <= outer else (),
            placement=SimpleNamespace(moves_weights=moves),
        )
        made: Any = SimpleNamespace(
            spec=SimpleNamespace(name=name), hops=hops, degrees=SimpleNamespace(weights=weights, optimizer=2),
            weight=torch.zeros(0 if at_rest else NUMEL), owned_weight=torch.zeros(NUMEL // 2),
            at_rest=torch.zeros(NUMEL) if at_rest else None,
        )  # fmt: skip
        return cast(ShardedUnit, made)


@pytest.mark.parametrize("packing", [None, PACKED], ids=["plain", "packed"])
def test_units_are_stepped_under_the_forward_pass(packing: Packing | None) -> None:
    """Each unit waits for its own step and that of the next one, whose gather then runs beside its computation."""
    assert UPDATED_TOGETHER == 2
    rank = Rank(packing=packing)
    for _ in range(2):
        rank.start()
        assert rank.events == []
        assert rank.happened("a") == ["wait a", "gather a", "wait b", "gather b"]
        assert rank.happened("b") == ["wait c", "gather c"]
        # The next microbatch, and another unit's use of the same weights.
        assert rank.happened("a", "b") == []
        assert rank.happened("c") == ["wait d", "gather d"]
        assert rank.happened("d", "d") == []
        rank.events.clear()


def test_a_later_unit_first() -> None:
    """Gathers begin in the order of the units on all ranks, whatever needs them."""
    rank = Rank()
    rank.start()
    assert rank.happened("c") == [f"{what} {name}" for name in NAMES for what in ("wait", "gather")]
    assert rank.happened("a", "b", "d") == []


def test_the_end_waits_for_all_units() -> None:
    rank = Rank()
    rank.start()
    rank.updates.wait("a")
    rank.events.clear()
    rank.updates.finish()
    assert rank.events == ["wait c", "gather c", "wait d", "gather d"]
    rank.updates.finish()
    assert rank.happened(*NAMES) == []


def test_what_is_stepped_is_gathered_at_once() -> None:
    rank = Rank()
    rank.start(done=True)
    assert rank.events == [f"gather {name}" for name in NAMES]
    assert rank.happened(*NAMES) == []


def test_a_unit_that_is_not_gathered_waits_for_its_own_step() -> None:
    rank = Rank(weights=2)
    rank.start()
    assert rank.events == []
    assert rank.happened("b") == ["wait b"]
    assert rank.happened("a") == ["wait a"]


def test_weights_that_rest_elsewhere_leave_at_once() -> None:
    """The next forward pass needs the memory of their new shards."""
    rank = Rank(moves=True)
    rank.start()
    assert rank.events == [f"{what} {name}" for name in NAMES for what in ("wait", "gather")]


def test_steps_that_write_weights_at_rest_are_waited_for_where_these_are_needed() -> None:
    rank = Rank(weights=2, moves=True, at_rest=True)
    rank.start()
    assert rank.events == []
    assert rank.happened("b") == ["wait b"]
    assert rank.happened("a", "a") == ["wait a"]
