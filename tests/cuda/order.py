"""Whether the ranks of every communicator make the same calls in the same order, and whether all calls can end."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from tests.cuda.nccl_calls import Group

# The name of a communicator, and the number of a call on it.
Place = tuple[str, int]


def disagreements(ranks: Sequence[Sequence[Group]]) -> list[str]:
    """Return what differs between the ranks of communicators. ranks: the communicators of each rank."""
    calls: defaultdict[str, list[list[str]]] = defaultdict(list)
    members: dict[str, int] = {}
    for group in (group for groups in ranks for group in groups):
        calls[group.name].append([call.what for call in group.calls])
        members[group.name] = group.size()
    found = [f"{name} has {len(each)} ranks" for name, each in calls.items() if len(each) != members[name]]
    for name, (first, *others) in calls.items():
        for other in others:
            pairs = [(one, two) for one, two in zip(first, other, strict=False) if one != two]
            if pairs or len(first) != len(other):
                found.append(f"{name}: {len(first)} and {len(other)} calls, {pairs[:1]}")
    return found


def deadlock(ranks: Sequence[Sequence[Group]]) -> list[Place]:
    """Return calls that wait for each other, if there are any: a call starts on all ranks of its communicator, after
    what it comes after on any of them."""
    before: defaultdict[Place, set[Place]] = defaultdict(set)
    for groups in ranks:
        for place, one in _before(groups):
            before[place].add(one)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _before(groups: Sequence[Group]) -> Iterator[tuple[Place, Place]]:
    """Yield each call of a rank with the newest call of each agent that comes before it."""
    acts: defaultdict[str, list[tuple[int, Place]]] = defaultdict(list)
    for group in groups:
        for number, call in enumerate(group.calls):
            acts[call.agent].append((call.number, (group.name, number)))
    known: Mapping[str, list[tuple[int, Place]]] = {agent: sorted(each) for agent, each in acts.items()}
    for group in groups:
        for number, call in enumerate(group.calls):
            for agent, each in known.items():
                # `before` has the call itself.
                newest = call.before.get(agent, 0) - (agent == call.agent)
                place = bisect_right(each, newest, key=lambda act: act[0])
                if place:
                    yield (group.name, number), each[place - 1][1]
