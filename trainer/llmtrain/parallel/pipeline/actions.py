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
    `2 * ranks - 1 - rank` instead. splits_backward: whether W actions are apart from B.
    """

    ranks: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    folded: bool = False
    splits_backward: bool = False

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
