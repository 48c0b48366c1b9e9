"""Whether the ranks of each group start the same collectives in the same order. No torch in here."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from llmtrain.plan.program.transfers import Lane
from llmtrain.plan.validation.grid import RankPrograms, Started


def group_problems(ranks: RankPrograms) -> Iterator[str]:
    """Yield the first difference between each rank and the first rank of its group, lane by lane."""
    by_program: dict[tuple[int, int], dict[Lane, list[Started]]] = {}

    def lanes(rank: int) -> dict[Lane, list[Started]]:
        program, part = ranks.programs[rank], ranks.part(rank)
        key = id(program), id(part)
        if key not in by_program:
            by_program[key] = part.lanes(program)
        return by_program[key]

    compared: set[tuple[int, Lane]] = set()
    for rank in ranks.programs:
        for lane, started in lanes(rank).items():
            first, *others = ranks.members(rank, lane, started[0][0].unit)
            for other in others:
                if (other, lane) in compared or lanes(first) is lanes(other):
                    continue
                compared.add((other, lane))
                found = _difference(lanes(first).get(lane, []), lanes(other).get(lane, []))
                if found is not None:
                    yield f"rank {other}, {_said(found, lane, first)}"


Difference = tuple[int, Started | None, Started | None]


def _difference(first: Sequence[Started], other: Sequence[Started]) -> Difference | None:
    """Return the first number at which two ranks differ, and what each of them starts there."""
    for number, (one, another) in enumerate(zip_longest(first, other), 1):
        if one is None or another is None or one[0] != another[0]:
            return number, one, another
    return None


def _said(difference: Difference, lane: Lane, first: int) -> str:
    number, one, another = difference
    where = "end" if another is None else _where(another)
    return (
        f"{where}: number {number} of its {lane.kind} collectives over {lane.span} ranks is {_named(another)}, but "
        f"rank {first} of its group has {_named(one)}" + ("" if one is None else f" ({_where(one)})")
    )


def _where(started: Started) -> str:
    return "update" if started[0].traffic.purpose == "update" else str(started[1])


def _named(started: Started | None) -> str:
    if started is None:
        return "missing"
    transfer = started[0]
    traffic = transfer.traffic
    return f"the {traffic.op} of {transfer.unit} for {traffic.purpose} with {traffic.size} bytes"
