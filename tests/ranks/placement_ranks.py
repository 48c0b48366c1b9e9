"""Ranks that train a model with units over different groups, and the same model in one process.

`placement_ranks.py WORLD FOLDER` writes each rank's results into `rank-N.json` in that folder. The grid is 2 x 2: two
places along the data axis, and two along the tensor axis, which shards no layer here. As in context parallelism, each
of the four ranks has its own samples. All four ranks share the dense units, over the product of both axes. The block
EXPERT has other weights on each place of the tensor axis, as experts do, and is shared only along the data axis.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.levels import Degrees, levels_of
from llmtrain.cluster.tiers import Tier, axis_tiers
from llmtrain.comm.ranks import Links, Ranks
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import UnitSpec, model_units
from llmtrain.optim.clipping import step_divisor, step_numbers
from llmtrain.optim.config import AdamW
from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.pipeline.schedules import one_forward_one_backward
from llmtrain.plan.placement import Placement
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.program.transfers import UnitTraffic
from llmtrain.plan.program.workspaces import in_flight_buffers, lane_buffers
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.hops import make_hops
from llmtrain.sharding.unit import ShardedUnit, unsharded_unit
from torch import Tensor, nn

from tests.programs import whole_model
from tests.ranks.forks import fork_ranks

CONFIG = GPTConfig(
    family="llama", layers=3, hidden=32, heads=4, kv_heads=2, ffn=96, positions=16, vocab=61, tie_embeddings=False,
    norm_eps=1e-5, rope_theta=10000.0, rotary_fraction=1.0, activation="swiglu", dropout=0.0,
)  # fmt: skip
ADAMW = AdamW(
    lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=1.0, schedule="constant", warmup=0, min_lr=0.1,
    decay=0.2,
)  # fmt: skip
LAYOUT = Layout({Axis.DATA: 2, Axis.TENSOR: 2})
TIERS = (Tier("node", 2), Tier("all", 4))
EXPERT, CPU, STEPS, MICROBATCHES, SAMPLES = "blocks.1", torch.device("cpu"), 20, 2, 3
# Degrees of weights, gradients and optimizer states: of dense units, and of the expert.
CASES = {
    "all cut": ((4, 4, 4), (2, 2, 2)),
    "unlike stages": ((1, 2, 4), (2, 2, 2)),
    "expert copied": ((2, 2, 4), (1, 1, 1)),
    "dense copied": ((1, 1, 1), (1, 1, 2)),
}


def placement(axes: tuple[Axis, ...], cut: tuple[int, int, int]) -> Placement:
    """Return the placement over a product of axes."""
    degrees = Degrees(LAYOUT.degree(*axes), *cut)
    levels = levels_of(degrees, axis_tiers(TIERS, LAYOUT, *axes))
    return Placement(axes=axes, degrees=degrees, levels=levels, masters="weights")


def travel(spec: UnitSpec, where: Placement) -> UnitTraffic:
    """Return how a unit travels: in fp32."""
    return UnitTraffic(
        spec=spec, placement=where, element_bytes=4, buffered_bytes=4, weights=None, secondary=None, gradients=None
    )


def programs_of(units: Sequence[UnitTraffic]) -> Programs:
    """Return the programs of a rank with all units."""
    return Programs(
        ProgramSpec(
            stages=(whole_model(CONFIG),),
            actions=one_forward_one_backward(1, MICROBATCHES).actions[0],
            padded={unit.spec.name: unit.placement.padded(unit.spec.numel) for unit in units},
            degrees={unit.spec.name: unit.placement.degrees for unit in units},
        )
    )


def seed_of(spec: UnitSpec, expert: int) -> int:
    """Return the seed of a unit's weights; each expert has its own."""
    return 7 + expert if spec.name == EXPERT else 3


def batches(rank: int) -> Iterator[list[Tensor]]:
    """Yield a rank's microbatches, int64 `[samples, tokens + 1]`, step by step."""
    for step in range(STEPS):
        random = torch.Generator().manual_seed(1000 * step + rank)
        yield [torch.randint(0, 61, (SAMPLES, 17), generator=random) for _ in range(MICROBATCHES)]


def rate(step: int) -> float:
    """Return the learning rate of a step. It warms up, because AdamW's first steps turn the smallest differences into
    full steps."""
    return ADAMW.lr * min(1.0, (step + 1) / 5)


