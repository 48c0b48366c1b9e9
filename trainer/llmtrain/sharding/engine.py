"""One engine for every way to spread model states: ZeRO 1-3, MiCS, ZeRO++ and ZeRO-topo are degrees of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from llmtrain.cluster.levels import Degrees
from llmtrain.sharding.collectives import Packing
from llmtrain.sharding.gradients import GradientReducer
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weights import Count, WeightKeeper, WeightPolicy


@dataclass(frozen=True)
class Spread:
    """How model states are spread and how they travel. gradients: how those are packed, None for not at all."""

    degrees: Degrees = field(default_factory=Degrees)
    hops: Hops = field(default_factory=Hops)
    weights: WeightPolicy = field(default_factory=WeightPolicy)
    gradients: Packing | None = None


class Engine:
    """Keeps a model's weights whole where they compute, and its gradients summed where the optimizer steps.

    It acts through hooks on the units' modules and parameters; the model knows nothing of it. used: for units whose
    module computes with weights of another one too (a tied head), the names of those.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        spread: Spread,
        used: dict[str, str],
        count: Count,
    ) -> None:
        self.units = {unit.spec.name: unit for unit in units}
        self._hops = spread.hops
        self.weights = WeightKeeper(self.units, spread.degrees, spread.hops, spread.weights, count)
        self.gradients = GradientReducer(
            self.units, spread.degrees, spread.hops, spread.gradients, count, self.weights.release
        )
        self._cut = spread.degrees.weights > 1
        self._backward = False
        if spread.degrees.optimizer > 1:
            for name in self.units:
                needed = [name, used[name]] if name in used else [name]
                module = model.get_submodule(name)
                module.register_forward_pre_hook(self._before(needed))
                module.register_forward_hook(self._after(needed))

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """Surround all microbatches of one optimizer step."""
        self.weights.start_pass("train")
        yield

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Surround a forward pass that no backward pass follows."""
        self.weights.start_pass("forward")
        yield

    @contextmanager
    def microbatch(self, first: bool, last: bool) -> Iterator[Callable[[Tensor], None]]:
        """Surround one microbatch's forward and backward passes; yields what runs the backward pass from a loss.

        The step's `first` one replaces what the gradients held, the `last` one completes their sums.
        """
        self.gradients.start_microbatch(first, last)
        if self._cut:
            # A weight that autograd keeps is kept as a reference, and gathered anew when it is used.
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield self._run_backward
        else:
            yield self._run_backward
        self.gradients.finish_microbatch()

    def update(self) -> None:
        """Bring all weights up to date with the masters. Collective."""
        for unit in self.units.values():
            self.weights.update(unit)

    def close(self) -> None:
        """Wait for what is on its way, and leave the process groups."""
        self.weights.settle()
        self._hops.close()

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's model states."""
        return sum(unit.nbytes for unit in self.units.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's buffers for whole units and for what travels."""
        rooms = (self.weights, self.gradients)
        return self._hops.nbytes + sum(room.arena.nbytes + room.flights.nbytes for room in rooms)

    def _run_backward(self, loss: Tensor) -> None:
        self._backward = True
        self.weights.start_backward(True)
        loss.backward()
        self._backward = False
        self.weights.start_backward(False)
        for name in self.units:
            self.weights.release(name)

    def _before(self, needed: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object) -> None:
            for name in needed:
                self.weights.need(name)

        return hook

    def _after(self, needed: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            # What is computed again in the backward pass is wanted until its gradients are complete.
            if not self._backward:
                for name in needed:
                    self.weights.release(name)

        return hook

    def _pack(self, tensor: Tensor) -> "Tensor | _Reference":
        owner = self.weights.owner_of(tensor)
        if owner is None:
            return tensor
        return _Reference(owner, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _unpack(self, saved: "Tensor | _Reference") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self.weights.need(saved.unit).as_strided(saved.shape, saved.stride, saved.offset)


@dataclass(frozen=True)
class _Reference:
    """A part of a unit's whole weights, by place."""

    unit: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
