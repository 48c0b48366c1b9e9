"""Threads that step offloaded buckets: ahead, as their gradients arrive, and for good once the norm is known."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

from llmtrain.comm.device import on_this_device
from llmtrain.comm.stalls import StreamStalls
from llmtrain.comm.waits import Event
from llmtrain.offload.staging import BucketStep, Staging, StepAhead
from llmtrain.offload.states import StateStore


class JobKind(Enum):
    """AHEAD: step into spare memory. STEP: step. COMMIT: let a step ahead count, and publish its weights."""

    AHEAD = "ahead"
    STEP = "step"
    COMMIT = "commit"


class StepTicket:
    """Stands for the steps of one unit's buckets. left: buckets that are not done. events: when the device has the
    weights of the others."""

    def __init__(self, stepper: "Stepper", left: int) -> None:
        self._stepper, self.left, self.events = stepper, left, list[Event]()

    def wait(self) -> None:
        """Let nothing that this thread computes next start before the weights are there. Raises what a step raised."""
        self._stepper.stalls.timed(self._wait)

    def done(self, event: Event) -> None:
        """Report a bucket."""
        self.left -= 1
        self.events.append(event)

    def _wait(self) -> None:
        self._stepper.wait_until(lambda: not self.left)
        for event in self.events:
            event.wait()


@dataclass(frozen=True, eq=False)
class _Step:
    """A step of a bucket, or of a part of one."""

    work: BucketStep
    numbers: AdamWStep
    ticket: StepTicket
    kind = JobKind.STEP


@dataclass(frozen=True, eq=False)
class _Commit:
    """ahead: with the work of the step, which has the memory of the weights."""

    ahead: StepAhead
    ticket: StepTicket
    kind = JobKind.COMMIT

    @property
    def bucket(self) -> int:
        """Number of the bucket."""
        return self.ahead.work.bucket


@dataclass(eq=False)
class _Ahead:
    """numbers: AdamW's numbers of its step. It may run when the next step has begun. done: whether it has run."""

    ahead: StepAhead
    numbers: AdamWStep
    done: bool = False
    kind = JobKind.AHEAD

    @property
    def work(self) -> BucketStep:
        """What is stepped ahead."""
        return self.ahead.work


@dataclass
class _Queue:
    """What is to be done. ahead: by unit, in the order in which the device computes their gradients. final, commits: in
    order; steps, and commits of steps ahead. stepped_ahead: steps ahead that have been taken out, by bucket. left: jobs
    of `final` and `commits` that are not done."""

    ahead: list[deque[_Ahead]] = field(default_factory=list)
    final: deque[_Step] = field(default_factory=deque)
    commits: deque[_Commit] = field(default_factory=deque)
    stepped_ahead: dict[int, _Ahead] = field(default_factory=dict)
    left: int = 0

    def next(self) -> _Step | _Ahead | None:
        """Take out the next job: the first final one; else, of the unit whose gradients arrived last; else, of the unit
        whose gradients arrive next."""
        if self.final:
            return self.final.popleft()
        if not self.ahead:
            return None
        # The host adds units long before the GPU has computed their gradients.
        arrived = (index for index in reversed(range(len(self.ahead))) if self.ahead[index][0].work.computed.query())
        index = next(arrived, 0)
        job = self.ahead[index].popleft()
        if not self.ahead[index]:
            del self.ahead[index]
        self.stepped_ahead[job.work.bucket] = job
        return job

    def add(self, work: BucketStep, numbers: AdamWStep, ticket: StepTicket) -> None:
        """Add a step, or let the step ahead of its bucket count."""
        if work.bucket in self.stepped_ahead:
            self.commits.append(_Commit(replace(self.stepped_ahead[work.bucket].ahead, work=work), ticket))
        else:
            self.final.append(_Step(work, numbers, ticket))
        self.left += 1

    @property
    def steps_ahead_done(self) -> bool:
        """Whether no step ahead runs."""
        return all(job.done for job in self.stepped_ahead.values())


