"""Which activations leave the device between their forward and their backward pass, and when. No torch in here.

Activation checkpointing keeps the input of each recomputed group of blocks: a group input. Every group input has the
same size, is saved once, in its group's forward pass, and used once, before its group's backward pass. A rank keeps at
most `stay` of them on its device. Of those that are alive, the ones whose use is furthest leave (Belady 1966). As sizes
are equal, no other choice moves fewer. A group input that leaves does so as soon as it is saved: to leave later saves
no copy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from llmtrain.cluster.description import Nvme
from llmtrain.errors import BadInputError
from llmtrain.plan.offload import folders_of_files, volume_bandwidths
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.recipe.schema import Recipe

# How many group inputs are read ahead of their use. As many stay on the device where no memory is stated: the last
# ones are used right after they are saved, and offloading them would gain nothing.
INPUTS_AHEAD = 2
# How many group inputs are being written to files at the same time.
INPUTS_BEHIND = 2


@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Where group inputs rest that leave the device.

    tier: none (they stay), host (memory of the host) or nvme (files). paths: folders of files, one for each volume.
    bandwidths: relative bandwidths of the volumes. stay: most group inputs that stay, for each rank of the pipeline.
    """

    tier: Literal["none", "host", "nvme"] = "none"
    paths: tuple[str, ...] = ()
    bandwidths: tuple[float, ...] = ()
    stay: tuple[int, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, recomputes: bool, schedule: Schedule, volumes: Sequence[Nvme]) -> "ActivationOffload":
        """Return what a recipe asks for. `stay` is INPUTS_AHEAD, its smallest value, for each rank of the
        pipeline. recomputes: whether blocks are recomputed. volumes: of the cluster's nodes. Raises BadInputError."""
        tier = recipe.offload.activations
        if tier == "none":
            return cls()
        if problem := _problem(tier, recomputes, schedule):
            raise BadInputError(problem)
        stay = (INPUTS_AHEAD,) * schedule.ranks
        if tier == "host":
            return cls(tier=tier, stay=stay)
        paths = folders_of_files("activations", recipe.offload.paths, volumes)
        return cls(tier=tier, paths=paths, bandwidths=volume_bandwidths(paths, volumes), stay=stay)


def _problem(tier: str, recomputes: bool, schedule: Schedule) -> str | None:
    said = f"offload.activations is {tier}, but"
    if not recomputes:
        return (
            f"{said} activation_checkpointing is none, and only what it keeps is offloaded; set it to auto, or leave "
            "offload.activations out"
        )
    if schedule.message_driven:
        return (
            f"{said} with pipeline.schedule message-driven nobody knows which activations are used first; take "
            "another schedule, or leave offload.activations out"
        )
    return None


class GroupInput(NamedTuple):
    """The input of a group of blocks in one microbatch. group: within the stage of the rank's chunk, from 0."""

    microbatch: int
    chunk: int
    group: int


class Save(NamedTuple):
    """A group input is saved. region: the region of the memory outside to which it is written; None if it stays."""

    group_input: GroupInput
    region: int | None


class Use(NamedTuple):
    """A group input is used. region: as in `Save`. reads: the regions whose group inputs start to come back now, in the
    order in which they are used."""

    group_input: GroupInput
    region: int | None
    reads: tuple[int, ...]


class ActivationSlots(ABC):
    """The slots through which group inputs pass."""

    @property
    @abstractmethod
    def left(self) -> int:
        """Group inputs that leave in a step."""

    @property
    def read_slots(self) -> int:
        """Group inputs that are in use or being read at the same time."""
        return min(INPUTS_AHEAD + 1, self.left)

    @property
    def write_slots(self) -> int:
        """Group inputs that are being written at the same time."""
        return min(INPUTS_BEHIND, self.left)


@dataclass(frozen=True)
class ActivationMoves(ActivationSlots):
    """What happens to a rank's group inputs in each step. saves, uses: in their order. regions: number of regions, each
    as large as a group input."""

    saves: tuple[Save, ...] = ()
    uses: tuple[Use, ...] = ()
    regions: int = 0

    @property
    def left(self) -> int:
        """Group inputs that leave in a step."""
        return sum(save.region is not None for save in self.saves)


