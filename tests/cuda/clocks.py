"""Vector clocks: which of two accesses to memory happens before the other, whatever the speeds of streams and threads.

An agent is a thread of the host, a CUDA stream, or the stream of a communicator. It acts in order, and each of its acts
has the next number. What it knows of another agent is the newest act that has happened for certain (Mattern, 1988).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

Knowledge = dict[str, int]


class Extent(NamedTuple):
    """Bytes `[start, end)` of a piece of memory."""

    memory: int
    start: int
    end: int


class _Access(NamedTuple):
    start: int
    end: int
    writes: bool
    agent: str
    number: int
    what: str


class Clocks:
    """Finds races: two acts on the same bytes, at least one of which writes, in no order. races: how often each pair of
    acts was found."""

    def __init__(self) -> None:
        self._known: defaultdict[str, Knowledge] = defaultdict(dict)
        self._accesses: defaultdict[int, list[_Access]] = defaultdict(list)
        self.races = Counter[str]()

    def agents(self) -> list[str]:
        """Return all agents that have acted or learned."""
        return list(self._known)

    def known(self, agent: str) -> Knowledge:
        """Return what happens before the agent's next act, its own acts included."""
        return dict(self._known[agent])

    def learn(self, agent: str, knowledge: Knowledge) -> None:
        """Let an agent's next act come after what is in `knowledge`."""
        own = self._known[agent]
        for other, number in knowledge.items():
            if own.get(other, 0) < number:
                own[other] = number

    def act(self, agent: str, what: str, reads: Iterable[Extent] = (), writes: Iterable[Extent] = ()) -> int:
        """Let an agent act, and return the number of the act."""
        own = self._known[agent]
        number = own[agent] = own.get(agent, 0) + 1
        for extent in reads:
            self._touch(agent, number, what, extent, False)
        for extent in writes:
            self._touch(agent, number, what, extent, True)
        return number

    def _touch(self, agent: str, number: int, what: str, extent: Extent, writes: bool) -> None:
        _, start, end = extent
        own, kept = self._known[agent], list[_Access]()
        for access in self._accesses[extent.memory]:
            before = own.get(access.agent, 0) >= access.number
            if access.start < end and start < access.end and (writes or access.writes) and not before:
                self.races[f"{access.what} on {access.agent} and {what} on {agent}"] += 1
            covered = before and start <= access.start and access.end <= end
            # What comes after this act comes after that one too.
            if not (covered and (writes or (not access.writes and access.agent == agent))):
                kept.append(access)
        kept.append(_Access(start, end, writes, agent, number, what))
        self._accesses[extent.memory] = kept
