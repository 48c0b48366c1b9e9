"""What a step moves for a rank's offloaded optimizer states, bucket by bucket, and in which order. No torch in here.

Each bucket passes through lanes: its states are read (NVMe) and come down or up with its gradient or its weight (the
host link), and it is stepped. Before the norm is known, buckets with spare memory are stepped ahead, those first whose
gradients were complete last: the next forward pass needs them first. Once the norm is known, the buckets follow in the
order of the units: a bucket that was stepped ahead commits, and another one is stepped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from llmtrain.plan.per_rank.near_volumes import for_rank
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.plan import Plan
from llmtrain.plan.stripes import striped

# GRADIENT: the gradients of a unit are complete. DECIDE: the norm is known. The others are of a bucket.
MoveKind = Literal["gradient", "decide", "ahead", "step", "commit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """What one bucket moves. unit: index of its unit among those of the rank, in the order of the forward pass. spare:
    whether it may be stepped ahead. elements: stepped. on_device: whether the device steps it.

    there: bytes that cross the host link to what steps: the gradient down, or states up. back: bytes that cross it
    after that, the other way: the weight, or states. back_ahead: the same after a step ahead. commit: bytes that come
    up when a step ahead commits. files: bytes that are read from each volume, and as many that are written.
    """

    unit: int
    spare: bool
    elements: int
    on_device: bool = False
    there: int = 0
    back: int = 0
    back_ahead: int = 0
    commit: int = 0
    files: Sequence[int] = ()

    @property
    def down(self) -> int:
        """Bytes from the device in a step that does not clip. `up`: to it."""
        return self._back if self.on_device else self.there

    @property
    def up(self) -> int:
        """See `down`."""
        commit = self.commit if self.spare else 0
        return commit + (self.there if self.on_device else self._back)

    @property
    def _back(self) -> int:
        return self.back_ahead if self.spare else self.back


@dataclass(frozen=True, slots=True)
class MoveEvent:
    """Something that happens to a bucket, or to a unit (GRADIENT). bucket: its number, or that of the unit. applies: at
    DECIDE, whether the step is applied with the numbers of the steps ahead."""

    kind: MoveKind
    bucket: int = 0
    applies: bool = False


def bucket_moves(plan: Plan, rank: int) -> list[Moves]:
    """Return what each bucket of a rank of the run moves in a step. A CPU's memory is the host's, so that nothing is
    copied between the host and the device."""
    offload, found, buckets = for_rank(plan, rank).sharding.offload, list[Moves](), rank_buckets(plan, rank)
    indices = {unit.name: index for index, unit in enumerate(rank_units(plan, rank))}
    in_files, gradient_bytes = offload.tier == "nvme", plan.gradient_bytes
    files = striped([one.nbytes for one in buckets], offload.bandwidths) if in_files else repeat(())
    for bucket, parts in zip(buckets, files, strict=False):
        numel, placement = bucket.numel, plan.sharding.placements[bucket.unit]
        brought = placement.moves_gradients
        weight, states, gradient = plan.compute_bytes * numel, 4 * bucket.states * numel, gradient_bytes * numel
        waits_on_host = offload.spare_weights == "host"
        if offload.on_device:
            # A device that steps writes its weights itself, but those of a step ahead may wait on the host.
            waiting = weight * waits_on_host
            moved = (states + gradient * brought, states, states + waiting, waiting)
        else:
            up = weight * (not placement.writes_at_rest)
            moved = (gradient * (not brought), up, *((0, up) if waits_on_host else (up, 0)))
        there, back, ahead, commit = (0, 0, 0, 0) if plan.device == "cpu" else moved
        found.append(
            Moves(
                unit=indices[bucket.unit],
                spare=bucket.spare,
                elements=numel,
                on_device=offload.on_device,
                there=there,
                back=back,
                back_ahead=ahead,
                commit=commit,
                files=tuple(parts),
            )
        )
    return found


def order_problems(moves: Sequence[Moves], events: Iterable[MoveEvent]) -> list[str]:
    """Return every way in which events of whole steps, in their order, are not those of the program, as sentences."""
    found, checked = list[str](), _Checked(moves)
    for event in events:
        found += checked.take(event)
    if checked.due:
        found.append(f"buckets {sorted(checked.due)} are not stepped after the norm is known")
    return found


class _Checked:
    """The state of a step. complete: units whose gradients are complete. ahead: buckets that were stepped ahead. due:
    buckets that are still to be stepped, or to commit, in order."""

    def __init__(self, moves: Sequence[Moves]) -> None:
        self._moves = moves
        self.complete: list[int] = []
        self.ahead: set[int] = set()
        self.due: list[int] = []
        self._applies, self._last = False, dict[MoveKind, int]()

    def take(self, event: MoveEvent) -> list[str]:
        """Return what is wrong with the next event."""
        number, named = event.bucket, f"bucket {event.bucket}"
        if event.kind == "gradient":
            self.complete.append(number)
            return []
        if event.kind == "decide":
            problems = (
                [f"the norm is known, but buckets {self.due} of the step before are not stepped"] if self.due else []
            )
            self.due, self.complete, self._applies = list(range(len(self._moves))), [], event.applies
            self._last.clear()
            if not event.applies:
                self.ahead.clear()
            return problems
        if event.kind == "ahead":
            problems = self._ahead_problems(number, named)
            self.ahead.add(number)
            return problems
        return self._final_problems(event, named)

    def _ahead_problems(self, bucket: int, named: str) -> list[str]:
        moves, problems = self._moves[bucket], list[str]()
        if not moves.spare:
            problems.append(f"{named} is stepped ahead, but has no spare memory")
        if bucket in self.ahead:
            problems.append(f"{named} is stepped ahead twice")
        if moves.unit not in self.complete:
            problems.append(f"{named} is stepped ahead, but its gradients are not complete")
        return problems

    def _final_problems(self, event: MoveEvent, named: str) -> list[str]:
        bucket, problems = event.bucket, list[str]()
        if bucket not in self.due:
            return [f"{named} is to {event.kind}, but the norm is not known, or it was stepped already"]
        self.due.remove(bucket)
        if bucket < self._last.get(event.kind, 0):
            problems.append(f"{named} is to {event.kind} after one that follows it")
        self._last[event.kind] = bucket
        if event.kind == "commit" and bucket not in self.ahead:
            problems.append(f"{named} commits, but was not stepped ahead with these numbers")
        if event.kind == "step" and bucket in self.ahead and self._applies:
            problems.append(f"{named} is stepped again, though its step ahead counts")
        self.ahead.discard(bucket)
        return problems
