"""Simulates when each action of a pipeline runs, from the duration of each. Without torch."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from llmtrain.plan.pipeline.actions import Action, Kind, Schedule, hands_back_first


@dataclass(frozen=True)
class Durations:
    """Durations of actions and messages, in seconds or any other unit of time.

    forward, backward, weights: the times of one microbatch in each stage, in the order of the model. backward is for
    the inputs alone; without a split backward pass, an action B takes backward + weights. transfer: the time for which
    a message occupies the link of each hop between consecutive stages, in either direction (bytes / bandwidth). Hops
    within a rank take no time. latency: the additional time of a message over each hop, during which the link is free;
    empty for none. links: for each hop, the link that the rank of its first stage sends over, and that of its second.
    Messages over the same link, such as a node's card, wait for each other. Empty: every pair of ranks has its own
    link.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]
    transfer: Sequence[float]
    latency: Sequence[float] = ()
    links: Sequence[tuple[Hashable, Hashable]] = ()

    @classmethod
    def even(
        cls, stages: int, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0, transfer: float = 0.0
    ) -> "Durations":
        """Return equal durations for all stages and hops."""
        return cls([forward] * stages, [backward] * stages, [weights] * stages, [transfer] * (stages - 1))

    def of(self, action: Action, stage: int, splits_backward: bool) -> float:
        """Return the duration of an action of a stage."""
        if action.kind is Kind.F:
            return self.forward[stage]
        if action.kind is Kind.W:
            return self.weights[stage]
        return self.backward[stage] + (0.0 if splits_backward else self.weights[stage])

    def until_handed_back(self, action: Action, stage: int) -> float:
        """Return the time until a backward pass sends the gradient of its inputs, if it does that first."""
        return self.backward[stage]

    def latency_of(self, action: Action, stage: int, hop: int) -> float:
        """Return the latency of the message that an action of a stage sends over a hop."""
        return self.latency[hop] if self.latency else 0.0

    def link_of(self, hop: int, backward: bool, ranks: tuple[int, int]) -> Hashable:
        """Return the link of a message over a hop. ranks: the sender and the receiver."""
        return self.links[hop][backward] if self.links else ranks


@dataclass(frozen=True)
class Span:
    """One action, with its start and its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Every rank's actions in order, with their times."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The end of the last action. The first one starts at 0."""
        return max(spans[-1].end for spans in self.ranks)

    @property
    def busy(self) -> list[float]:
        """The time for which each rank computes."""
        return [sum(span.end - span.start for span in spans) for spans in self.ranks]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait: (makespan x ranks - busy) / (makespan x ranks).

        With equal stages, (p-1)/(m+p-1) for 1F1B and GPipe, and (p-1)/(v m+p-1) for interleaved; less with
        `Schedule.hands_back`. p, m, v: see `bubble_over_ideal`.
        """
        return 1 - sum(self.busy) / (self.makespan * len(self.ranks))

    @property
    def bubble_over_ideal(self) -> float:
        """Waiting time / computing time (Narayanan et al. 2021, section 2.2).

        With equal stages, (p-1)/m for 1F1B and GPipe and (p-1)/(v m) for interleaved; less with `Schedule.hands_back`.
        p: ranks, m: microbatches, v: stages of each rank.
        """
        return self.makespan * len(self.ranks) / sum(self.busy) - 1

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Every rank's actions in order, as in `Schedule`."""
        return tuple(tuple(span.action for span in spans) for spans in self.ranks)


