"""The model states of a unit on this rank: each is a shard, of its own degree, of one padded flat buffer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor, nn

from llmtrain.cluster.levels import Degrees, shard_range
from llmtrain.comm.waits import AllOf, Ticket
from llmtrain.model.init import initialize
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.placement import Placement
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.optimizer_shard import (
    ElementRange,
    OptimizerShard,
    OptimizerStates,
    SeparateMasters,
    StepRange,
    StepRule,
    WeightsAreMasters,
)
from llmtrain.sharding.parameters import UnitParameters

# Elements of states that are read from files, or copied from a device, at a time.
CHUNK = 2**22


@dataclass(frozen=True)
class ShardRanges:
    """The ranges of one rank's shards in a unit padded to `padded` elements; each lies within the one before."""

    padded: int
    weights: ElementRange
    gradients: ElementRange
    optimizer: ElementRange

    @classmethod
    def of(cls, numel: int, placement: Placement, data_rank: int) -> "ShardRanges":
        """Return the ranges of rank `data_rank` along the placement's axes. numel: of the unit, without padding."""
        padded, degrees = placement.padded(numel), placement.degrees
        numbers = (degrees.weights, degrees.gradients, degrees.optimizer)
        return cls(padded, *(shard_range(placement.levels, data_rank, degree, padded) for degree in numbers))


