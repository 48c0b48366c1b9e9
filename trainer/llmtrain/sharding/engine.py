"""One engine for all ways to shard model states: ZeRO 1-3, MiCS, ZeRO++ and ZeRO-topo differ in their degrees."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from llmtrain.sharding.collectives import Packing
from llmtrain.sharding.gradient_sums import BackwardPass, Received
from llmtrain.sharding.gradients import GradientReducer
from llmtrain.sharding.replica_groups import ReplicaGroups
from llmtrain.sharding.traffic import Count
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weights import GatheredWeights, WeightPolicy


@dataclass(frozen=True)
class ShardingSpec:
    """How model states travel; each unit's placement says where its states rest. gradients: how gradients are packed;
    None for not packed. replica_groups: ranks beyond the data-parallel ones that hold the same parameters."""

    weights: WeightPolicy = field(default_factory=WeightPolicy)
    gradients: Packing | None = None
    replica_groups: ReplicaGroups = field(default_factory=ReplicaGroups)


class Engine:
    """Gathers a model's weights for computation, and sums its gradients for the optimizer.

    It acts through hooks on the units' modules and parameters; the model knows nothing of it. used: for units whose
    module computes with weights of another one too (a tied head), the names of those.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        sharding: ShardingSpec,
        used: dict[str, str],
        count: Count,
    ) -> None:
        self.units = {unit.spec.name: unit for unit in units}
        self._hops = {id(unit.hops): unit.hops for unit in units}.values()
        self.weights = GatheredWeights(self.units, sharding.weights, count)
        self.gradients = GradientReducer(
            self.units, sharding.gradients, sharding.replica_groups, count, self.weights.release
        )
        self._gathers = any(unit.degrees.weights > 1 for unit in units)
        self._backward = False
        for name in self.units:
            needed = [name, used[name]] if name in used else [name]
            if any(self.units[one].degrees.optimizer > 1 for one in needed):
                module = model.get_submodule(name)
                module.register_forward_pre_hook(self._before(needed))
                module.register_forward_hook(self._after(needed))

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """Enclose all forward and backward passes of one optimizer step."""
        self.weights.start_pass("train")
        # Autograd saves a reference in place of a gathered weight; the weight is gathered again when it is used.
        kept = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if self._gathers else nullcontext()
        with kept:
            yield
        self.gradients.finish()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Enclose forward passes without backward passes."""
        self.weights.start_pass("forward")
        yield
        self.weights.end_forward()

    def backward(self, run: Callable[[], None], backward_passes: Collection[BackwardPass]) -> None:
        """Run one microbatch's backward pass. run: computes it. backward_passes: one for each unit that it uses."""
        self.gradients.start(backward_passes, passing=True)
        self._run_backward(run, [backward_pass.name for backward_pass in backward_passes])
        self.gradients.check(backward_passes)

    def backward_inputs(self, run: Callable[[], None], names: Collection[str]) -> list[Received]:
        """Run a backward pass that defers weight gradients; return the weight gradients that it computed anyway."""
        with self.gradients.held(names) as received:
            self._run_backward(run, names)
        return received

    def backward_weights(
        self, received: list[Received], products: Iterable[Received], backward_passes: Collection[BackwardPass]
    ) -> None:
        """Add one microbatch's weight gradients: those that `backward_inputs` returned, and the deferred `products`.

        products: computed while it is iterated; all gradients of a unit are consecutive.
        """
        self.gradients.start(backward_passes, passing=False)
        self.gradients.take_in(received, products)
        self.gradients.check(backward_passes)

    def update(self) -> None:
        """Update all weights from the masters. Collective."""
        for unit in self.units.values():
            self.weights.update(unit)

    def close(self) -> None:
        """Wait for pending work and leave the process groups."""
        self.weights.updates.finish()
        self.gradients.close()
        for hops in self._hops:
            hops.close()

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's model states."""
        return sum(unit.nbytes for unit in self.units.values()) + self.weights.secondary_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's buffers for gathered units and for communication."""
        held = (self.weights, self.gradients)
        return sum(hops.nbytes for hops in self._hops) + sum(one.pool.nbytes + one.in_flight.nbytes for one in held)

    def _run_backward(self, run: Callable[[], None], names: Collection[str]) -> None:
        self._backward = True
        self.weights.start_backward(True)
        run()
        self._backward = False
        self.weights.start_backward(False)
        for name in names:
            self.weights.release(name)

    def _before(self, needed: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object) -> None:
            for name in needed:
                self.weights.need(name)

        return hook

    def _after(self, needed: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            # A recomputed forward pass runs inside the backward pass, which needs the weights until its gradients are
            # complete.
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
    """A view into a unit's gathered weights."""

    unit: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
