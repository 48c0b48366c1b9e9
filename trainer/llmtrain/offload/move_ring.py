"""Buckets of a file that pass through memory in an order that is known before."""

from collections.abc import Sequence

from torch import Tensor

from llmtrain.offload.fetch_ring import FetchRing
from llmtrain.plan.program.gradient_buckets import Move


class MoveRing:
    """Takes buckets in the order of `moves`, which is that of one step, again and again. While one is in use, the next
    `ahead` are read, and those before it are written. Several may be in use while no move writes what these read."""

    def __init__(self, ring: FetchRing, moves: Sequence[Move], ahead: int) -> None:
        """ring: has slots for `ahead` buckets and those in use."""
        self._ring, self._moves, self._ahead = ring, moves, ahead
        # Moves that were ever begun, of which the bucket was ever taken, and ever completed.
        self._fetched = self._taken = self._done = 0

    def take(self, bucket: int) -> Tensor:
        """Return a bucket as uint8 `[nbytes]`, which the caller may change until it is put back. It is uninitialized if
        its move does not read it. Raises RuntimeError if another bucket is next."""
        if self._move(self._taken).bucket != bucket:
            raise RuntimeError(f"bucket {bucket} is taken, but the step's next move is {self._move(self._taken)}")
        while self._fetched <= self._taken + self._ahead and not self._changes_before(self._fetched):
            move = self._move(self._fetched)
            self._ring.fetch(move.bucket, move.reads)
            self._fetched += 1
        self._taken += 1
        return self._ring.take()

    def put(self, bucket: int) -> None:
        """Start to write the bucket that was taken first and is not put back, if its move writes it."""
        self._ring.put(bucket, self._move(self._done).writes)
        self._done += 1

    def begin(self) -> None:
        """Go to the first move, if the last pass through all moves is not complete."""
        if self._done % len(self._moves):
            self._ring.forget()
            self._done += -self._done % len(self._moves)
            self._fetched = self._taken = self._done

    def _move(self, count: int) -> Move:
        return self._moves[count % len(self._moves)]

    def _changes_before(self, count: int) -> bool:
        """Whether a bucket to be read changes in a move that is not complete."""
        moves = (self._move(index) for index in range(self._done, count))
        return any(move.writes and move.bucket == self._move(count).bucket for move in moves)
