"""Parallel layers in one process: when collectives begin, what is saved, and what is deferred."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from llmtrain.model.gpt import GPT
from llmtrain.model.presets import PRESETS
from llmtrain.model.tensors import model_units
from llmtrain.parallel.tensor.collectives import Pending, TensorMesh
from llmtrain.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from llmtrain.parallel.tensor.parallelize import parallelize
from llmtrain.parallel.weight_gradients import WeightGradientQueue, gradients
from llmtrain.sharding.unit import unsharded_unit
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RANKS, BATCH, SEQUENCE, INPUTS, OUTPUTS = 2, 3, 8, 10, 14
Layer = ColumnParallelLinear | RowParallelLinear


@dataclass(frozen=True, kw_only=True)
class RecordingMesh(TensorMesh):
    """Simulates ranks that are all equal to this one, and records its collectives in `events`."""

    events: list[str] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Pending:
        return self._begun("all-reduce", lambda: x.mul_(self.degree))

    def all_gather(self, x: Tensor) -> Pending:
        return self._begun("all-gather", lambda: torch.cat([x] * self.degree))

    def reduce_scatter(self, x: Tensor) -> Pending:
        return self._begun("reduce-scatter", lambda: x.chunk(self.degree)[0] * self.degree)

    def _begun(self, op: str, result: Callable[[], Tensor]) -> Pending:
        self.events.append(op)

        def finish() -> Tensor:
            self.events.append(f"{op} done")
            return result()

        return Pending(finish)


class Products(TorchDispatchMode):
    """Adds each matrix product to `events`, by the shape of its result."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::mm", "aten::addmm"):
            self.events.append(f"product {'x'.join(map(str, result.shape))}")
        return result


def layer_of(
    kind: type[Layer], mesh: TensorMesh, queue: WeightGradientQueue | None = None, ordered: bool = True
) -> Layer:
    layer = kind(INPUTS, OUTPUTS, True, mesh, queue or WeightGradientQueue(), ordered)
    torch.manual_seed(0)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.randn(parameter.shape)))
    return layer