@dataclass(frozen=True)
class ActivationCounts(ActivationSlots):
    """What `ActivationMoves` come to. passes: group inputs that leave, by (microbatch, chunk). regions: as there."""

    passes: Mapping[tuple[int, int], int]
    regions: int

    @property
    def left(self) -> int:
        """Group inputs that leave in a step."""
        return sum(self.passes.values())


def activation_counts(actions: Sequence[Action], groups: Sequence[int], stay: int) -> ActivationCounts:
    """Return what `activation_moves` come to, in less time."""
    events = _Events.of(actions, groups)
    leaves, passes = events.leaving(stay), dict[tuple[int, int], int]()
    offloaded = most = 0
    for one in events.order:
        if one < 0:
            offloaded -= leaves[~one]
        elif leaves[one]:
            offloaded += 1
            most = max(most, offloaded)
            key = events.group_inputs[one][:2]
            passes[key] = passes.get(key, 0) + 1
    return ActivationCounts(passes, most)


def activation_moves(actions: Sequence[Action], groups: Sequence[int], stay: int) -> ActivationMoves:
    """Return what happens to the group inputs of a rank's actions. groups: number of groups of each chunk's stage.
    stay: most group inputs that stay at the same time, at least INPUTS_AHEAD.

    A region is taken when its group input is saved and free once it is used. The next INPUTS_AHEAD group inputs that
    left come back while one is used, as far as they have been saved.
    """
    events = _Events.of(actions, groups)
    leaves, regions = events.leaving(stay), dict[int, int]()
    free: list[int] = []
    saves, used, count = [], [], 0
    for one in events.order:
        if one < 0:
            used.append(~one)
            if leaves[~one]:
                heappush(free, regions[~one])
            continue
        if leaves[one]:
            regions[one], count = (heappop(free), count) if free else (count, count + 1)
        saves.append(Save(events.group_inputs[one], regions.get(one)))
    reads = events.reads(leaves)
    uses = (
        Use(events.group_inputs[one], regions.get(one), tuple(regions[other] for other in reads.get(one, ())))
        for one in used
    )
    return ActivationMoves(tuple(saves), tuple(uses), count)


@dataclass(frozen=True)
class _Events:
    """The saves and uses of a rank's group inputs. group_inputs: in the order of their saves. order: the index in
    `group_inputs` for each save, and its complement (`~index`) for each use. uses: for each group input, the index of
    its use in `order`."""

    group_inputs: Sequence[GroupInput]
    order: Sequence[int]
    uses: Sequence[int]

    @classmethod
    def of(cls, actions: Sequence[Action], groups: Sequence[int]) -> "_Events":
        """Return the events of actions: groups are saved in order, and used in the reverse order."""
        group_inputs, order, uses = list[GroupInput](), list[int](), list[int]()
        firsts: dict[tuple[int, int], int] = {}
        for action in actions:
            key, count = (action.microbatch, action.chunk), groups[action.chunk]
            if action.kind is Kind.F:
                first = firsts[key] = len(group_inputs)
                group_inputs += [GroupInput(*key, group) for group in range(count)]
                order += range(first, first + count)
                uses += [0] * count
            elif action.kind is Kind.B:
                for one in reversed(range(firsts[key], firsts[key] + count)):
                    uses[one] = len(order)
                    order.append(~one)
        return cls(group_inputs, order, uses)

    def leaving(self, stay: int) -> list[bool]:
        """Return whether each group input leaves."""
        leaves, count = [False] * len(self.group_inputs), 0
        # Those that stay and have been used remain in the heap. They never come out: one that is used later is there.
        staying: list[tuple[int, int]] = []
        for one in self.order:
            if one < 0:
                count -= not leaves[~one]
                continue
            heappush(staying, (-self.uses[one], one))
            count += 1
            if count > stay:
                leaves[heappop(staying)[1]] = True
                count -= 1
        return leaves

    def reads(self, leaves: Sequence[bool]) -> dict[int, list[int]]:
        """Return which group inputs start to come back at the use of which others."""
        awaited = [~one for one in self.order if one < 0 and leaves[~one]]
        found: dict[int, list[int]] = {}
        saved, started, used = [False] * len(self.group_inputs), 0, 0
        for one in self.order:
            if one >= 0:
                saved[one] = True
                continue
            used += leaves[~one]
            end = min(used + INPUTS_AHEAD, len(awaited))
            while started < end and saved[awaited[started]]:
                found.setdefault(~one, []).append(awaited[started])
                started += 1
        return found
