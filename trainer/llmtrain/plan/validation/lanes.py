"""The lanes of all ranks: which collectives end, given what each rank has started. No torch in here.

A lane runs its collectives in the order in which they were started. A collective ends once it is the first of its lane
on every rank of its group.
"""

from collections import deque
from dataclasses import dataclass, field

from llmtrain.plan.program.transfers import Lane, Transfer


@dataclass(eq=False, kw_only=True)
class LaneJob:
    """One collective on one rank. members: ranks of the group that are followed. unit: what it moves. transfer: None
    for a copy within the rank. after: jobs of the rank that end before it begins."""

    rank: int
    lane: Lane
    members: tuple[int, ...]
    unit: str
    transfer: Transfer | None
    after: tuple["LaneJob", ...]
    then: list["LaneJob"] = field(default_factory=list)
    done: bool = False


class Lanes:
    """The lanes of all ranks."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, Lane], deque[LaneJob]] = {}

    def start(self, job: LaneJob) -> None:
        """Put a job at the end of its lane, and end every job that can end now."""
        for before in job.after:
            before.then.append(job)
        queue = self._queues.setdefault((job.rank, job.lane), deque())
        queue.append(job)
        ready = [job]
        while ready:
            ready += self._end(ready.pop())

    def awaits(self, job: LaneJob) -> str:
        """Return what a job that does not end waits for."""
        seen: set[int] = set()
        while id(job) not in seen:
            seen.add(id(job))
            job = next((before for before in job.after if not before.done), job)
            job = self._queues[job.rank, job.lane][0]
        for member in job.members:
            queue = self._queues.get((member, job.lane))
            if not queue:
                return f"{_named(job)}, which rank {member} does not start"
            if queue[0].transfer != job.transfer:
                return f"{_named(job)}, while rank {member} runs {_named(queue[0])}"
            before = next((before for before in queue[0].after if not before.done), None)
            if before is not None:
                return f"{_named(job)}, which rank {member} runs after {_named(before)}"
        return _named(job)

    def _end(self, job: LaneJob) -> list[LaneJob]:
        """End a job on all ranks of its group if they have reached it; return the jobs that may end next."""
        heads = [self._head(member, job) for member in job.members]
        if job.done or not all(heads):
            return []
        following: list[LaneJob] = []
        for one in heads:
            assert one is not None
            one.done = True
            queue = self._queues[one.rank, one.lane]
            queue.popleft()
            following += [*one.then, *([queue[0]] if queue else [])]
        return following

    def _head(self, member: int, job: LaneJob) -> LaneJob | None:
        """Return a member's job that matches `job`, if it has come to it."""
        queue = self._queues.get((member, job.lane))
        if not queue or queue[0].transfer != job.transfer or (member == job.rank and queue[0] is not job):
            return None
        return queue[0] if all(before.done for before in queue[0].after) else None


def _named(job: LaneJob) -> str:
    if job.transfer is None:
        return f"a copy of {job.unit}"
    traffic = job.transfer.traffic
    return f"the {traffic.op} of {job.unit} for {traffic.purpose} over {job.lane.span} ranks"
