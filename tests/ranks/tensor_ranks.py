"""Tensor-parallel ranks for tests.

`tensor_ranks.py WORLD FOLDER` forks ranks that train small models and the plain model beside them, and writes each
rank's results to `FOLDER/rank-R.json`: {figure: number or list}, named after the check.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from llmtrain.comm.backend import collectives_of
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import UnitSpec, model_units
from llmtrain.parallel.tensor.collectives import TensorMesh, count_as_tensor
from llmtrain.parallel.tensor.parallelize import parallelize
from llmtrain.parallel.weight_gradients import WeightGradientQueue
from llmtrain.parallel.weight_gradients import gradients as deferred_gradients
from llmtrain.plan.collective_buffers import CollectiveBuffers
from llmtrain.plan.traffic import Traffic
from llmtrain.sharding.unit import ShardedUnit, unsharded_unit
from torch import Tensor

from tests.programs import whole_model
from tests.ranks.forks import fork_ranks
from tests.ranks.tensor_cases import BATCH, CASES, SEQUENCE, STEPS, VARIANTS, Figures, config_of, tokens
from tests.ranks.tensor_memory import kept_bytes

CPU = torch.device("cpu")


@dataclass
class Built:
    """A model with its units, sharded over `mesh`."""

    model: GPT
    units: list[ShardedUnit]
    mesh: TensorMesh

    def gradients(self) -> dict[str, Tensor]:
        """Return every canonical tensor's gradient; sums those of TP-replicated tensors, as a reducer would."""
        found: dict[str, Tensor] = {}
        for unit in self.units:
            flat = torch.cat(
                [parameter.grad.flatten() for parameter in unit.parameters.tensors if parameter.grad is not None]
            )
            assert len(flat) == unit.spec.numel
            if self.mesh.sharded:
                dist.all_reduce(flat[unit.spec.replicated_from :])
            found |= named(unit.spec, flat)
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of every canonical tensor."""
        return {name: held for unit in self.units for name, held in named(unit.spec, unit.weight).items()}

    def put_gradients(self) -> None:
        """Give the parameters gradients that are complete on every rank."""
        if self.mesh.sharded:
            for unit in self.units:
                names = {tensor.parameter for tensor in unit.spec.tensors if not tensor.split}
                for name in names:
                    dist.all_reduce(self.model.unit(unit.spec.name).get_parameter(name).grad)


def named(spec: UnitSpec, flat: Tensor) -> dict[str, Tensor]:
    """Split a unit's flat buffer into its canonical tensors."""
    ends = zip(spec.tensors, spec.offsets, spec.offsets[1:], strict=False)
    return {tensor.name: flat[start:end] for tensor, start, end in ends}


def build(
    config: GPTConfig,
    mesh: TensorMesh,
    dtype: torch.dtype,
    recompute: int = 0,
    queue: WeightGradientQueue | None = None,
) -> Built:
    """Build a rank's share of the model, or the plain model."""
    model = GPT(config, CPU, whole_model(config, recompute).groups)
    parallelize(model, mesh, queue)
    units = []
    for full in model_units(config):
        spec = full.slice(mesh.tensor_rank, mesh.degree)
        units.append(unsharded_unit(spec, model.unit(spec.name), CPU, dtype, seed=1))
    return Built(model, units, mesh)


def optimizer_of(built: Built, adam: bool) -> torch.optim.Optimizer:
    parameters = [parameter for unit in built.units for parameter in unit.parameters.tensors]
    if adam:
        # The gradients of keys' biases in channels that RoPE does not rotate are only rounding (see `difference`). With
        # the default epsilon, they become steps that differ between ranks.
        return torch.optim.AdamW(parameters, lr=5e-3, eps=1e-6)
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def train(built: Built, adam: bool) -> list[float]:
    """Train some steps and return their losses."""
    optimizer, losses = optimizer_of(built, adam), []
    for step in range(STEPS):
        x, y = tokens(built.model.config, step)
        loss = built.model(x, y)
        optimizer.zero_grad()
        loss.backward()
        built.put_gradients()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def difference(ours: Built, theirs: Built, what: str, together: bool = False) -> float:
    """Return the largest relative difference, in the norm, of a tensor's gradient or weight from the plain model's;
    `together`: the difference of all tensors as one vector."""
    mine, full, differences, sizes = getattr(ours, what)(), getattr(theirs, what)(), [], []
    for tensor in (tensor for unit in ours.units for tensor in unit.spec.tensors):
        expected = full[tensor.name][tensor.local_range[0] : tensor.local_range[1]]
        differences.append((mine[tensor.name] - expected).norm())
        # Keys' biases move all scores of a query equally, so their gradients are zero except for rounding.
        sizes.append(
            expected.norm() if ".k.bias" not in tensor.name else full[tensor.name.replace(".k.", ".q.")].norm()
        )
    if together:
        return float(torch.stack(differences).norm() / torch.stack(sizes).norm())
    return float((torch.stack(differences) / torch.stack(sizes)).max())