def train(ranks: Ranks, cuts: tuple[tuple[int, int, int], tuple[int, int, int]]) -> tuple[list[float], Engine]:
    """Train this rank's share; return the norms of the gradients, and the engine, which has the states."""
    model, expert = GPT(CONFIG, CPU), LAYOUT.coordinate(ranks.rank, Axis.TENSOR)
    dense, own = placement((Axis.DATA, Axis.TENSOR), cuts[0]), placement((Axis.DATA,), cuts[1])
    travels = [travel(spec, own if spec.name == EXPERT else dense) for spec in model_units(CONFIG)]
    programs = programs_of(travels)
    hops = {one: make_hops(ranks, one, lane_buffers(one, travels, programs)) for one in (dense, own)}
    units = [
        ShardedUnit(
            one.spec,
            model.unit(one.spec.name),
            hops[one.placement],
            torch.float32,
            seed_of(one.spec, expert),
            CPU,
        )
        for one in travels
    ]
    sharding = ShardingSpec(in_flight=in_flight_buffers(travels, programs))
    engine, norms = Engine(model, units, sharding, programs, lambda calls: None), []
    engine.update()
    for step, microbatches in enumerate(batches(ranks.rank)):
        with engine.training_pass():
            for number, rows in enumerate(microbatches):
                run = partial(model, rows[:, :-1], rows[:, 1:])
                loss = engine.forward(Action(number, 0, Kind.F), run) / (LAYOUT.world * MICROBATCHES)
                engine.backward(Action(number, 0, Kind.B), loss.backward)
        squares = engine.gradients.squared_norm()
        dist.all_reduce(squares)
        norms.append(float(squares.sqrt()))
        divisor = step_divisor(torch.zeros(()), squares.sqrt(), 1.0, ADAMW.clip)
        numbers = step_numbers(ADAMW, rate(step), step + 1, divisor)
        for unit in units:
            unit.step(numbers)
            engine.weights.update(unit)
    engine.weights.updates.finish()
    return norms, engine


def reference() -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train in one process with torch's AdamW; return the norms, and for each expert the flat weights of each unit."""
    models = [GPT(CONFIG, CPU) for _ in range(2)]
    for expert, model in enumerate(models):
        for spec in model_units(CONFIG):
            unsharded_unit(spec, model.unit(spec.name), CPU, torch.float32, seed_of(spec, expert))
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                shared = models[0].get_parameter(parameter_name(model, module, name))
                dense = not parameter_name(model, module, name).startswith(EXPERT)
                setattr(module, name, shared if expert and dense else nn.Parameter(parameter.detach().clone()))
    parameters = list({id(one): one for model in models for one in model.parameters()}.values())
    groups = [
        {"params": [one for one in parameters if (one.ndim == 2) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer, norms = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps), []
    for step, each in enumerate(zip(*(batches(rank) for rank in range(LAYOUT.world)), strict=True)):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for rank, microbatches in enumerate(each):
            for rows in microbatches:
                model = models[LAYOUT.coordinate(rank, Axis.TENSOR)]
                (model(rows[:, :-1], rows[:, 1:]) / (LAYOUT.world * MICROBATCHES)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
    return norms, [
        {spec.name: torch.cat([one.detach().flatten() for one in flat(model, spec)]) for spec in model_units(CONFIG)}
        for model in models
    ]


def parameter_name(model: nn.Module, module: nn.Module, leaf: str) -> str:
    """Return the full name of a parameter."""
    return ".".join([next(name for name, one in model.named_modules() if one is module), leaf]).lstrip(".")


def flat(model: GPT, spec: UnitSpec) -> list[Tensor]:
    """Return the parameters of a unit in the order of its flat buffer."""
    names = dict.fromkeys(f"{spec.name}.{tensor.parameter}" for tensor in spec.tensors)
    return [model.get_parameter(name) for name in names]


def rank_main(world: int, rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    ranks = Ranks(rank, rank, LAYOUT, CPU, Links(tiers=TIERS))
    norms, weights = reference()
    expected, found = weights[LAYOUT.coordinate(rank, Axis.TENSOR)], {}
    for name, cuts in CASES.items():
        own, engine = train(ranks, cuts)
        worst = 0.0
        for unit in engine.units.values():
            start, end = (min(place, unit.spec.numel) for place in unit.ranges.optimizer)
            whole = expected[unit.spec.name]
            apart = unit.optimizer.read("master", start, end) - whole[start:end]
            worst = max(worst, float(apart.norm() / whole.norm()))
        norm_apart = max(abs(one - other) / other for one, other in zip(own, norms, strict=True))
        held = {unit.spec.name: unit.weight.numel() / unit.ranges.padded for unit in engine.units.values()}
        found[name] = {"weights": worst, "norms": norm_apart, "held": held}
        engine.close()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.exit(fork_ranks(world, lambda rank: rank_main(world, rank, folder)))