class ShardedUnit:
    """The states of one unit on this rank, each one-dimensional over its range of `ranges`; padding stays zero.

    hops: collectives over the ranks that share the unit, and its placement. weight: in the compute dtype; `[0]` while
    it is offloaded. gradient: sum over microbatches, in fp32 or in the compute dtype; `[0]` where it is offloaded.
    optimizer: the fp32 masters and AdamW's moments. parameters: the module's. at_rest: the weight shard in the host's
    memory, if steps on the host write it there; `weight` then has, in a step, only the first elements, which the device
    steps. Else None.
    """

    def __init__(
        self, spec: UnitSpec, module: nn.Module, hops: Hops, dtype: torch.dtype, seed: int, device: torch.device
    ) -> None:
        """Create the states, with weights initialised from `seed`; where optimizer states rest elsewhere, without the
        moments, which are made there. dtype: the compute dtype; fp32 if the weights are the masters."""
        self.spec, self.hops = spec, hops
        self.ranges = ranges = ShardRanges.of(spec.numel, hops.placement, hops.data_rank)
        start, end = ranges.optimizer
        resident = 0 if hops.placement.moves_weights else ranges.weights[1] - ranges.weights[0]
        summed = 0 if hops.placement.moves_gradients else ranges.gradients[1] - ranges.gradients[0]
        sums = dtype if hops.placement.gradients == "compute" else torch.float32
        with hops.allocating():
            self.weight = torch.zeros(resident, dtype=dtype, device=device)
            self.gradient = torch.zeros(summed, dtype=sums, device=device)
        masters = self.owned_weight if self.masters_are_weights else torch.zeros(end - start, device=device)
        drawn = min(end, spec.numel)
        if drawn > start:
            initialize(spec, start, drawn, seed, masters[: drawn - start])
        rule, moments = self.step_rule(end, hops.placement.backend), hops.placement.optimizer_on == "device"
        self.optimizer: OptimizerStates = OptimizerShard(rule, ranges.optimizer, masters, moments=moments)
        self.parameters = UnitParameters(spec, module, self.weight, resident == ranges.padded)
        self.at_rest: Tensor | None = None
        if resident:
            self.publish()

    @property
    def degrees(self) -> Degrees:
        """Over how many ranks each state is sharded."""
        return self.hops.placement.degrees

    @property
    def wire(self) -> torch.dtype | None:
        """The dtype in which ranks send each other gradients that are not packed; None for that which these have."""
        return None if self.hops.placement.reduce == "fp32" else self.weight.dtype

    @property
    def owned_gradient(self) -> Tensor:
        """The part of `gradient` that the optimizer steps with: `[n]` for the `n` elements of `ranges.optimizer`, of
        its dtype."""
        start, end = (bound - self.ranges.gradients[0] for bound in self.ranges.optimizer)
        return self.gradient[start:end]

    @property
    def owned_weight(self) -> Tensor:
        """The part of `weight` that the optimizer writes: `[n]` for the `n` elements of `ranges.optimizer`, of its
        dtype."""
        start, end = (bound - self.ranges.weights[0] for bound in self.ranges.optimizer)
        return self.weight[start:end]

    def own(self, element: int) -> int:
        """Return how many elements of this rank's optimizer shard lie before an element of the unit."""
        start, end = self.ranges.optimizer
        return min(max(element - start, 0), end - start)

    def move_weight(self, to: Tensor) -> None:
        """Move the weight shard to `to`, of the same shape and dtype; the masters too, if they are the weights."""
        self.weight = to.copy_(self.weight)
        if self.masters_are_weights:
            self.optimizer.use_masters(self.owned_weight)

    def step_ahead(self) -> None:
        """Start to step what may be stepped before the norm of the gradients is known: `owned_gradient` is complete."""
        self.optimizer.step_ahead(self.owned_gradient, self.owned_weight)

    def step(self, numbers: AdamWStep) -> Ticket | None:
        """Step the masters with `owned_gradient`, and round them into `owned_weight`. Return a ticket of what is not
        done yet; None if all is done."""
        return self.optimizer.step(self.ranges.optimizer, self.owned_gradient, numbers, self.owned_weight)

    def step_by_ranges(self, numbers: AdamWStep, by_ranges: Callable[[StepRange], None]) -> Ticket | None:
        """Step as `step` does, with offloaded gradients. by_ranges: steps consecutive ranges."""
        weight, offset = self.owned_weight, self.ranges.optimizer[0]
        tickets = list[Ticket]()

        def step_range(within: ElementRange, gradient: Tensor) -> Ticket | None:
            own = weight[within[0] - offset : within[1] - offset]
            ticket = self.optimizer.step(within, gradient, numbers, own)
            tickets.extend([] if ticket is None else [ticket])
            return ticket

        by_ranges(step_range)
        return AllOf(tickets) if tickets else None

    def publish(self) -> None:
        """Round the masters into `owned_weight`, after something else than a step wrote them; into `at_rest` too, which
        nothing may read meanwhile."""
        if self.masters_are_weights:
            return
        (start, end), weight = self.ranges.optimizer, self.owned_weight if self.at_rest is None else self.at_rest
        for first in range(start, end, CHUNK):
            last = min(first + CHUNK, end)
            weight[first - start : last - start].copy_(self.optimizer.read("master", first, last))
        if self.at_rest is not None:
            self.weight.copy_(weight[: len(self.weight)])

    @property
    def nbytes(self) -> int:
        """Bytes of all states together."""
        shared = self.owned_weight.nbytes if self.masters_are_weights else 0
        return self.weight.nbytes + self.gradient.nbytes + self.optimizer.nbytes - shared

    @property
    def masters_are_weights(self) -> bool:
        """Whether the fp32 masters are the weights themselves."""
        return self.hops.placement.masters == "weights"

    def step_rule(self, end: int, backend: str) -> StepRule:
        """Return how ranges of the unit up to element `end` are stepped. backend: the kernel."""
        return StepRule(self.spec, end, backend, WeightsAreMasters() if self.masters_are_weights else SeparateMasters())


def unsharded_unit(
    spec: UnitSpec, module: nn.Module, device: torch.device, dtype: torch.dtype, seed: int
) -> ShardedUnit:
    """Return the unit with all its states on this rank."""
    masters: Literal["weights", "separate"] = "weights" if dtype == torch.float32 else "separate"
    alone = Hops(Placement(axes=(), degrees=Degrees(), levels=(), masters=masters))
    return ShardedUnit(spec, module, alone, dtype, seed, device)