def parity(name: str, mesh: TensorMesh, figures: Figures) -> None:
    """Compare one forward and backward pass, then steps of two optimizers, with the plain model."""
    config = config_of(name)
    x, y = tokens(config, 0)
    plain = build(config, TensorMesh(), torch.float32)
    plain.model(x, y).backward()
    for variant, (recompute, deferring) in VARIANTS.items():
        queue = WeightGradientQueue() if deferring else None
        ours = build(config, mesh, torch.float32, recompute, queue)
        loss = ours.model(x, y)
        if queue is None:
            loss.backward()
        else:
            with queue.collecting() as deferred:
                loss.backward()
            figures["deferred"] = sum(parameter.grad is None for parameter in ours.model.parameters())
            for parameter, gradient in deferred_gradients(deferred):
                parameter.grad = gradient
        figures[f"gradients {variant}"] = difference(ours, plain, "gradients")
    with torch.no_grad():
        expected = plain.model(x)
        figures["logits"] = float((ours.model(x) - expected).norm() / expected.norm())
    for optimizer in ("sgd", "adamw"):
        plain, ours = (build(config, each, torch.float32) for each in (TensorMesh(), mesh))
        figures[f"falls {optimizer}"] = (losses := train(plain, optimizer == "adamw"))[0] - losses[-1]
        pairs = zip(train(ours, optimizer == "adamw"), losses, strict=True)
        figures[f"losses {optimizer}"] = max(abs(a / b - 1) for a, b in pairs)
        # AdamW divides each gradient by its own size, so it moves a weight as far for a gradient that is only rounding.
        figures[f"weights {optimizer}"] = difference(ours, plain, "weights", together=optimizer == "adamw")


def half_precision(mesh: TensorMesh, figures: Figures) -> None:
    """Compare losses in bf16."""
    config = config_of("llama")
    plain, ours = (build(config, each, torch.bfloat16) for each in (TensorMesh(), mesh))
    pairs = zip(train(ours, False), train(plain, False), strict=True)
    figures["bf16 losses"] = max(abs(a / b - 1) for a, b in pairs)


def dropout(mesh: TensorMesh, figures: Figures) -> None:
    """Record the elements that ranks drop: `residual`, where they share tokens, and in their heads."""
    config = replace(config_of("gpt2"), dropout=0.3)
    ours = build(config, mesh, torch.float32, recompute=1)
    x, y = tokens(config, 0)
    attention: Any = ours.model.blocks["0"].attention
    seen: list[Tensor] = []
    # With equal values, the output shows only what was dropped.
    attention.qkv.weight.data.zero_()
    attention.qkv.bias.data.fill_(1.0)
    attention.out.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach().clone()))
    torch.manual_seed(7 + (mesh.tensor_rank if mesh.sharded else 0))
    embedded = ours.model.embedding(x)
    ours.model(x, y).backward()
    figures["recomputed alike"] = float((seen[0] - seen[1]).abs().max())
    figures["in heads"] = seen[0].flatten()[:64].tolist()
    figures["residual"] = (embedded == 0).flatten()[:64].int().tolist()
    gradients = [cast(Tensor, parameter.grad) for parameter in ours.model.head.norm.parameters()]
    figures["replicated"] = [float(gradient.sum()) for gradient in gradients]


def memory(mesh: TensorMesh, figures: Figures) -> None:
    """Record the bytes that a forward pass saves for the backward pass, at two depths."""
    for name in CASES[mesh.degree]:
        for layers in (1, 3):
            config = replace(config_of(name), layers=layers)
            ours = build(config, mesh, torch.float32)
            x, y = tokens(config, 0)
            held = [unit.weight for unit in ours.units]
            tables = [*(ours.model.rotary or ()), x]
            figures[f"kept {name} {layers}"] = kept_bytes(partial(ours.model, x, y), [*held, *tables])


def traffic(mesh: TensorMesh, figures: Figures) -> None:
    """Record the bytes that the meter counts in one forward and backward pass of a model with one layer."""
    calls: list[Traffic] = []
    config = replace(config_of("gpt2"), layers=1)
    ours = build(config, replace(mesh, count=count_as_tensor(calls.extend, "node")), torch.float32)
    calls.clear()
    ours.model(*tokens(config, 0)).backward()
    assert {(call.purpose, call.tier) for call in calls} == {("tensor", "node")}
    large = [call for call in calls if call.size >= 4 * BATCH * SEQUENCE * config.hidden]
    figures["calls"] = [f"{call.op} {call.size} {call.sent}" for call in large]


def rank_main(world: int, rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    found: dict[str, Figures] = {}

    def noted(name: str, work: Callable[[Figures], None]) -> None:
        work(found.setdefault(name, {}))

    assert dist.group.WORLD is not None
    collectives = collectives_of(dist.group.WORLD, CPU, world, CollectiveBuffers(world, sequential=False))
    for sequence in (False, True):
        mesh = TensorMesh(rank, world, collectives, sequence)
        kind = "sequence" if sequence else "tensor"
        for name in CASES[world]:
            noted(f"{name} {kind}", partial(parity, name, mesh))
        for work in (memory, traffic, *((half_precision, dropout) if world == 2 else ())):
            noted(f"{work.__name__} {kind}", partial(work, mesh))
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.exit(fork_ranks(world, lambda rank: rank_main(world, rank, folder)))
