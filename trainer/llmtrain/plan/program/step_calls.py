"""Every collective and message of one optimizer step of a rank, from its plan alone. No torch in here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import axis_tiers, tier_between
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.facts import Device
from llmtrain.plan.pipeline.actions import Action, Kind, hands_back_first, peak_live
from llmtrain.plan.plan import Plan
from llmtrain.plan.pools import tied_bytes, tied_pair
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import Reduce
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.program.tensor_calls import TensorCalls
from llmtrain.plan.program.transfers import UnitTraffic, lane_members, transfers, unit_traffic
from llmtrain.plan.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, or one message that this rank sends. ranks: of the group, in order; of a message, the sender and
    the receiver."""

    ranks: tuple[int, ...]
    traffic: Traffic


@dataclass(frozen=True)
class StepCalls:
    """The calls of one step of a rank of the run. device: what the ranks compute on."""

    plan: Plan
    rank: int
    device: Device

    def all(self) -> Iterator[Call]:
        """Yield all calls but the sum of the step's scalars."""
        yield from self.sharding()
        yield from self.tensor()
        yield from self.messages()
        yield from self.replicas()

    def sharding(self) -> Iterator[Call]:
        """Yield the gathers and reductions of model states, and the updates after the step."""
        units = self._units
        every = [*transfers(self._programs.step, units), *(one for unit in units for one in unit.update())]
        placements = {unit.spec.name: unit.placement for unit in units}
        for transfer in every:
            yield Call(
                lane_members(self.plan.grid, self.rank, placements[transfer.unit], transfer.lane), transfer.traffic
            )
        for unit in units:
            yield from self._replicated_updates(unit)

    def tensor(self) -> Iterator[Call]:
        """Yield the collectives inside of layers that tensor parallelism shards."""
        calls, group = TensorCalls(self.plan, self.device), tuple(self.plan.grid.group_of(self.rank, Axis.TENSOR))
        for action, separate in self._actions():
            for op, size in calls.of(action.kind, self._programs.spec.stages[action.chunk], separate):
                yield Call(group, self._traffic("tensor", op, Axis.TENSOR, size, len(group)))
            if separate and not self.plan.pipeline.schedule.splits_backward:
                for op, size in calls.of(Kind.W, self._programs.spec.stages[action.chunk], separate):
                    yield Call(group, self._traffic("tensor", op, Axis.TENSOR, size, len(group)))

    def messages(self) -> Iterator[Call]:
        """Yield the messages that this rank sends to the ranks of other pipeline stages."""
        schedule, plan = self.plan.pipeline.schedule, self.plan
        parts = plan.grid.degree(Axis.TENSOR) if plan.sequence_parallel else 1
        size = plan.batch.microbatch * (plan.batch.sequence_length // parts) * plan.model.hidden * plan.compute_bytes
        line = plan.grid.group_of(self.rank, Axis.PIPELINE)
        for action in self._programs.spec.actions:
            stage = self._programs.spec.stages[action.chunk].stage
            target = stage + (1 if action.kind is Kind.F else -1)
            if action.kind is Kind.W or not 0 <= target < schedule.stages:
                continue
            receiver = line[schedule.place(target)[0]]
            if receiver != self.rank:
                tier = tier_between(plan.tiers, self.rank, receiver)
                yield Call((self.rank, receiver), Traffic("pipeline", "send", tier, size, size, packed=False))

    def replicas(self) -> Iterator[Call]:
        """Yield the sums over ranks that hold the same parameters as others of their stage or of another one."""
        plan, units = self.plan, self._units
        tensor = plan.grid.group_of(self.rank, Axis.TENSOR)
        if plan.sequence_parallel and len(tensor) > 1:
            for size in self._partial_sums(units):
                yield Call(tuple(tensor), self._traffic("replicated", "all_reduce", Axis.TENSOR, size, len(tensor)))
        if plan.sharding.quantization.gradients and len(tensor) > 1:
            stage = tuple(plan.grid.group_of(self.rank, Axis.DATA, Axis.TENSOR))
            size = 4 * sum(unit.spec.numel - unit.spec.replicated for unit in units)
            yield Call(stage, self._sum("replicated", plan.tiers[-1].name, size, len(stage)))
        yield from self._tied(units)

    @cached_property
    def _programs(self) -> Programs:
        return Programs(ProgramSpec.of(self.plan, self.rank))

    @cached_property
    def _units(self) -> list[UnitTraffic]:
        return unit_traffic(self.plan, self.rank)

    def _replicated_updates(self, unit: UnitTraffic) -> Iterator[Call]:
        """Yield the sums that update TP-replicated parameters, which are not packed."""
        for lane, level in unit.replicated_lanes:
            yield Call(
                lane_members(self.plan.grid, self.rank, unit.placement, lane),
                self._sum("update", level.tier, unit.replicated_bytes, level.radix),
            )

    def _partial_sums(self, units: Sequence[UnitTraffic]) -> Iterator[int]:
        """Yield the bytes of the sums of TP-replicated gradients, of which each tensor-parallel rank has a part."""
        by_name = {unit.spec.name: unit for unit in units}
        issues = [issue for one in self._programs.step.passes for point in one.points for issue in point.issues]
        for issue in issues:
            if isinstance(issue, Reduce):
                unit = by_name[issue.unit]
                element = 4 if issue.offset is None else unit.element_bytes
                yield from _sized(unit.spec, element)
        for unit in units:
            if unit.placement.degrees.ranks == 1:
                yield from _sized(unit.spec, 4)

    def _tied(self, units: Sequence[UnitTraffic]) -> Iterator[Call]:
        """Yield the sum of a tied embedding's gradients over the first and the last stage."""
        pair = tied_pair(self.plan, self.rank)
        if pair:
            embedding = next(unit for unit in units if unit.spec.name == "embedding")
            yield Call(pair, self._sum("replicated", tier_between(self.plan.tiers, *pair), tied_bytes(embedding), 2))

    def _actions(self) -> Iterator[tuple[Action, bool]]:
        """Yield each action, and whether its backward pass of the weights is separate from that of the inputs."""
        schedule, spec = self.plan.pipeline.schedule, self._programs.spec
        if schedule.splits_backward or schedule.message_driven:
            yield from ((action, schedule.splits_backward) for action in spec.actions)
            return
        most, live = max(peak_live(schedule)), 0
        ahead = sum(action.kind is Kind.F for action in spec.actions)
        for action in spec.actions:
            layout = spec.stages[action.chunk]
            local = not layout.opens and schedule.place(layout.stage - 1)[0] == schedule.place(layout.stage)[0]
            may = schedule.hands_back and action.kind is Kind.B and not layout.opens and not local
            # The executor asks once it has taken the microbatch out.
            yield action, may and hands_back_first(ahead, live, most)
            ahead -= action.kind is Kind.F
            live += 1 if action.kind is Kind.F else -1

    def _traffic(self, purpose: str, op: str, axis: Axis, size: int, ranks: int) -> Traffic:
        tier = axis_tiers(self.plan.tiers, self.plan.grid, axis)[-1].name
        if op == "all_reduce":
            return self._sum(purpose, tier, size, ranks)
        return Traffic(purpose, op, tier, size, size // ranks * (ranks - 1), packed=False)

    def _sum(self, purpose: str, tier: str, size: int, ranks: int) -> Traffic:
        return Traffic(purpose, "all_reduce", tier, size, 2 * size * (ranks - 1) // ranks, packed=False)


def _sized(spec: UnitSpec, element_bytes: int) -> Iterator[int]:
    if spec.replicated < spec.numel:
        yield (spec.numel - spec.replicated) * element_bytes
