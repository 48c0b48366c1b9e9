"""A unit's model states in memory, each cut by its own degree out of one padded flat buffer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from llmtrain.cluster.levels import Degrees, Level, shard_range
from llmtrain.model.init import initialize
from llmtrain.model.tensors import UnitSpec

# Every shard is a multiple of this many elements: aligned for any kernel, and even for two elements in a byte.
ALIGNMENT = 32

Range = tuple[int, int]


@dataclass(frozen=True)
class ShardRanges:
    """Where the states of one rank lie in a unit padded to `padded` elements; each range lies in the one before."""

    padded: int
    weights: Range
    gradients: Range
    optimizer: Range

    @classmethod
    def of(cls, numel: int, degrees: Degrees, levels: Sequence[Level], place: int) -> "ShardRanges":
        """Cut `numel` elements for the rank at `place` of the data axis."""
        multiple = degrees.ranks * ALIGNMENT if degrees.ranks > 1 else 1
        padded = -(-numel // multiple) * multiple
        numbers = (degrees.weights, degrees.gradients, degrees.optimizer)
        return cls(padded, *(shard_range(levels, place, degree, padded) for degree in numbers))


@dataclass
class ShardedUnit:
    """The states of one unit on this rank, each one-dimensional over its range of `ranges`; padding stays zero.

    weight: in the compute dtype. gradient: fp32 sum over microbatches. master: the fp32 weight that the optimizer
    steps; part of `weight` where that is fp32 and exact. m, v: AdamW's moments, fp32. secondary: second copy of the
    weights, packed as uint8 or in the compute dtype. parameters: the module's, of these shapes; views into the whole
    weights while they are there.
    """

    spec: UnitSpec
    ranges: ShardRanges
    weight: Tensor
    gradient: Tensor
    master: Tensor
    m: Tensor
    v: Tensor
    secondary: Tensor | None
    parameters: tuple[nn.Parameter, ...]
    shapes: tuple[torch.Size, ...]
    _lasting: dict[int, list[Tensor]] = field(default_factory=dict, repr=False)

    def lasting_views(self, flat: Tensor) -> list[Tensor]:
        """Return `views` of a buffer that stays as long as this unit: made once, as they take some 5 us a parameter."""
        found = self._lasting.get(flat.data_ptr())
        if found is None:
            found = self._lasting[flat.data_ptr()] = self.views(flat)
        return found

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return, for each parameter, the view that shows it in a whole flat buffer."""
        ranges = parameter_ranges(self.spec)
        return [flat[start:end].view(shape) for (_, start, end), shape in zip(ranges, self.shapes, strict=True)]

    @property
    def owned_gradient(self) -> Tensor:
        """The part of `gradient` that the optimizer steps with."""
        start, end = (place - self.ranges.gradients[0] for place in self.ranges.optimizer)
        return self.gradient[start:end]

    @property
    def owned_weight(self) -> Tensor:
        """The part of `weight` that the optimizer writes."""
        start, end = (place - self.ranges.weights[0] for place in self.ranges.optimizer)
        return self.weight[start:end]

    @property
    def decayed(self) -> int:
        """Length of the prefix of the optimizer states that weight decay applies to."""
        return self.own(self.spec.decayed)

    def own(self, place: int) -> int:
        """Return how much of this rank's optimizer states lies before `place` of the unit."""
        start, end = self.ranges.optimizer
        return min(max(place - start, 0), end - start)

    def move_weight(self, to: Tensor) -> None:
        """Have `weight` lie in `to`, which is as large; the masters too, where they are part of it."""
        within = self.owned_weight.data_ptr() == self.master.data_ptr()
        self.weight = to.copy_(self.weight)
        if within:
            self.master = self.owned_weight

    def publish(self) -> None:
        """Bring `owned_weight` up to date with `master`."""
        if self.owned_weight.data_ptr() != self.master.data_ptr():
            self.owned_weight.copy_(self.master)

    @property
    def nbytes(self) -> int:
        """Bytes of all states together."""
        states = (self.weight, self.gradient, self.m, self.v, self.secondary)
        shared = self.owned_weight.data_ptr() == self.master.data_ptr()
        return sum(state.nbytes for state in states if state is not None) + (0 if shared else self.master.nbytes)


def build_unit(
    spec: UnitSpec,
    module: nn.Module,
    ranges: ShardRanges,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    exact: bool = True,
) -> ShardedUnit:
    """Give the unit its states, initialised from `seed`; the parameters of `module` get storage once weights are whole.

    exact: whether the weights are the masters as they are, not packed on their way from other ranks.
    """
    start, end = ranges.optimizer
    weight = torch.zeros(ranges.weights[1] - ranges.weights[0], dtype=dtype, device=device)
    offset = start - ranges.weights[0]
    owned = weight[offset : offset + end - start]
    master = owned if dtype == torch.float32 and exact else torch.zeros(end - start, device=device)
    drawn = min(end, spec.numel)
    if drawn > start:
        initialize(spec, start, drawn, seed, master[: drawn - start])
    m, v = torch.zeros_like(master), torch.zeros_like(master)
    gradient = torch.zeros(ranges.gradients[1] - ranges.gradients[0], device=device)
    whole = ranges.weights == (0, ranges.padded)
    shapes = tuple(module.get_parameter(name).shape for name, _, _ in parameter_ranges(spec))
    parameters = attach(spec, module, weight) if whole else _detached(spec, module, weight)
    unit = ShardedUnit(spec, ranges, weight, gradient, master, m, v, None, parameters, shapes)
    unit.publish()
    return unit


def whole_unit(spec: UnitSpec, module: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> ShardedUnit:
    """Give the unit all its states on this one rank."""
    return build_unit(spec, module, ShardRanges.of(spec.numel, Degrees(), (), 0), device, dtype, seed)


def attach(spec: UnitSpec, module: nn.Module, weight: Tensor) -> tuple[nn.Parameter, ...]:
    """Make the parameters of `module` views into the unit's whole flat `weight`, and return them in its order."""
    return tuple(
        _replace(module, name, weight[start:end].view(module.get_parameter(name).shape))
        for name, start, end in parameter_ranges(spec)
    )


def _detached(spec: UnitSpec, module: nn.Module, like: Tensor) -> tuple[nn.Parameter, ...]:
    """Give `module` parameters of the type of `like` that hold nothing yet, and return them."""
    return tuple(_replace(module, name, like.new_empty(0)) for name, _, _ in parameter_ranges(spec))


def _replace(module: nn.Module, name: str, values: Tensor) -> nn.Parameter:
    owner, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(values)
    setattr(module.get_submodule(owner), leaf, parameter)
    return parameter


def parameter_ranges(spec: UnitSpec) -> list[tuple[str, int, int]]:
    """Return (module parameter, start, end) for the unit's flat buffer; stacked tensors make one parameter."""
    ranges: list[tuple[str, int, int]] = []
    for tensor, start, end in zip(spec.tensors, spec.offsets, spec.offsets[1:], strict=False):
        if ranges and ranges[-1][0] == tensor.parameter:
            ranges[-1] = (tensor.parameter, ranges[-1][1], end)
        else:
            ranges.append((tensor.parameter, start, end))
    return ranges
