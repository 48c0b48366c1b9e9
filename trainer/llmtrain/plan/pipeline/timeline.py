"""When each action of a pipeline runs, given how long each takes. No torch in here."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from llmtrain.plan.pipeline.actions import Action, Kind, Schedule, hands_back_first, peak_live


@dataclass(frozen=True)
class Durations:
    """Seconds, or any other unit of time.

    forward, backward, weights: of one microbatch in each stage, in the order of the model; backward is that of the
    inputs alone, and a schedule that does not have the weights' apart takes both, one after the other. transfer: of one
    message over each hop from a stage to the next and, for gradients, back, which keeps the link busy (bytes /
    bandwidth); hops inside a rank take none. latency: of each hop besides, in which the link is free; none where empty.
    links: of each hop, what the rank of its first stage sends over, and that of its second: messages over the same,
    such as a node's card, wait for each other; where empty, every rank has a link of its own to every other one.
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
        """Return durations that are the same for every stage and hop."""
        return cls([forward] * stages, [backward] * stages, [weights] * stages, [transfer] * (stages - 1))

    def of(self, action: Action, stage: int, splits_backward: bool) -> float:
        """Return how long an action of a stage takes."""
        if action.kind is Kind.F:
            return self.forward[stage]
        if action.kind is Kind.W:
            return self.weights[stage]
        return self.backward[stage] + (0.0 if splits_backward else self.weights[stage])

    def until_handed_back(self, action: Action, stage: int) -> float:
        """Return how long a backward pass of a stage takes to hand back, where it does that first."""
        return self.backward[stage]

    def latency_of(self, action: Action, stage: int, hop: int) -> float:
        """Return the latency of what an action of a stage sends over a hop."""
        return self.latency[hop] if self.latency else 0.0

    def link_of(self, hop: int, backward: bool, ranks: tuple[int, int]) -> Hashable:
        """Return what a message goes over on a hop. ranks: from which and to which."""
        return self.links[hop][backward] if self.links else ranks


@dataclass(frozen=True)
class Span:
    """One action, from start to end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every rank does when: its actions in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end: 0 to here."""
        return max(spans[-1].end for spans in self.ranks)

    @property
    def busy(self) -> list[float]:
        """How long each rank computes."""
        return [sum(span.end - span.start for span in spans) for spans in self.ranks]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait: (makespan x ranks - busy) / (makespan x ranks).

        (p-1)/(m+p-1) for 1F1B and GPipe, (p-1)/(v m+p-1) when interleaved; less where the schedule hands back.
        """
        return 1 - sum(self.busy) / (self.makespan * len(self.ranks))

    @property
    def bubble_over_ideal(self) -> float:
        """Waiting per computing, the textbook's bubble (Narayanan et al. 2021, section 2.2): (p-1)/m for 1F1B and
        GPipe, (p-1)/(v m) when interleaved."""
        return self.makespan * len(self.ranks) / sum(self.busy) - 1

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Every rank's actions in order, as a `Schedule` takes them."""
        return tuple(tuple(span.action for span in spans) for spans in self.ranks)


def needs(stages: int, stage: int, kind: Kind) -> list[tuple[Kind, int]]:
    """Return the (kind, stage) that have to be done for a microbatch before `kind` of `stage` is."""
    if kind is Kind.F:
        return [(Kind.F, stage - 1)] if stage else []
    if kind is Kind.W:
        return [(Kind.B, stage)]
    return [(Kind.F, stage), *([(Kind.B, stage + 1)] if stage < stages - 1 else [])]


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Play a schedule: each rank does its actions in order, waits for what an action needs, and does not wait for what
    it sent. Raises ValueError where ranks wait for each other forever, naming what they wait for.
    """
    play = _Play(schedule, durations, max(peak_live(schedule)))
    at = [0] * schedule.ranks
    left = sum(map(len, schedule.actions))
    while left:
        before = left
        for rank, order in enumerate(schedule.actions):
            while at[rank] < len(order) and (arrival := play.arrival(rank, order[at[rank]])) is not None:
                play.run(rank, order[at[rank]], arrival)
                at[rank] += 1
                left -= 1
        if left == before:
            stuck = [f"rank {r} at {order[at[r]]}" for r, order in enumerate(schedule.actions) if at[r] < len(order)]
            raise ValueError(f"the schedule never ends: {', '.join(stuck)} wait for each other")
    return play.timeline()


def simulate_message_driven(
    ranks: int, microbatches: int, limit: int, durations: Durations, hands_back: bool = False
) -> Timeline:
    """Play AxoNN's rule (Singh and Bhatele 2022, Algorithm 2): each rank does what has arrived, backward first.

    limit: microbatches under way at once; the first rank starts so many forwards, and one more with each backward that
    it ends. hands_back: see `Schedule`. As in `simulate`, what was sent is not waited for.
    """
    started = min(limit, microbatches)
    play = _Play(Schedule(ranks, 1, microbatches, ((),) * ranks, hands_back=hands_back), durations, started)
    # By rank, when all is there for each action that it may do next.
    inbox: list[dict[Action, float]] = [{} for _ in range(ranks)]
    inbox[0] = {Action(index, 0, Kind.F): 0.0 for index in range(started)}
    # When each rank that may do something can start.
    starts = {0: 0.0}
    for _ in range(2 * ranks * microbatches):
        # The rank that can start first: nothing that starts later reaches it before.
        rank = min(starts, key=lambda r: (starts[r], r))
        arrived = [action for action, arrival in inbox[rank].items() if arrival <= starts[rank]]
        action = min(arrived, key=lambda action: (action.kind is Kind.F, action.microbatch))
        del inbox[rank][action]
        play.run(rank, action, starts[rank])
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
            arrival = play.arrival(to, follows)
            assert arrival is not None
            inbox[to][follows] = arrival
        for changed in {rank, to}:
            starts.pop(changed, None)
            if inbox[changed]:
                starts[changed] = max(min(inbox[changed].values()), play.free(changed))
    return play.timeline()


class _Play:
    """The clock of every rank and link."""

    def __init__(self, schedule: Schedule, durations: Durations, most_live: int) -> None:
        self._schedule, self._durations, self._most_live = schedule, durations, most_live
        self._spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
        self._done: Counter[tuple[int, Kind]] = Counter()
        # When the output of (kind, stage, microbatch) is where it is needed.
        self._there: dict[tuple[Kind, int, int], float] = {}
        self._ended: dict[tuple[Kind, int, int], float] = {}
        self._link_free: dict[Hashable, float] = {}

    def arrival(self, rank: int, action: Action) -> float | None:
        """Return when all that an action needs is there; None while something of it has not been computed."""
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
        """Return when a rank has done all that it began."""
        return self._spans[rank][-1].end if self._spans[rank] else 0.0

    def run(self, rank: int, action: Action, arrival: float) -> None:
        """Let a rank do an action as soon as it is free and `arrival` has come, and send what comes out of it."""
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
            hop, target = min(stage, to), self._schedule.place(to)[0]
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
