"""What a pipeline's ranks do, as pure data. No torch in here."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Forward pass; backward pass, of the inputs alone where W is apart; backward pass of the weights."""

    F = "F"
    B = "B"
    W = "W"


@dataclass(frozen=True)
class Action:
    """One computation of one rank. chunk: which of the rank's pieces of the model, from 0."""

    microbatch: int
    chunk: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """Every rank's actions in order.

    ranks: of the pipeline axis. chunks: pieces of the model on each rank: stage number `chunk * ranks + rank` of
    `ranks * chunks` in the order of the model; where `folded` (two chunks in a V), chunk 1 of a rank is stage
    `2 * ranks - 1 - rank` instead. splits_backward: whether W actions are apart from B. hands_back: whether, where they
    are not, `hands_back_first` says when the gradient of the inputs goes on before the weights' are computed.
    """

    ranks: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    folded: bool = False
    splits_backward: bool = False
    hands_back: bool = False

    @property
    def stages(self) -> int:
        """Pieces of the model in all."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Place in the model of a rank's chunk."""
        if self.folded and chunk == 1:
            return 2 * self.ranks - 1 - rank
        return chunk * self.ranks + rank

    def place(self, stage: int) -> tuple[int, int]:
        """Return (rank, chunk) of a stage."""
        chunk, rank = divmod(stage, self.ranks)
        return (self.ranks - 1 - rank, 1) if self.folded and chunk == 1 else (rank, chunk)


def peak_live(schedule: Schedule) -> list[int]:
    """Return the most activations that each rank holds at once, counted in microbatches of one piece of the model.

    They live from their forward to their backward; where that is split, to the backward of the weights.
    """
    last = Kind.W if schedule.splits_backward else Kind.B
    peaks = []
    for order in schedule.actions:
        live = peak = 0
        for action in order:
            live += (action.kind is Kind.F) - (action.kind is last)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def hands_back_first(ahead: int, live: int, most_live: int) -> bool:
    """Return whether a backward pass hands back the gradient of its inputs before it computes those of the weights.

    What the latter are made of then stays a while longer, so a rank does it where it holds less than the fullest one;
    and not before its last forward pass: from then on, the rank before it waits for nothing else. ahead: forward passes
    that the rank has still to do. live: microbatches of a piece that it holds, this one with them. most_live: those
    that any rank ever holds.
    """
    return ahead == 0 and live < most_live
