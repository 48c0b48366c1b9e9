"""The actions of a pipeline's ranks, as pure data without torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple


class Kind(Enum):
    """F: forward pass. B: backward pass; of the inputs alone if the backward pass is split. W: backward pass of the
    weights, if it is split."""

    F = "F"
    B = "B"
    W = "W"

    # Members are unique. Enum's own hash, of the name, is slow, and plans count millions of actions.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One computation of one rank. chunk: which of the rank's stages, from 0."""

    microbatch: int
    chunk: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every rank's actions in order.

    ranks: number of ranks along the pipeline axis. chunks: stages of each rank. Chunk c of rank r is stage
    `c * ranks + r`, counted in the order of the model. folded: the stages lie in a V, so that chunk 1 of rank r is
    stage `2 * ranks - 1 - r`. splits_backward: the backward pass of the weights is an action of its own, W. hands_back:
    in schedules without W, some backward passes send the gradient of their inputs before they compute those of the
    weights; `hands_back_first` says which.
    """

    ranks: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    folded: bool = False
    splits_backward: bool = False
    hands_back: bool = False

    @property
    def message_driven(self) -> bool:
        """Whether arriving messages decide the order of actions. `actions` is then empty."""
        return not self.actions

    @cached_property
    def most_live(self) -> int:
        """The most activations that any rank holds at the same time, in microbatches of one stage."""
        return max(peak_live(self))

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.ranks * self.chunks

    @property
    def evaluated_together(self) -> int:
        """Microbatches of an evaluation that pass a stage before a rank's next one: enough to keep all ranks busy. A
        rank that is alone takes as many as in a step."""
        return 2 * self.stages if self.ranks > 1 or self.chunks == 1 else max(2, self.microbatches)

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage of a rank's chunk."""
        if self.folded and chunk == 1:
            return 2 * self.ranks - 1 - rank
        return chunk * self.ranks + rank

    def rank_and_chunk(self, stage: int) -> tuple[int, int]:
        """Return the (rank, chunk) that holds a stage."""
        chunk, rank = divmod(stage, self.ranks)
        return (self.ranks - 1 - rank, 1) if self.folded and chunk == 1 else (rank, chunk)


def computations(actions: Iterable[Action]) -> list[tuple[int, Kind]]:
    """Return the chunk and the kind of each action: what it computes, of whichever microbatch. Tables of these are
    faster than decisions for each action."""
    return list(map(attrgetter("chunk", "kind"), actions))


def peak_live(schedule: Schedule) -> list[int]:
    """Return the most activations that each rank holds at the same time, counted in microbatches of one stage."""
    return [rank_live(schedule, rank) for rank in range(len(schedule.actions))]


def rank_live(schedule: Schedule, rank: int) -> int:
    """Return the most activations that a rank holds at the same time, counted in microbatches of one stage.

    It holds them from the forward pass to the backward pass; if that is split, to the backward pass of the weights.
    """
    last = Kind.W if schedule.splits_backward else Kind.B
    changes = {(chunk, kind): (kind is Kind.F) - (kind is last) for chunk in range(schedule.chunks) for kind in Kind}
    return max(accumulate(map(changes.__getitem__, computations(schedule.actions[rank]))))


def hands_back_first(ahead: int, live: int, most_live: int) -> bool:
    """Return whether a backward pass sends the gradient of its inputs before it computes those of the weights.

    The activations then stay in memory longer, so a rank does this only while it holds fewer than the rank that holds
    most. It also does this only after its last forward pass: from then on, the rank before it waits for nothing else.
    ahead: forward passes that the rank has not run yet. live: microbatches of a stage that it holds, this one included.
    most_live: the most that any rank holds during the step.
    """
    return ahead == 0 and live < most_live
