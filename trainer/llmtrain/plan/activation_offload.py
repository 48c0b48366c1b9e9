"""Which activations leave the device between their forward and their backward pass, and when. No torch in here.

Activation checkpointing keeps the input of each recomputed group of blocks: a border. Every border has the same size,
is saved once, in its group's forward pass, and used once, before its group's backward pass. A rank keeps at most `stay`
of them on its device. Of those that are alive, the ones whose use is furthest leave (Belady 1966). As sizes are equal,
no other choice moves fewer. A border that leaves does so as soon as it is saved: to leave later saves no copy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from llmtrain.cluster.description import Nvme
from llmtrain.errors import BadInputError
from llmtrain.plan.offload import volume_weights
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.recipe.schema import Recipe

# Borders that are read before they are used. As many stay on the device where no memory is stated: a border that is
# used at once would come back as soon as it has left.
READ_AHEAD = 2
# Borders that are written to files at once.
WRITE_BEHIND = 2


@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Where borders rest that leave the device.

    tier: none (they stay), host (memory of the host) or nvme (files). paths: folders of files, one for each volume.
    weights: relative bandwidths of the volumes. stay: most borders that stay, for each place along the pipeline axis.
    """

    tier: Literal["none", "host", "nvme"] = "none"
    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    stay: tuple[int, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, recompute: int, schedule: Schedule, volumes: Sequence[Nvme]) -> "ActivationOffload":
        """Return what a recipe asks for, with the least number of borders that stay. recompute: blocks of a group.
        volumes: of the cluster's nodes. Raises BadInputError."""
        tier = recipe.offload.activations
        if tier == "none":
            return cls()
        if problem := _problem(tier, recompute, schedule):
            raise BadInputError(problem)
        stay = (READ_AHEAD,) * schedule.ranks
        if tier == "host":
            return cls(tier=tier, stay=stay)
        paths = recipe.offload.paths or tuple(volume.path for volume in volumes)
        if not paths:
            raise BadInputError(
                "offload.activations is nvme, but neither offload.paths nor the cluster file's node.nvme names a "
                "folder; give a folder of each NVMe volume"
            )
        return cls(tier=tier, paths=paths, weights=volume_weights(paths, volumes), stay=stay)


def _problem(tier: str, recompute: int, schedule: Schedule) -> str | None:
    said = f"offload.activations is {tier}, but"
    if not recompute:
        return (
            f"{said} activation_checkpointing is none, and what leaves is what it keeps; set it to auto, or leave "
            "offload.activations out"
        )
    if schedule.message_driven:
        return (
            f"{said} with pipeline.schedule message-driven nobody knows which activations are used first; take "
            "another schedule, or leave offload.activations out"
        )
    return None


class Border(NamedTuple):
    """The input of a group of blocks in one microbatch. group: within the stage of the rank's chunk, from 0."""

    microbatch: int
    chunk: int
    group: int


class Save(NamedTuple):
    """A border is saved. region: of the memory outside to which it is written; None if it stays."""

    border: Border
    region: int | None


class Use(NamedTuple):
    """A border is used. region: as in `Save`. reads: the regions whose borders start to come back now, in the order in
    which they are used."""

    border: Border
    region: int | None
    reads: tuple[int, ...]


@dataclass(frozen=True)
class BorderMoves:
    """What happens to a rank's borders in each step. saves, uses: in their order. regions: number of regions, each as
    large as a border."""

    saves: tuple[Save, ...] = ()
    uses: tuple[Use, ...] = ()
    regions: int = 0

    @property
    def left(self) -> int:
        """Borders that leave in a step."""
        return sum(save.region is not None for save in self.saves)

    @property
    def read_slots(self) -> int:
        """Borders that are in use or being read at once."""
        return min(READ_AHEAD + 1, self.left)

    @property
    def write_slots(self) -> int:
        """Borders that are being written at once."""
        return min(WRITE_BEHIND, self.left)


def border_moves(actions: Sequence[Action], groups: Sequence[int], stay: int) -> BorderMoves:
    """Return what happens to the borders of a rank's actions. groups: of each chunk's stage. stay: most borders that
    stay at once, at least READ_AHEAD.

    A region is taken when its border is saved and free once it is used. The next READ_AHEAD borders that left come back
    while one is used, as far as they have been saved.
    """
    times = {pair: time for time, pair in enumerate(_events(actions, groups))}
    uses = {border: time for (kind, border), time in times.items() if kind is Kind.B}
    leaving = _leaving(times, uses, stay)
    regions: dict[Border, int] = {}
    free: list[int] = []
    saved, used, count = [], [], 0
    for kind, border in times:
        if kind is Kind.B:
            used.append((border, regions.get(border)))
            if border in leaving:
                heappush(free, regions[border])
            continue
        if border in leaving:
            regions[border], count = (heappop(free), count) if free else (count, count + 1)
        saved.append(Save(border, regions.get(border)))
    reads = _reads(times, leaving)
    found = (Use(border, region, tuple(regions[one] for one in reads.get(border, ()))) for border, region in used)
    return BorderMoves(tuple(saved), tuple(found), count)


_Event = tuple[Literal[Kind.F, Kind.B], Border]


def _events(actions: Sequence[Action], groups: Sequence[int]) -> Iterator[_Event]:
    """Yield each border's save (F) and use (B), in their order."""
    for action in actions:
        count = groups[action.chunk]
        if action.kind is Kind.F:
            yield from ((Kind.F, Border(action.microbatch, action.chunk, group)) for group in range(count))
        elif action.kind is Kind.B:
            yield from ((Kind.B, Border(action.microbatch, action.chunk, group)) for group in reversed(range(count)))


def _leaving(times: Mapping[_Event, int], uses: Mapping[Border, int], stay: int) -> set[Border]:
    """Return the borders that leave. times: of all events, in their order. uses: times of uses."""
    leaving: set[Border] = set()
    # Those that stay and have been used remain in the heap. They never come out: one that is used later is there.
    staying: list[tuple[int, Border]] = []
    count = 0
    for kind, border in times:
        if kind is Kind.F:
            heappush(staying, (-uses[border], border))
            count += 1
            if count > stay:
                leaving.add(heappop(staying)[1])
                count -= 1
        elif border not in leaving:
            count -= 1
    return leaving


def _reads(times: Mapping[_Event, int], leaving: set[Border]) -> dict[Border, list[Border]]:
    """Return which borders start to come back at the use of which others."""
    awaited = [border for kind, border in times if kind is Kind.B and border in leaving]
    found: dict[Border, list[Border]] = {}
    started = used = 0
    for (kind, border), time in times.items():
        if kind is Kind.B:
            used += border in leaving
            end = min(used + READ_AHEAD, len(awaited))
            while started < end and times[Kind.F, awaited[started]] < time:
                found.setdefault(border, []).append(awaited[started])
                started += 1
    return found
