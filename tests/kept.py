"""Count the memory that stages of a model keep between their forward and backward passes. It knows nothing of plans.

A dispatch mode sees each tensor that an operation allocates, and later asks which of their storages still exist. This
counts what autograd saves, what autograd functions keep on their own, and what closures hold, each storage once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.parallel.pipeline.stage import Stage, keep
from llmtrain.parallel.tensor.collectives import TensorMesh
from llmtrain.parallel.tensor.parallelize import parallelize
from llmtrain.parallel.weight_gradients import WeightGradientQueue
from llmtrain.sharding.gradient_sums import Received
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kept(TorchDispatchMode):
    """Counts the storages that were allocated inside and still exist."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before_next: list[Callable[[], None]] = []

    def __enter__(self) -> "Kept":
        # No operation of torch returns the state of the generator.
        self._patch = mock.patch("torch.get_rng_state", self._generator_state)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        while self._before_next:
            self._before_next.pop()()
        result = function(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:
                self._add(one)
        return result

    def places(self) -> set[int]:
        """Return where the storages are that still exist."""
        self._found = {place: found for place, found in self._found.items() if not found[0].expired()}
        return set(self._found)

    def nbytes(self, others: frozenset[int] = frozenset()) -> int:
        """Return the bytes of the storages that still exist, without those at the places `others`."""
        return sum(self._found[place][1] for place in self.places() - others)

    def before_next(self, work: Callable[[], None]) -> None:
        """Call `work` before the next operation."""
        self._before_next.append(work)

    def _generator_state(self) -> Tensor:
        state = torch.default_generator.get_state()
        self._add(state)
        return state

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._found[reference.cdata] = reference, storage.nbytes()


@dataclass
class FakeRanks:
    """Collectives of ranks that are all equal to this one. They allocate nothing, as those of real ranks."""

    degree: int

    def all_reduce_bytes(self, size: int) -> int:
        """Return 0: nothing is sent."""
        return 0

    def all_reduce(self, x: Tensor) -> "FakeRanks":
        """Multiply by the number of ranks."""
        x.mul_(self.degree)
        return self

    def all_gather(self, parts: Tensor) -> "FakeRanks":
        """Repeat the last part, which this rank has."""
        parts.view(self.degree, -1)[:-1] = parts.view(self.degree, -1)[-1]
        return self

    def reduce_scatter(self, x: Tensor, part: Tensor, dtype: torch.dtype) -> "FakeRanks":
        """Multiply this rank's part by the number of ranks."""
        part.copy_(x.view(self.degree, -1)[-1]).mul_(self.degree)
        return self

    def wait(self) -> None:
        """Do nothing: the result is there."""


def last_of(degree: int, sequence: bool) -> TensorMesh:
    """Return the tensor-parallel ranks from the view of the last one."""
    return TensorMesh(degree - 1, degree, FakeRanks(degree), sequence) if degree > 1 else TensorMesh()  # type: ignore[arg-type]


@dataclass
class Setup:
    """How a model computes. deferred: its layers can defer their weight gradients to `queue`."""

    config: GPTConfig
    dtype: torch.dtype
    degree: int = 1
    sequence: bool = False
    deferred: bool = False
    queue: WeightGradientQueue = field(default_factory=WeightGradientQueue)


def built(setup: Setup, layouts: Sequence[Any]) -> GPT:
    """Return a rank's model with small random weights. layouts: the parts that it has."""
    model = GPT(setup.config, torch.device("cpu"), [group for layout in layouts for group in layout.groups])
    keep(model, layouts)
    parallelize(model, last_of(setup.degree, setup.sequence), setup.queue if setup.deferred else None)
    random = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = 0.1 * torch.randn(parameter.shape, generator=random)
            setattr(module, name, nn.Parameter(values.to(setup.dtype)))
    return model


@dataclass
class Counted:
    """Bytes of one microbatch. forward: kept after the forward pass. recomputed: the most that a recomputed group adds.
    deferred: kept between the backward pass of the inputs and that of the weights."""

    forward: int = 0
    recomputed: int = 0
    deferred: int = 0


def counted(setup: Setup, layout: Any, rows: Tensor) -> Counted:
    """Run a stage on one microbatch as the executor of a pipeline does. rows: int64 `[sequences, tokens + 1]`."""
    model = built(setup, [layout])
    tokens = rows.shape[1] - 1
    shape = (rows.shape[0], tokens // setup.degree if setup.sequence else tokens, setup.config.hidden)
    with Kept() as kept, groups_of(model, kept) as groups:
        given = rows[:, :-1] if layout.opens else torch.randn(shape).to(setup.dtype).requires_grad_()
        output = Stage(model, layout).forward(given, rows[:, 1:] if layout.closes else None)
        result = output if layout.closes else get_gradient_edge(output)
        del output
        forward = kept.nbytes()
        groups.recomputed = True
        gradient = None if layout.closes else torch.randn(shape).to(setup.dtype)
        with setup.queue.collecting() as products, autograd_gradients(model) as received:
            torch.autograd.backward(result, gradient)
        del given, result, gradient
        deferred = kept.nbytes()
    assert bool(products) == (setup.deferred and layout.first < layout.end)
    assert received or not setup.deferred
    assert bool(groups.added) == bool(layout.groups)
    return Counted(forward, max(groups.added, default=0), deferred if setup.deferred else 0)


@dataclass
class Groups:
    """Bytes that each recomputed group of blocks adds. recomputed: whether blocks that run now are recomputed."""

    recomputed: bool = False
    added: list[int] = field(default_factory=list)


@contextmanager
def groups_of(model: GPT, kept: Kept) -> Iterator[Groups]:
    """Measure each recomputed group before the operation that comes next."""
    run, groups = model._run, Groups()

    def measured(x: Tensor, first: int, end: int) -> Tensor:
        if not groups.recomputed:
            return run(x, first, end)
        before = frozenset(kept.places())
        try:
            return run(x, first, end)
        finally:
            kept.before_next(lambda: groups.added.append(kept.nbytes(before)))

    with mock.patch.object(model, "_run", measured):
        yield groups


@contextmanager
def autograd_gradients(model: nn.Module) -> Iterator[list[Received]]:
    """Take the gradients that autograd computes, as the engine of model states does."""
    found: list[Received] = []

    def take(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            found.append((parameter, gradient))

    hooks = [one.register_post_accumulate_grad_hook(take) for one in model.parameters()]
    yield found
    for hook in hooks:
        hook.remove()