def needs(stages: int, stage: int, kind: Kind) -> list[tuple[Kind, int]]:
    """Return the (kind, stage) that must run for a microbatch before `kind` of `stage`."""
    if kind is Kind.F:
        return [(Kind.F, stage - 1)] if stage else []
    if kind is Kind.W:
        return [(Kind.B, stage)]
    return [(Kind.F, stage), *([(Kind.B, stage + 1)] if stage < stages - 1 else [])]


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Simulate a schedule. Each rank runs its actions in order and waits for the messages that an action needs, but not
    for its own sends. Raises ValueError that names the actions if ranks wait for each other forever.
    """
    simulation = _Simulation(schedule, durations, schedule.most_live)
    at = [0] * schedule.ranks
    left = sum(map(len, schedule.actions))
    while left:
        before = left
        for rank, order in enumerate(schedule.actions):
            while at[rank] < len(order) and (arrival := simulation.arrival(rank, order[at[rank]])) is not None:
                simulation.run(rank, order[at[rank]], arrival)
                at[rank] += 1
                left -= 1
        if left == before:
            stuck = [f"rank {r} at {order[at[r]]}" for r, order in enumerate(schedule.actions) if at[r] < len(order)]
            raise ValueError(f"the schedule never ends: {', '.join(stuck)} wait for each other")
    return simulation.timeline()


def simulate_message_driven(
    ranks: int, microbatches: int, limit: int, durations: Durations, hands_back: bool = False
) -> Timeline:
    """Simulate message-driven order (Singh and Bhatele 2022, Algorithm 2): each rank runs what has arrived, backward
    passes first.

    limit: microbatches in flight. The first rank starts this many forward passes, and one more after each of its
    backward passes. hands_back: see `Schedule`. As in `simulate`, ranks do not wait for their own sends.
    """
    started = min(limit, microbatches)
    simulation = _Simulation(
        Schedule(ranks=ranks, chunks=1, microbatches=microbatches, actions=((),) * ranks, hands_back=hands_back),
        durations,
        started,
    )
    # By rank, each action that it may run next, and when the last message for it arrives.
    inbox: list[dict[Action, float]] = [{} for _ in range(ranks)]
    inbox[0] = {Action(index, 0, Kind.F): 0.0 for index in range(started)}
    # By rank, when it can start its next action.
    starts = {0: 0.0}
    for _ in range(2 * ranks * microbatches):
        # The rank that can start first. No later action can send it a message before that.
        rank = min(starts, key=lambda r: (starts[r], r))
        arrived = [action for action, arrival in inbox[rank].items() if arrival <= starts[rank]]
        action = min(arrived, key=lambda action: (action.kind is Kind.F, action.microbatch))
        del inbox[rank][action]
        simulation.run(rank, action, starts[rank])
        to, follows = rank, None
        if action.kind is Kind.F:
            to, kind = (rank + 1, Kind.F) if rank < ranks - 1 else (rank, Kind.B)
            follows = Action(action.microbatch, 0, kind)
        elif rank:
            to, follows = rank - 1, Action(action.microbatch, 0, Kind.B)
        elif started < microbatches:
            follows = Action(started, 0, Kind.F)
            started += 1
        if follows is not None:
            arrival = simulation.arrival(to, follows)
            assert arrival is not None
            inbox[to][follows] = arrival
        for changed in {rank, to}:
            starts.pop(changed, None)
            if inbox[changed]:
                starts[changed] = max(min(inbox[changed].values()), simulation.free(changed))
    return simulation.timeline()


class _Simulation:
    """The clocks of all ranks and links during a simulation."""

    def __init__(self, schedule: Schedule, durations: Durations, most_live: int) -> None:
        self._schedule, self._durations, self._most_live = schedule, durations, most_live
        self._spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
        self._done: Counter[tuple[int, Kind]] = Counter()
        # When the output of (kind, stage, microbatch) arrives where it is needed.
        self._there: dict[tuple[Kind, int, int], float] = {}
        self._ended: dict[tuple[Kind, int, int], float] = {}
        self._link_free: dict[Hashable, float] = {}

    def arrival(self, rank: int, action: Action) -> float | None:
        """Return when the last input of an action arrives; None if an input has not been computed yet."""
        stage = self._schedule.stage(rank, action.chunk)
        latest = 0.0
        for kind, source in needs(self._schedule.stages, stage, action.kind):
            known = self._ended if source == stage else self._there
            at = known.get((kind, source, action.microbatch))
            if at is None:
                return None
            latest = max(latest, at)
        return latest

    def free(self, rank: int) -> float:
        """Return when a rank has finished its actions so far."""
        return self._spans[rank][-1].end if self._spans[rank] else 0.0

    def run(self, rank: int, action: Action, arrival: float) -> None:
        """Run an action at `arrival`, or once the rank is free, and send its output."""
        stage = self._schedule.stage(rank, action.chunk)
        start = max(arrival, self.free(rank))
        end = start + self._durations.of(action, stage, self._schedule.splits_backward)
        first = self._hands_back_first(rank, action)
        out = start + self._durations.until_handed_back(action, stage) if first else end
        self._spans[rank].append(Span(action, start, end))
        self._done[rank, action.kind] += 1
        key = (action.kind, stage, action.microbatch)
        self._ended[key] = end
        to = stage + 1 if action.kind is Kind.F else stage - 1
        if action.kind is not Kind.W and 0 <= to < self._schedule.stages:
            hop, target = min(stage, to), self._schedule.rank_and_chunk(to)[0]
            late = self._durations.latency_of(action, stage, hop)
            link = self._durations.link_of(hop, action.kind is Kind.B, (rank, target))
            self._there[key] = out if rank == target else self._send(link, hop, out) + late

    def timeline(self) -> Timeline:
        return Timeline(tuple(map(tuple, self._spans)))

    def _hands_back_first(self, rank: int, action: Action) -> bool:
        if not self._schedule.hands_back or self._schedule.splits_backward or action.kind is not Kind.B:
            return False
        forwards = self._done[rank, Kind.F]
        ahead = self._schedule.microbatches * self._schedule.chunks - forwards
        return hands_back_first(ahead, forwards - self._done[rank, Kind.B], self._most_live)

    def _send(self, link: Hashable, hop: int, now: float) -> float:
        sent = max(now, self._link_free.get(link, 0.0)) + self._durations.transfer[hop]
        self._link_free[link] = sent
        return sent
