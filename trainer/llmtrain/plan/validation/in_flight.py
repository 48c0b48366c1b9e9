"""The collectives that one rank has started. No torch in here."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from llmtrain.cluster.layout import Axis
from llmtrain.plan.per_rank.replica_groups import REPLICA_GROUPS
from llmtrain.plan.program.instructions import Drop, Gather, Issue, Reduce, ReplicaSum
from llmtrain.plan.program.transfers import Lane, Transfer
from llmtrain.plan.validation.lanes import LaneJob
from llmtrain.plan.validation.places import ProgramPlace, ranges_overlap
from llmtrain.plan.validation.world import ProgramWait, World


class InFlightCollectives:
    """Starts the collectives of a rank's instructions, and says what the rank waits for.

    As at run time, gathers and updates have a fixed number of workspaces, and reductions too: a collective begins once
    its workspace is free.
    """

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank, self._part = world, rank, world.ranks.part(rank)
        count = max(len(unit.placement.levels) for unit in self._part.units.values()) + 1
        self._gathers, self._reductions = (deque[LaneJob | None]([None] * count) for _ in range(2))
        self._gathered: dict[str, LaneJob] = {}
        self._updated: dict[str, LaneJob] = {}
        self._buffers: deque[tuple[LaneJob, tuple[int, int]]] = deque()
        self._pending: list[LaneJob] = []

    def issue(self, place: ProgramPlace, issue: Issue) -> Iterator[ProgramWait]:
        """Issue an instruction, and yield what the rank waits for."""
        if isinstance(issue, Drop):
            # A gather that nobody waited for may still write there.
            job = self._gathered.pop(issue.unit, None)
            yield from [] if job is None else self._wait(place, job)
        elif isinstance(issue, Gather):
            self._gather(issue)
        else:
            yield from self._reduce(place, issue)

    def use(self, place: ProgramPlace, unit: str) -> Iterator[ProgramWait]:
        """Yield what a use of a unit waits for. A unit that is not gathered is another problem."""
        if unit in self._gathered:
            yield from self._wait(place, self._gathered[unit])

    def finish(self, place: ProgramPlace, sums: Sequence[ReplicaSum]) -> Iterator[ProgramWait]:
        """Sum over replicas, one after the other, after the passes, and yield what the rank waits for."""
        for one in sums:
            transfer = self._part.final(one)
            job = LaneJob(
                rank=self._rank,
                lane=transfer.lane,
                members=self._members(transfer),
                unit=transfer.unit,
                transfer=transfer,
                after=(),
            )
            self._world.lanes.start(job)
            yield from self._wait(place, job)

    def update(self) -> None:
        """Start the updates of all units after a step."""
        for unit, transfers in zip(self._part.units, self._part.updates, strict=True):
            if transfers:
                self._updated[unit] = self._start(self._gathers, transfers, ())[-1]

    def all(self, place: str) -> Iterator[ProgramWait]:
        """Yield what the rank waits for until everything has ended."""
        for job in self._pending:
            yield from self._wait(place, job)
        self._pending.clear()
        self._buffers.clear()

    def _gather(self, gather: Gather) -> None:
        update = self._updated.pop(gather.unit, None)
        after = () if update is None else (update,)
        transfers = self._part.transfers(gather)
        if transfers:
            self._gathered[gather.unit] = self._start(self._gathers, transfers, after)[-1]
        elif gather.unit in self._part.units:
            # Nothing is sent. The secondary copy is complete on this rank, and is copied on the lane of the first hop.
            # Offloaded weights that are not sharded are read on a lane of this rank alone.
            placement = self._part.units[gather.unit].placement
            span = 1 if placement.moves_weights and not gather.secondary else placement.levels[0].span
            lane = Lane("gather", placement.axes, span)
            job = LaneJob(
                rank=self._rank,
                lane=lane,
                members=(self._rank,),
                unit=gather.unit,
                transfer=None,
                after=self._waiting(self._gathers, after),
            )
            self._gathered[gather.unit] = self._begin(self._gathers, [job])[-1]

    def _reduce(self, place: ProgramPlace, reduce: Reduce) -> Iterator[ProgramWait]:
        range_ = (0, 0)
        if reduce.offset is not None:
            range_ = reduce.offset, reduce.offset + self._part.spec.padded.get(reduce.unit, 0)
            while any(ranges_overlap(range_, other) for _, other in self._buffers):
                yield from self._wait(place, self._buffers.popleft()[0])
        # The sum over tensor-parallel ranks comes first. The buffer is free once the first hop after it has ended.
        sums = list(self._part.partial(reduce))
        transfers = (*sums, *self._part.transfers(reduce))
        if transfers:
            jobs = self._start(self._reductions, transfers, ())
            if reduce.offset is not None:
                self._buffers.append((jobs[min(len(sums), len(jobs) - 1)], range_))

    def _start(
        self, slots: deque[LaneJob | None], transfers: Iterable[Transfer], after: tuple[LaneJob, ...]
    ) -> list[LaneJob]:
        jobs: list[LaneJob] = []
        for transfer in transfers:
            before = (jobs[-1],) if jobs else self._waiting(slots, after)
            members = self._members(transfer)
            jobs.append(
                LaneJob(
                    rank=self._rank,
                    lane=transfer.lane,
                    members=members,
                    unit=transfer.unit,
                    transfer=transfer,
                    after=before,
                )
            )
        return self._begin(slots, jobs)

    def _begin(self, slots: deque[LaneJob | None], jobs: list[LaneJob]) -> list[LaneJob]:
        slots[0] = jobs[-1]
        slots.rotate(-1)
        self._pending += jobs
        for job in jobs:
            self._world.lanes.start(job)
        return jobs

    def _waiting(self, slots: deque[LaneJob | None], after: tuple[LaneJob, ...]) -> tuple[LaneJob, ...]:
        slot = slots[0]
        return after if slot is None else (*after, slot)

    def _members(self, transfer: Transfer) -> tuple[int, ...]:
        grid, symmetric = self._world.ranks.plan.grid, self._world.symmetric_axes
        members = self._world.ranks.members(self._rank, transfer.lane, transfer.unit)
        if transfer.lane.kind in REPLICA_GROUPS:
            # One rank stands for all that are equal to it.
            return tuple(one for one in members if not any(grid.coordinate(one, axis) for axis in symmetric))
        return (self._rank,) if Axis.DATA in symmetric else members

    def _wait(self, place: ProgramPlace | str, job: LaneJob) -> Iterator[ProgramWait]:
        if not job.done:
            yield ProgramWait(place, lambda: job.done, lambda: self._world.lanes.awaits(job))