class Stepper:
    """Steps the buckets of a rank, on one thread for each staging, and publishes those of steps ahead on another one.

    Before the norm is known, it steps the unit whose gradients arrived last first, because the next forward pass needs
    that unit first. Afterwards it steps the other buckets in the order of the units. A step ahead keeps the old states.
    It counts if it had the numbers of the step, so if the gradients are not clipped. No step is computed backwards.

    observe: called with each job when its bucket is taken up. moving: called when one is done, and when a shard has
    read or written a part of the states. done: number of jobs of each kind. waited: seconds that the thread which makes
    the stepper has waited for its threads. stalls: measures how long the GPU that computes waits for new weights.
    """

    def __init__(self, states: StateStore, stagings: Sequence[Staging], overlap: int) -> None:
        """overlap: buckets that the only thread fetches while it steps one; several threads fetch none."""
        self.states, self._stagings = states, stagings
        self.observe: Callable[[JobKind, int], None] = lambda kind, bucket: None
        self.moving: Callable[[], object] = lambda: None
        self.done, self.waited = Counter[JobKind](), 0.0
        self.stalls = StreamStalls(torch.device("cpu"))
        self._main = threading.get_ident()
        self._queue, self._changed = _Queue(), threading.Condition()
        self._taken: dict[int, Tensor] = {}
        self._ahead_numbers: AdamWStep | None = None
        self._failure: BaseException | None = None
        self._closed = False
        fetched = overlap if len(stagings) == 1 else 0
        run, publish = on_this_device(self._run), on_this_device(self._publish)
        self._threads = [
            threading.Thread(target=run, args=(staging, fetched), name="optimizer steps", daemon=True)
            for staging in stagings
        ]
        self._threads.append(threading.Thread(target=publish, name="weights of steps ahead", daemon=True))
        for thread in self._threads:
            thread.start()

    def begin(self, numbers: AdamWStep | None) -> None:
        """See StepsAhead. The rest of the step before continues."""
        with self._changed:
            self._ahead_numbers = numbers

    def step_ahead(self, buckets: Sequence[StepAhead]) -> None:
        """Step buckets into their spare memory, some time. All threads may call this."""
        with self._changed:
            numbers = self._ahead_numbers
            if buckets and numbers is not None:
                self._queue.ahead.append(deque(_Ahead(one, numbers) for one in buckets))
                self._changed.notify_all()

    def decide(self, numbers: AdamWStep | None) -> None:
        """See StepsAhead."""
        self.finish()
        with self._changed:
            queue, before = self._queue, self._ahead_numbers
            queue.ahead.clear()
            if numbers is None or before is None or not _same(before, numbers):
                # A step under way reads the gradients, which change soon.
                self._wait(lambda: queue.steps_ahead_done)
                queue.stepped_ahead.clear()

    def step(self, works: Sequence[BucketStep], numbers: AdamWStep) -> StepTicket:
        """Step the buckets of a unit, or let their steps ahead count. numbers: those that were decided."""
        ticket = StepTicket(self, len(works))
        with self._changed:
            for work in works:
                self._queue.add(work, numbers, ticket)
            self._changed.notify_all()
        return ticket

    def finish(self) -> None:
        """Wait until all that counts is done. Raises what a step raised."""
        self.wait_until(lambda: not self._queue.left)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for the threads to reach a state. Raises what a step raised."""
        with self._changed:
            self._wait(reached)

    def close(self) -> None:
        """End the threads; what waits is not done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _wait(self, reached: Callable[[], bool]) -> None:
        begin = time.perf_counter()
        self._changed.wait_for(lambda: reached() or self._failure is not None)
        if threading.get_ident() == self._main:
            # The computation does not wait for another thread's wait.
            self.waited += time.perf_counter() - begin
        if self._failure is not None:
            raise self._failure

    def _run(self, staging: Staging, fetched: int) -> None:
        # Every thread has this setting of its own.
        torch.set_grad_enabled(False)
        entered = deque[_Step | _Ahead]()
        try:
            while self._enter(entered, fetched):
                job = entered.popleft()
                if isinstance(job, _Step):
                    self._step(job, staging)
                else:
                    self._step_ahead(job, staging)
        except BaseException as error:
            self._fail(error)

    def _enter(self, entered: deque[_Step | _Ahead], fetched: int) -> bool:
        """Wait for a job, and begin to fetch as many others. Return whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: entered or self._queue.final or self._queue.ahead or self._closed)
            if self._closed or self._failure is not None:
                return False
            new = list[_Step | _Ahead]()
            while len(entered) + len(new) <= fetched and (job := self._queue.next()) is not None:
                new.append(job)
                self.observe(job.kind, job.work.bucket)
        for job in new:
            if not job.work.part.start:
                self.states.fetch(job.work.bucket)
        entered.extend(new)
        return True

    def _step(self, job: _Step, staging: Staging) -> None:
        work = job.work
        if not work.part.start:
            self._taken[work.bucket], _ = self.states.take(work.bucket, False)
        event = staging.step(work, self._taken[work.bucket][:, work.part], job.numbers)
        if work.last:
            del self._taken[work.bucket]
            self.states.put(work.bucket, False)
        with self._changed:
            self._count(job.ticket, event)
            self._done(job.kind)

    def _step_ahead(self, job: _Ahead, staging: Staging) -> None:
        bucket = job.work.bucket
        old, new = self.states.take(bucket, True)
        staging.step_ahead(job.ahead, old, new, old is not new, job.numbers)
        self.states.put(bucket, True)
        with self._changed:
            job.done = True
            self._done(job.kind)

    def _publish(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while (job := self._next_commit()) is not None:
                event, bucket = self._stagings[0].publish(job.ahead), job.bucket
                # One after the other: the weights of steps that are not ahead must not wait for all of these.
                event.synchronize()
                self.states.commit(bucket)
                with self._changed:
                    del self._queue.stepped_ahead[bucket]
                    self._count(job.ticket, event)
                    self._done(job.kind)
        except BaseException as error:
            self._fail(error)

    def _next_commit(self) -> _Commit | None:
        """Wait for a commit whose step ahead is done; return None at the end."""
        commits, stepped_ahead = self._queue.commits, self._queue.stepped_ahead
        with self._changed:
            # A thread may still step the first one.
            self._changed.wait_for(lambda: self._closed or (commits and stepped_ahead[commits[0].bucket].done))
            if self._closed:
                return None
            job = commits.popleft()
            self.observe(job.kind, job.bucket)
            return job

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _count(self, ticket: StepTicket, event: Event) -> None:
        ticket.done(event)
        self._queue.left -= 1

    def _done(self, kind: JobKind) -> None:
        self.done[kind] += 1
        self.moving()
        self._changed.notify_all()


def _same(one: AdamWStep, other: AdamWStep) -> bool:
    """Whether two steps have the same bits."""
    divisors = [1.0 if each.gradient_divisor is None else float(each.gradient_divisor) for each in (one, other)]
    rest = [replace(each, gradient_divisor=None) for each in (one, other)]
    return rest[0] == rest[1] and divisors[0] == divisors[1]
