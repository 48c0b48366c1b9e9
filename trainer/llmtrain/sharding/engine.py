"""One engine for all ways to shard model states: ZeRO 1-3, MiCS, ZeRO++ and ZeRO-topo differ in their degrees."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor, nn

from llmtrain.plan.pipeline.actions import Action
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.instructions import At, Drop, Gather, Issue, Program
from llmtrain.plan.program.workspaces import InFlightBuffers
from llmtrain.plan.traffic import CountTraffic
from llmtrain.sharding.gradient_sums import Received, Take
from llmtrain.sharding.gradients import GradientPolicy, GradientReducer, ignore
from llmtrain.sharding.in_flight import InFlight
from llmtrain.sharding.optimizer_shard import StepsAhead
from llmtrain.sharding.program_cursor import ProgramCursor
from llmtrain.sharding.replica_groups import ReplicaGroups
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weights import GatheredWeights, WeightPolicy

T = TypeVar("T")


@dataclass(frozen=True)
class ShardingSpec:
    """How model states are communicated. Where they are held is in each unit's placement. replica_groups: ranks beyond
    the data-parallel ones that hold the same parameters. in_flight: buffers of gathers and reductions in flight. ahead:
    steps states before the norm is known; None if nothing does."""

    weights: WeightPolicy = field(default_factory=WeightPolicy)
    gradients: GradientPolicy = field(default_factory=GradientPolicy)
    replica_groups: ReplicaGroups = field(default_factory=ReplicaGroups)
    in_flight: InFlightBuffers = field(default_factory=InFlightBuffers)
    ahead: StepsAhead | None = None


class Engine:
    """Gathers a model's weights for computation, and sums its gradients for the optimizer, as the rank's program says.

    It acts through hooks on the units' modules and parameters; the model knows nothing of it. Each hook is a named
    point of the program, and the engine issues what the program has there. Sums over replicas follow the last pass;
    `ReplicaGroups` has them, as the program lists them.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        sharding: ShardingSpec,
        programs: Programs,
        count: CountTraffic,
    ) -> None:
        self.units, self._programs = {unit.spec.name: unit for unit in units}, programs
        self._hops = {id(unit.hops): unit.hops for unit in units}.values()
        step = programs.step
        device, in_flight = units[0].weight.device, sharding.in_flight
        gathers, reductions = (
            InFlight(device, in_flight.count, sizes) for sizes in (in_flight.weights, in_flight.gradients)
        )
        self.weights = GatheredWeights(self.units, sharding.weights, step.weights, gathers, count)
        self.gradients = GradientReducer(
            self.units, sharding.gradients, sharding.replica_groups, reductions, count, self._gradients_complete
        )
        self._ahead = sharding.ahead
        self.gradients.allocate(step.gradients)
        self._cursor, self._busy, self._backward = ProgramCursor(step), set[str](), False
        for name in self.units:
            # A tied head computes with the embedding's weights too.
            needed = (name, "embedding") if name == "head" and programs.spec.tied else (name,)
            gathered = (self.units[one].degrees.optimizer > 1 or one in self.weights.gathered for one in needed)
            # Steps on other threads may still write weights that are not sharded.
            if self._ahead is not None or any(gathered):
                module = model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._before, needed))
                module.register_forward_hook(partial(self._after, needed))

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """Enclose all forward and backward passes of one optimizer step."""
        self.gradients.begin()
        # Autograd saves a reference in place of a gathered weight; the weight is gathered again when it is used.
        gathers = bool(self.weights.gathered)
        kept = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack) if gathers else nullcontext()
        with self._running(self._programs.step), kept:
            yield
        self.gradients.finish()

    @contextmanager
    def evaluation(self, groups: Sequence[int]) -> Iterator[None]:
        """Enclose forward passes without backward passes. groups: microbatches of each group, which passes through all
        chunks together."""
        with self._running(self._programs.evaluation(groups)):
            yield

    def forward(self, action: Action, run: Callable[[], T]) -> T:
        """Run an action's forward pass and return what `run`, which computes it, returns."""
        self._cursor.begin(action)
        return run()

    def backward(self, action: Action, run: Callable[[], None]) -> None:
        """Run an action's backward pass. run: computes it, with all gradients."""
        begun = self._cursor.begin(action)
        self.gradients.start(begun, passing=True)
        self._run_backward(run)
        self.gradients.check()

    def backward_inputs(self, action: Action, run: Callable[[], None], names: Collection[str], hold: Take) -> None:
        """Run a backward pass that defers weight gradients. hold: called with each one that autograd computes anyway.

        names: the units that it uses.
        """
        self._cursor.begin(action)
        with self.gradients.redirected(names, hold):
            self._run_backward(run)

    def unit_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter's unit."""
        return self.gradients.unit_of(parameter)

    def backward_weights(self, action: Action, gradients: Iterable[Received]) -> None:
        """Add one microbatch's weight gradients. gradients: may be computed while they are iterated; those of a unit
        are consecutive."""
        self.gradients.start(self._cursor.begin(action), passing=False)
        for parameter, gradient in gradients:
            self.gradients.add(parameter, gradient)
        self.gradients.check()

    def begin_step(self, numbers: AdamWStep | None) -> None:
        """Begin an optimizer step. numbers: with which units may be stepped as their gradients are complete, before the
        norm is known; None: no unit is."""
        if self._ahead is not None:
            self._ahead.begin(numbers)
            self.gradients.reduced = ignore if numbers is None else self._step_ahead

    def step(self, numbers: AdamWStep) -> None:
        """Step every unit, and start to update the weights of all ranks. Collective."""
        if self._ahead is not None:
            self._ahead.decide(numbers)
        for unit in self.units.values():
            self.weights.open(unit)
            self.weights.update(unit, self.gradients.step(unit.spec.name, numbers))

    def skip_step(self) -> None:
        """End an optimizer step without stepping."""
        if self._ahead is not None:
            self._ahead.decide(None)

    def finish_steps(self) -> None:
        """Wait until all units are stepped, and all weights are updated."""
        if self._ahead is not None:
            self._ahead.finish()
        self.weights.updates.finish()

    def update(self) -> None:
        """Update all weights from masters that something else than a step wrote. Collective."""
        self.weights.synchronize()
        for unit in self.units.values():
            self.weights.open(unit)
            unit.publish()
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
        copies = self.weights.secondary_bytes + self.weights.replicated_bytes
        return sum(unit.nbytes for unit in self.units.values()) + copies

    @property
    def pools(self) -> dict[str, int]:
        """Bytes of this rank's buffers for gathered units and for communication, by what uses them."""
        return {
            "gathered_weights": self.weights.pool.nbytes,
            "gradient_buffers": self.gradients.pool.nbytes,
            "in_flight": self.weights.in_flight.nbytes + self.gradients.in_flight.nbytes,
            "hops": sum(hops.nbytes for hops in self._hops),
            "groups": self.gradients.replica_groups.nbytes,
        }

    @contextmanager
    def _running(self, program: Program) -> Iterator[None]:
        self._cursor = ProgramCursor(program)
        self._issue(program.start)
        yield
        self._cursor.finish()

    def _run_backward(self, run: Callable[[], None]) -> None:
        self._backward = True
        run()
        self._backward = False

    def _issue(self, issues: Iterable[Issue]) -> None:
        for issue in issues:
            if isinstance(issue, Gather):
                self.weights.gather(issue)
            elif isinstance(issue, Drop):
                self.weights.drop(issue)
            else:
                self.gradients.reduce(issue)

    def _use(self, name: str) -> Tensor:
        """Return a unit's weights, flat; they stay until `_done`."""
        if name in self._busy:
            return self.weights.buffer(name)
        if name in self.weights.gathered:
            self._issue(self._cursor.reach(At.USE, name))
            self._busy.add(name)
        return self.weights.wait(name)

    def _step_ahead(self, name: str) -> None:
        self.units[name].step_ahead()

    def _done(self, name: str) -> None:
        if name in self._busy:
            self._busy.remove(name)
            self._issue(self._cursor.reach(At.DONE, name))

    def _gradients_complete(self, name: str) -> None:
        """Report that all gradients of a unit have been computed in a pass."""
        if self.gradients.is_reduced(name):
            self._issue(self._cursor.reach(At.GRADIENTS, name))
        self._done(name)

    def _before(self, needed: Sequence[str], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for name in needed:
            self._use(name)
        if self._programs.spec.splits_backward and not self._backward and inputs[0].requires_grad:
            # In a backward pass of the inputs, the gradient of a unit's input is the last that needs its weights.
            inputs[0].register_hook(partial(self._input_complete, needed))

    def _after(self, needed: Sequence[str], module: nn.Module, inputs: object, output: object) -> None:
        # A recomputed forward pass runs inside the backward pass, which needs the weights until its gradients are
        # complete.
        if not self._backward:
            for name in needed:
                self._done(name)

    def _input_complete(self, needed: Sequence[str], gradient: Tensor) -> None:
        for name in needed:
            self._done(name)

    def _pack(self, tensor: Tensor) -> "Tensor | _Reference":
        owner = self.weights.owner_of(tensor)
        if owner is None:
            return tensor
        offset = tensor.storage_offset() - self.weights.buffer(owner).storage_offset()
        return _Reference(owner, int(offset), tensor.shape, tensor.stride())

    def _unpack(self, saved: "Tensor | _Reference") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        # A tensor that counts its changes by itself: other threads write other units to the same pool meanwhile, and
        # autograd would take that for a change of these weights where a backward pass recomputes forward.
        weights = self._use(saved.unit).data
        return weights.as_strided(saved.shape, saved.stride, weights.storage_offset() + saved.offset)


@dataclass(frozen=True)
class _Reference:
    """A view into a unit's gathered weights."""

    unit: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