def inputs_of(kind: type[Layer], mesh: TensorMesh) -> Tensor:
    shared = mesh.degree if mesh.sharded else 1
    if kind is ColumnParallelLinear:
        return torch.randn(BATCH, SEQUENCE // shared, INPUTS, requires_grad=True)
    return torch.randn(BATCH, SEQUENCE, INPUTS // mesh.degree, requires_grad=True)


def backward_events(kind: type[Layer], mesh: RecordingMesh) -> list[str]:
    y = layer_of(kind, mesh)(inputs_of(kind, mesh))
    mesh.events.clear()
    with Products(mesh.events):
        y.backward(torch.ones_like(y))
    return mesh.events


ROWS = BATCH * SEQUENCE
TO_X, TO_WEIGHT = f"product {ROWS}x{INPUTS}", f"product {OUTPUTS // RANKS}x{INPUTS}"


def test_input_gradients_are_summed_while_weights_get_theirs() -> None:
    events = backward_events(ColumnParallelLinear, RecordingMesh(0, RANKS))
    assert events == [TO_X, "all-reduce", TO_WEIGHT, "all-reduce done"]


def test_shards_arrive_and_leave_beside_products() -> None:
    events = backward_events(ColumnParallelLinear, RecordingMesh(0, RANKS, sequence=True))
    expected = ["all-gather", TO_X, "reduce-scatter", "all-gather done", TO_WEIGHT, "reduce-scatter done"]
    assert events == expected


def test_row_parallel_gathers_once() -> None:
    first, *rest = backward_events(RowParallelLinear, RecordingMesh(0, RANKS, sequence=True))
    assert first == "all-gather"
    assert rest == ["all-gather done", f"product {ROWS}x{INPUTS // RANKS}", f"product {INPUTS // RANKS}x{OUTPUTS}"]
    assert not [event for event in backward_events(RowParallelLinear, RecordingMesh(0, RANKS)) if "all" in event]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("sequence", [False, True])
def test_deferred_weight_gradients(kind: type[Layer], sequence: bool) -> None:
    """Weight gradients are deferred, microbatch by microbatch; outside `collecting` they are computed at once."""
    mesh, queue = RecordingMesh(0, RANKS, sequence=sequence), WeightGradientQueue()
    now, later = layer_of(kind, mesh), layer_of(kind, mesh, queue)
    expected, found = [], []
    for x in [inputs_of(kind, mesh) for _ in range(2)]:
        to_x, *rest = torch.autograd.grad(now(x).square().sum(), [x, *now.parameters()])
        expected.append(dict(zip(now._parameters, rest, strict=True)))
        with queue.collecting() as deferred:
            later(x).square().sum().backward()
        found.append(deferred)
        torch.testing.assert_close(x.grad, to_x)
    assert later.weight.grad is None
    for deferred, wanted in zip(found, expected, strict=True):
        mesh.events.clear()
        for parameter, gradient in gradients(deferred):
            name = next(name for name, one in later.named_parameters() if one is parameter)
            torch.testing.assert_close(gradient, wanted[name])
        assert mesh.events == (["all-gather", "all-gather done"] if sequence else [])
        assert not deferred
    later(inputs_of(kind, mesh)).square().sum().backward()
    assert later.weight.grad is not None


def test_what_a_product_waits_for_comes_ahead() -> None:
    mesh, queue = RecordingMesh(0, RANKS, sequence=True), WeightGradientQueue()
    up, down = layer_of(ColumnParallelLinear, mesh, queue, False), layer_of(RowParallelLinear, mesh, queue, False)
    x = inputs_of(ColumnParallelLinear, mesh)
    with queue.collecting() as deferred:
        down(up(x)[..., : INPUTS // RANKS]).sum().backward()
    mesh.events.clear()
    with Products(mesh.events):
        assert len([*gradients(deferred)]) == 3
    first, second = f"product {INPUTS // RANKS}x{OUTPUTS}", f"product {OUTPUTS // RANKS}x{INPUTS}"
    assert mesh.events == ["all-gather", "all-gather", "all-gather done", first, "all-gather done", second]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_weights_are_kept_through_hooks_alone(kind: type[Layer]) -> None:
    """Hooks may take a parameter's memory away after the forward pass, and put it back when autograd unpacks it."""
    mesh, x = RecordingMesh(0, RANKS), inputs_of(kind, RecordingMesh(0, RANKS))
    layer = layer_of(kind, mesh)
    weight = layer.weight.data
    expected = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])

    def pack(tensor: Tensor) -> Tensor | str:
        return "weight" if tensor.data_ptr() == weight.data_ptr() else tensor

    kept = weight.clone()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: kept if isinstance(saved, str) else saved):
        loss = layer(x).square().sum()
    weight.fill_(torch.nan)
    for ours, theirs in zip(torch.autograd.grad(loss, [x, layer.weight]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_last_product_is_not_recomputed() -> None:
    """Recomputation ends when it has the saved tensors of the backward pass; these do not need the row-parallel
    product."""
    mesh = RecordingMesh(0, RANKS)
    layer, x = layer_of(RowParallelLinear, mesh), inputs_of(RowParallelLinear, mesh)
    loss = checkpoint(lambda x: layer(x.tanh()), x, use_reentrant=False).square().sum()
    mesh.events.clear()
    with Products(mesh.events):
        loss.backward()
    assert mesh.events == [f"product {ROWS}x{INPUTS // RANKS}", f"product {INPUTS // RANKS}x{OUTPUTS}"]


def test_ranks_in_order() -> None:
    mesh = TensorMesh(degree=4, sequence=True)
    x = torch.arange(2 * 8 * 3).view(2, 8, 3)
    shards = x.chunk(4, dim=1)
    torch.testing.assert_close(mesh.by_rank(x), torch.cat(shards))
    torch.testing.assert_close(mesh.by_sequence(torch.cat(shards)), x)
    assert mesh.by_rank(x[:1]).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("name", ["gpt2-1m", "llama-1m", "neox-1m"])
@pytest.mark.parametrize("place", [0, 1])
def test_shapes_are_those_of_the_slices(name: str, place: int) -> None:
    """Parameters keep their names and get the shapes of the flat units' slices, on the meta device."""
    plain, ours = (GPT(PRESETS[name], torch.device("cpu")) for _ in range(2))
    parallelize(ours, TensorMesh(place, 2))
    assert [key for key, _ in ours.named_parameters()] == [key for key, _ in plain.named_parameters()]
    assert all(parameter.is_meta for parameter in ours.parameters())
    for unit in model_units(PRESETS[name]):
        module, held = ours.unit(unit.name), unit.slice(place, 2)
        assert sum(parameter.numel() for parameter in module.parameters()) == held.numel


@pytest.mark.parametrize("name", ["gpt2-1m", "llama-1m"])
def test_one_rank_can_defer_weight_gradients(name: str) -> None:
    """Without tensor parallelism the same layers compute the same values, and can defer weight gradients too."""
    config, found = PRESETS[name], []
    tokens = torch.randint(0, config.vocab, (2, 16), generator=torch.Generator().manual_seed(0))
    for queue in (None, WeightGradientQueue()):
        model = GPT(config, torch.device("cpu"))
        parallelize(model, TensorMesh(), queue)
        for unit in model_units(config):
            unsharded_unit(unit, model.unit(unit.name), torch.device("cpu"), torch.float32, 0)
        if queue is None:
            model(tokens, tokens).backward()
        else:
            with queue.collecting() as deferred:
                model(tokens, tokens).backward()
            assert model.get_parameter("blocks.0.mlp.up.weight").grad is None
            for parameter, gradient in gradients(deferred):
                parameter.grad = gradient
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0])
