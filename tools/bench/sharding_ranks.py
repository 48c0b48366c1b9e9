"""The rank program of the sharding benchmark: trains one GPT with every contestant, interleaved, and times each step.

`sharding.py` starts it on every rank of an emulated cluster, with the settings as JSON. The last line of rank 0's
stdout is the result as JSON.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Links, Ranks, connect
from llmtrain.launch.stop import StopRequest
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import model_units
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.sharding.unit import unsharded_unit
from llmtrain.training.loop import train_step
from llmtrain.training.run import Run, open_run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tools.netlab import counters


@dataclass(frozen=True)
class Contestant:
    """One way to train. step: runs an optimizer step, given its number, and returns its loss on this rank or None.
    state_bytes: bytes of model states on this rank, after a step. finish_updates: waits for communication that
    continues after a step."""

    step: Callable[[int], float | None]
    state_bytes: Callable[[], int]
    finish_updates: Callable[[], None] = lambda: None


def batches(run: Run, number: int) -> Iterable[Tensor]:
    """Yield the microbatches of this rank, int64 `[1, sequence + 1]`, equal for all contestants."""
    batch, ranks = run.plan.batch.sequences, run.ranks
    share = batch // ranks.layout.world
    rows = torch.from_numpy(run.train_data.batch(run.plan.seed, number * batch + ranks.rank * share, share))
    return rows.split(1)


def plain_model(run: Run) -> GPT:
    """Return the same model with the same weights, each parameter in its own tensor."""
    model = GPT(run.plan.model, torch.device("cpu"))
    for spec in model_units(run.plan.model):
        unsharded_unit(spec, model.unit(spec.name), torch.device("cpu"), torch.float32, run.plan.seed)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return model


def stored(tensors: Iterable[Tensor]) -> int:
    """Return the storage bytes of this rank's parts of tensors, each storage counted once."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the present gradients."""
    return stored(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the optimizer's state tensors, without its step counts."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in states if isinstance(value, Tensor) and value.dim() > 0]


def ours(run: Run) -> Contestant:
    """Return the contestant of an llmtrain run."""

    def step(number: int) -> float | None:
        train_step(run, number)
        return None

    return Contestant(step, lambda: run.engine.state_bytes, run.engine.weights.updates.finish)


def of_torch(
    run: Run, model: nn.Module, accumulation: int, before: Callable[[int], None] = lambda index: None
) -> Contestant:
    """Return the contestant that trains a model with torch's AdamW. before: called with the index of each microbatch
    ahead of its passes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    gradients = 0

    def step(number: int) -> float:
        nonlocal gradients
        total = 0.0
        for index, rows in enumerate(batches(run, number)):
            before(index)
            loss = model(rows[:, :-1], rows[:, 1:]) / accumulation
            loss.backward()
            total += float(loss)
        gradients = gradients or gradient_bytes(model)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Contestant(step, lambda: gradients + stored([*model.parameters(), *moments(optimizer)]))


def fsdp2(run: Run, hybrid: bool, accumulation: int) -> Contestant:
    """Return the contestant of torch's FSDP2: fully sharded, or hybrid, sharded inside nodes and replicated between."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world, local = run.ranks.layout.world, int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = (
        init_device_mesh("cpu", (world // local, local), mesh_dim_names=("replica", "shard"))
        if hybrid
        else init_device_mesh("cpu", (world,))
    )
    model = plain_model(run)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def before(index: int) -> None:
        if hybrid:
            model.set_requires_all_reduce(index == accumulation - 1)  # type: ignore[operator]

    return of_torch(run, model, accumulation, before)


def deepspeed_zero3(run: Run, accumulation: int) -> Contestant:
    """Return the contestant of DeepSpeed's ZeRO-3 on CPU."""
    import deepspeed

    model = plain_model(run)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0, "torch_adam": True},
        },
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(number: int) -> float:
        total = 0.0
        for rows in batches(run, number):
            loss = engine(rows[:, :-1], rows[:, 1:])
            engine.backward(loss)
            engine.step()
            total += float(loss) / accumulation
        return total

    def state_bytes() -> int:
        """Return the bytes of weights, their fp32 copies for the optimizer, gradients and two moments."""
        zero = engine.optimizer
        weights = [parameter.ds_tensor for parameter in model.parameters()]  # type: ignore[attr-defined]
        own = [*zero.fp32_partitioned_groups_flat, zero.grad_partitions_flat_buffer]
        return stored([*weights, *own, *moments(zero.optimizer)])

    return Contestant(step, state_bytes)


