"""Every collective and message of one optimizer step of a rank, from its plan alone. No torch in here."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import tier_between
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.per_rank.rank_activations import boundary_bytes
from llmtrain.plan.per_rank.replica_groups import replica_groups
from llmtrain.plan.pipeline.actions import Kind, hands_back_first
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import Reduce
from llmtrain.plan.program.pools import averaged_bytes, tied_bytes
from llmtrain.plan.program.tensor_calls import Sized, TensorCalls
from llmtrain.plan.program.transfers import Lane, UnitTraffic, lane_members, unit_traffic
from llmtrain.plan.traffic import Traffic

SCALARS = 3
"""Numbers of a step that are summed over all ranks: the loss, requests to stop, and squares of the gradients."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, or a message that this rank sends. ranks: the ranks of the group, in order; for a message, the
    sender and the receiver. times: how often in a step."""

    ranks: tuple[int, ...]
    traffic: Traffic
    times: int = 1


@dataclass(frozen=True)
class StepCalls:
    """The calls of one step of a rank of the run, in no order. programs: of the rank."""

    plan: Plan
    rank: int
    programs: Programs

    def all(self) -> Iterator[Call]:
        """Yield all calls of a step that is not logged."""
        yield from self.sharding()
        yield from self.tensor()
        yield from self.messages()
        yield from self.replicas()
        yield from self.scalars()

    def sharding(self) -> Iterator[Call]:
        """Yield the gathers and reductions of model states, and the updates after the step."""
        units = self._units
        by_name = {unit.spec.name: unit for unit in units}
        issues = self.programs.step.issue_counts
        issued = [(transfer, times) for issue, times in issues for transfer in by_name[issue.unit].of(issue)]
        updates = [(transfer, 1) for unit in units for transfer in unit.update()]
        members: dict[tuple[Placement, Lane], tuple[tuple[int, ...], str]] = {}
        for transfer, times in (*issued, *updates):
            lane = by_name[transfer.unit].placement, transfer.lane
            if lane not in members:
                ranks = lane_members(self.plan.grid, self.rank, *lane)
                # A level's tier is one along the axes of its placement, and the same for all its groups.
                members[lane] = ranks, self._tier(ranks)
            ranks, tier = members[lane]
            yield Call(ranks, replace(transfer.traffic, tier=tier), times)
        for unit in units:
            yield from self._replicated_updates(unit)

    def tensor(self) -> Iterator[Call]:
        """Yield the collectives inside of layers that tensor parallelism shards."""
        calls, group = TensorCalls(self.plan), tuple(self.plan.grid.group_of(self.rank, Axis.TENSOR))
        if len(group) == 1:
            return
        found: Counter[Sized] = Counter()
        for (kind, chunk, separate), times in self._separated().items():
            layout = self.programs.spec.stages[chunk]
            for sized, each in Counter(calls.of(kind, layout, separate)).items():
                found[sized] += times * each
        for (op, size), times in found.items():
            yield Call(group, self._traffic("tensor", op, group, size), times)

    def messages(self) -> Iterator[Call]:
        """Yield the messages that this rank sends to the ranks of other pipeline stages."""
        schedule, plan = self.plan.pipeline.schedule, self.plan
        size, line = boundary_bytes(plan), plan.grid.group_of(self.rank, Axis.PIPELINE)
        for (kind, chunk), times in self._passes.items():
            target = self.programs.spec.stages[chunk].stage + (1 if kind is Kind.F else -1)
            if kind is Kind.W or not 0 <= target < schedule.stages:
                continue
            receiver = line[schedule.rank_and_chunk(target)[0]]
            if receiver != self.rank:
                pair = (self.rank, receiver)
                yield Call(pair, Traffic("pipeline", "send", self._tier(pair), size, size, packed=False), times)

    def replicas(self) -> Iterator[Call]:
        """Yield the sums over ranks that hold the same parameters as others of their stage or of another one."""
        units, groups = self._units, replica_groups(self.plan, self.rank)
        if partial := groups.get("partial"):
            for size, times in self._partial_sums(units):
                yield Call(partial, self._traffic("replicated", "all_reduce", partial, size), times)
        if stage := groups.get("stage"):
            yield Call(stage, self._sum("replicated", stage, averaged_bytes(units)))
        if pair := groups.get("tied"):
            embedding = next(unit for unit in units if unit.spec.name == "embedding")
            yield Call(pair, self._sum("replicated", pair, tied_bytes(embedding)))

    def scalars(self, logged: bool = False) -> Iterator[Call]:
        """Yield the sum of the step's numbers over all ranks, in fp64. logged: whether it has each rank's seconds."""
        everyone = tuple(range(self.plan.grid.world))
        if len(everyone) > 1:
            size = 8 * (SCALARS + (len(everyone) if logged else 0))
            yield Call(everyone, self._sum("scalars", everyone, size))

    @cached_property
    def _units(self) -> list[UnitTraffic]:
        return unit_traffic(self.plan, self.rank)

    def _replicated_updates(self, unit: UnitTraffic) -> Iterator[Call]:
        """Yield the sums that update TP-replicated parameters, which are not packed."""
        for lane, _ in unit.replicated_lanes:
            ranks = lane_members(self.plan.grid, self.rank, unit.placement, lane)
            yield Call(ranks, self._sum("update", ranks, unit.replicated_bytes))

    def _partial_sums(self, units: Sequence[UnitTraffic]) -> Iterator[tuple[int, int]]:
        """Yield the bytes of the sums of TP-replicated gradients, of which each tensor-parallel rank has a part, and
        how often."""
        by_name = {unit.spec.name: unit for unit in units}
        sums: list[tuple[UnitSpec, int, int]] = []
        for issue, times in self.programs.step.issue_counts:
            if isinstance(issue, Reduce):
                unit = by_name[issue.unit]
                element_bytes = unit.reduced_bytes(issue.offset is not None)
                sums.append((unit.spec, element_bytes, times))
        sums += [(unit.spec, unit.sum_bytes, 1) for unit in units if unit.placement.degrees.ranks == 1]
        for spec, element_bytes, times in sums:
            if spec.replicated_numel:
                yield spec.replicated_numel * element_bytes, times

    @cached_property
    def _passes(self) -> Counter[tuple[Kind, int]]:
        """How often a step has each kind of pass of each chunk."""
        return Counter((one.kind, one.chunk) for one in self.programs.spec.actions)

    def _separated(self) -> Counter[tuple[Kind, int, bool]]:
        """Return the same by whether the backward pass of the weights is separate from that of the inputs. In one
        action, both are passes of their own."""
        schedule, spec, found = self.plan.pipeline.schedule, self.programs.spec, Counter[tuple[Kind, int, bool]]()
        for (kind, chunk), times in self._passes.items():
            found[kind, chunk, schedule.splits_backward] += times
        if schedule.splits_backward or schedule.message_driven or not schedule.hands_back:
            return found
        ahead, live = sum(action.kind is Kind.F for action in spec.actions), 0
        for action in spec.actions:
            layout = spec.stages[action.chunk]
            local = (
                not layout.opens
                and schedule.rank_and_chunk(layout.stage - 1)[0] == schedule.rank_and_chunk(layout.stage)[0]
            )
            may = action.kind is Kind.B and not layout.opens and not local
            # As in the executor, `live` still includes the microbatch of this backward pass.
            if may and hands_back_first(ahead, live, schedule.most_live):
                found[Kind.B, action.chunk, False] -= 1
                found.update([(Kind.B, action.chunk, True), (Kind.W, action.chunk, True)])
            ahead -= action.kind is Kind.F
            live += 1 if action.kind is Kind.F else -1
        return found

    def _traffic(self, purpose: str, op: str, group: Sequence[int], size: int) -> Traffic:
        if op == "all_reduce":
            return self._sum(purpose, group, size)
        ranks = len(group)
        return Traffic(purpose, op, self._tier(group), size, size // ranks * (ranks - 1), packed=False)

    def _sum(self, purpose: str, group: Sequence[int], size: int) -> Traffic:
        ranks = len(group)
        return Traffic(purpose, "all_reduce", self._tier(group), size, 2 * size * (ranks - 1) // ranks, packed=False)

    def _tier(self, group: Sequence[int]) -> str:
        return tier_between(self.plan.tiers, min(group), max(group))
