"""One rank's step, as a sequence of waits. No torch in here."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from llmtrain.cluster.layout import Axis
from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.pipeline.stage_layout import StageLayout
from llmtrain.plan.program.instructions import At, Pass
from llmtrain.plan.validation.in_flight import InFlightCollectives
from llmtrain.plan.validation.places import ProgramPlace
from llmtrain.plan.validation.world import ProgramWait, World


class RankRun:
    """Follows the program of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        grid = world.ranks.plan.grid
        self._world, self._rank, self._program = world, rank, world.ranks.programs[rank]
        self._stages = world.ranks.part(rank).spec.stages
        self._line = grid.group_of(rank, Axis.PIPELINE)[0]
        tensor = grid.group_of(rank, Axis.TENSOR)
        self._tensor = [rank] if Axis.TENSOR in world.symmetric_axes else tensor
        self._in_flight = InFlightCollectives(world, rank)
        self._received: Counter[tuple[int, Kind, int]] = Counter()
        self._ran: set[Action] = set()

    def run(self) -> Iterator[ProgramWait]:
        """Yield what the rank waits for, one after another, in a step, in the updates after it, and at the start of the
        next one; or in an evaluation. What is yielded is not ready yet; the caller continues once it is."""
        for issue in self._program.start:
            yield from self._in_flight.issue(ProgramPlace(), issue)
        evaluates = self._world.ranks.groups is not None
        driven = self._world.ranks.plan.pipeline.schedule.message_driven and not evaluates
        for one in self._driven() if driven else self._program.passes:
            if isinstance(one, ProgramWait):
                yield one
            elif one.action.chunk < len(self._stages):
                yield from self._pass(one)
        yield from self._in_flight.all("end of the passes")
        if evaluates:
            return
        yield from self._in_flight.finish(ProgramPlace(ends=True), self._program.finish)
        self._in_flight.update()
        for issue in self._program.start:
            yield from self._in_flight.issue(ProgramPlace(), issue)
        yield from self._in_flight.all("start of the next step")

    def _pass(self, one: Pass) -> Iterator[ProgramWait]:
        action, layout = one.action, self._stages[one.action.chunk]
        needed = {Kind.F: None, Kind.B: Kind.F, Kind.W: Kind.B}[action.kind]
        before = None if needed is None else Action(action.microbatch, action.chunk, needed)
        if before is not None and before not in self._ran:
            self._world.problems.append(f"rank {self._rank}, pass {action}: it runs before pass {before}")
        self._ran.add(action)
        yield from self._receive(action, layout)
        yield from self._meet(ProgramPlace(action))
        for point in one.points:
            place = ProgramPlace(action, point)
            for issue in point.issues:
                yield from self._in_flight.issue(place, issue)
            if point.at is At.USE:
                yield from self._in_flight.use(place, point.unit)
                yield from self._meet(place)
        target = layout.stage + (1 if action.kind is Kind.F else -1)
        if action.kind is not Kind.W and 0 <= target < self._world.ranks.plan.pipeline.schedule.stages:
            self._world.sent.setdefault((self._line, action.kind, layout.stage), []).append(action.microbatch)

    def _receive(self, action: Action, layout: StageLayout) -> Iterator[ProgramWait]:
        """Take the next message of the channel that an action needs."""
        channel = self._channel(action.kind, layout)
        if channel is None:
            return
        if not self._arrived(channel):
            yield ProgramWait(
                ProgramPlace(action), lambda: self._arrived(channel), lambda: f"the message of stage {channel[2]}"
            )
        microbatch = self._world.sent[channel][self._received[channel]]
        self._received[channel] += 1
        if microbatch != action.microbatch:
            self._world.problems.append(
                f"rank {self._rank}, pass {action}: it receives the message of microbatch {microbatch}, as stage "
                f"{channel[2]} sends that one first"
            )

    def _channel(self, kind: Kind, layout: StageLayout) -> tuple[int, Kind, int] | None:
        source = layout.stage - 1 if kind is Kind.F else layout.stage + 1
        inside = 0 <= source < self._world.ranks.plan.pipeline.schedule.stages
        return (self._line, kind, source) if inside and kind is not Kind.W else None

    def _arrived(self, channel: tuple[int, Kind, int]) -> bool:
        return len(self._world.sent.get(channel, ())) > self._received[channel]

    def _meet(self, place: ProgramPlace) -> Iterator[ProgramWait]:
        """Wait until the tensor-parallel ranks compute at the same place."""
        if len(self._tensor) == 1:
            return
        met = self._world.met
        own = met.setdefault(self._rank, [])
        own.append(str(place))
        number = len(own)

        def absent() -> list[int]:
            return [
                rank
                for rank in self._tensor
                if len(met.get(rank, ())) < number or met[rank][number - 1] != own[number - 1]
            ]

        if absent():
            yield ProgramWait(
                place, lambda: not absent(), lambda: f"tensor-parallel rank {absent()[0]}, which is not there"
            )

    def _driven(self) -> Iterator[ProgramWait | Pass]:
        """Yield the passes in an order that the messages allow, and the waits for them. The first tensor-parallel rank
        chooses for all."""
        passes = {kind: [one for one in self._program.passes if one.action.kind is kind] for kind in Kind}
        chosen, done = self._world.choices.setdefault(self._tensor[0], []), Counter[Kind]()
        for number in range(len(passes[Kind.F]) + len(passes[Kind.B])):
            if self._rank == self._tensor[0]:
                if not self._possible(passes, done):
                    place = f"after {number} passes"
                    yield ProgramWait(
                        place, lambda: bool(self._possible(passes, done)), lambda: "the message of another stage"
                    )
                chosen.append(self._possible(passes, done)[0])
            elif len(chosen) <= number:
                there = partial(_longer, chosen, number)
                yield ProgramWait(f"after {number} passes", there, lambda: "the choice of the next pass")
            kind = chosen[number]
            if done[kind] < len(passes[kind]):
                yield passes[kind][done[kind]]
            done[kind] += 1

    def _possible(self, passes: dict[Kind, list[Pass]], done: Counter[Kind]) -> list[Kind]:
        """Return the kinds of passes that a rank may run next, the preferred one first."""
        layout, limit, found = self._stages[0], self._world.ranks.plan.pipeline.limit, []
        forward, backward = done[Kind.F], done[Kind.B]
        for kind in (Kind.B, Kind.F) if self._world.backward_first else (Kind.F, Kind.B):
            channel = self._channel(kind, layout)
            arrived = channel is None or self._arrived(channel)
            allowed = backward < forward if kind is Kind.B else not layout.opens or forward - backward < limit
            if done[kind] < len(passes[kind]) and arrived and allowed:
                found.append(kind)
        return found


def _longer(chosen: Sequence[Kind], number: int) -> bool:
    return len(chosen) > number