def alone(run: Run, accumulation: int) -> Contestant:
    """Return the contestant that trains on this rank's batches without communication."""
    model = plain_model(run)
    return of_torch(run, model, accumulation)


def our_run(name: str, overrides: list[str], settings: dict[str, Any], ranks: Ranks, stack: ExitStack) -> Run:
    """Compose a real llmtrain run, with its logging."""
    facts = Facts(world=ranks.layout.world, device="cpu", ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    plan = make_plan(load_recipe(settings["recipe"], [f"name={name}", *overrides]), facts)
    placed = Ranks(ranks.rank, ranks.local_rank, ranks.layout, ranks.device, Links(ranks.store, plan.tiers))
    run = stack.enter_context(open_run(plan, placed, StopRequest()))
    run.log.start(0, [])
    run.engine.update()
    run.engine.weights.updates.finish()
    return run


def measure(contestants: dict[str, Contestant], rounds: int, turn: int, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Return, by name, a step's time and this node's sent bytes in each round after the warm-up.

    In each round, every contestant runs `turn` consecutive steps. As in training, communication that a step leaves
    unfinished overlaps with the next one; it ends before the next contestant starts. The warm-up has one step.
    """
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "sent": [], "losses": []} for name in contestants}
    done = 0
    for number in range(rounds + 1):
        names = list(contestants) if number % 2 else list(reversed(contestants))
        steps = turn if number else 1
        for name in names:
            dist.barrier()
            before, started = card_bytes(), time.perf_counter()
            losses = [contestants[name].step(done + step) for step in range(steps)]
            contestants[name].finish_updates()
            dist.barrier()
            seconds, sent = time.perf_counter() - started, card_bytes() - before
            if number:
                found[name]["seconds"].append(seconds / steps)
                found[name]["sent"].append(sent / steps)
            for loss in losses:
                if loss is not None:
                    found[name]["losses"].append(ranks.sum_all([loss])[0] / ranks.layout.world)
        done += steps
    for name, contestant in contestants.items():
        found[name]["state_bytes"] = contestant.state_bytes()
    return found


def card_bytes() -> int:
    """Return the bytes that this node has sent so far."""
    return counters.read()[os.environ["GLOO_SOCKET_IFNAME"]].sent


def main(settings: dict[str, Any]) -> None:
    """Measure, and print the result."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    world, accumulation = int(os.environ["WORLD_SIZE"]), settings["accumulation"]
    ranks = connect(Layout({Axis.DATA: world}))
    contestants: dict[str, Contestant] = {}
    with ExitStack() as stack:
        runs = {
            name: our_run(name, overrides, settings, ranks, stack) for name, overrides in settings["strategies"].items()
        }
        reference = next(iter(runs.values()))
        peers = {
            "FSDP2": lambda: fsdp2(reference, False, accumulation),
            "FSDP2 hybrid": lambda: fsdp2(reference, True, accumulation),
            "DeepSpeed ZeRO-3": lambda: deepspeed_zero3(reference, accumulation),
            "each rank alone": lambda: alone(reference, accumulation),
        }
        for name in settings["peers"]:
            contestants[name] = peers[name]()
        contestants.update({name: ours(run) for name, run in runs.items()})
        found = measure(contestants, settings["rounds"], settings["turn"], ranks)
        for name, run in runs.items():
            rows = (Path(run.folder) / "metrics.jsonl").read_text().splitlines() if ranks.is_main else []
            found[name]["losses"] = [row["loss"] for row in map(json.loads, rows) if "event" not in row]
            found[name]["buffer_bytes"] = sum(run.engine.pools.values())
    if ranks.is_main:
        print(json.dumps(found), flush=True)
    # DeepSpeed's threads would keep the process alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
