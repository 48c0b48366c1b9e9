"""From a resolved recipe to a model whose states lie where its layout says, and to what runs it."""

from dataclasses import dataclass, replace
from math import ceil

import torch

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Level, levels_of
from llmtrain.cluster.tiers import axis_tiers, tier_between
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.subgroups import join_group, make_groups
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.parallel.pipeline.executor import Executor, channels
from llmtrain.parallel.pipeline.mpi import MpiTransport
from llmtrain.parallel.pipeline.stage import Stage, keep
from llmtrain.parallel.pipeline.transport import Channel, TorchTransport, Transport
from llmtrain.parallel.pipeline.weight_gradient_queue import WeightGradientQueue
from llmtrain.parallel.tensor.collectives import TensorMesh
from llmtrain.parallel.tensor.parallelize import parallelize
from llmtrain.plan.degrees import degrees_of
from llmtrain.plan.passes import recompute_of, schedule_of
from llmtrain.plan.pipeline.actions import Schedule, peak_live
from llmtrain.plan.pipeline.stage_layout import StageLayout, stage_layouts_of, units_of
from llmtrain.recipe.schema import Recipe
from llmtrain.sharding.collectives import Packing
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.gradients import ReplicaGroups
from llmtrain.sharding.hops import make_hops
from llmtrain.sharding.traffic import Traffic
from llmtrain.sharding.unit import ShardedUnit, ShardRanges, build_unit
from llmtrain.sharding.weights import Count, WeightPolicy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Assembly:
    """This rank's part of a model, what holds its states, what runs it, and what it shares its layers with."""

    model: GPT
    engine: Engine
    executor: Executor
    mesh: TensorMesh

    def close(self) -> None:
        """Wait for what is on its way, and leave the process groups."""
        self.executor.close()
        self.engine.close()
        self.mesh.close()


def build(recipe: Recipe, config: GPTConfig, ranks: Ranks, count: Count) -> Assembly:
    """Return this rank's part of a resolved recipe's model. count: told of every collective. Collective."""
    schedule, split = schedule_of(recipe), recipe.pipeline.split
    assert not isinstance(split, str)
    stage_layouts = stage_layouts_of(config, schedule, split, ranks.layout.coordinate(ranks.rank, Axis.PIPELINE))
    # The first stage has nobody to hand a gradient back to.
    hands_back = schedule.hands_back and not all(stage_layout.opens for stage_layout in stage_layouts)
    weight_gradients = WeightGradientQueue() if schedule.splits_backward or hands_back else None
    # On the meta device first; what other stages compute goes; layers are cut along the tensor axis; the units give
    # memory to what is left; compile comes last, as it traces what is there.
    model = GPT(config, ranks.device, recompute=recompute_of(recipe))
    keep(model, stage_layouts)
    mesh = _mesh(recipe, ranks, count)
    parallelize(model, mesh, weight_gradients)
    sharding, levels = _sharding(recipe, config, ranks)
    units = _units(model, recipe, ranks, stage_layouts, sharding, levels)
    sharding = _with_replica_groups(sharding, recipe, ranks, stage_layouts)
    used = {"head": "embedding"} if config.tie_embeddings and stage_layouts[-1].closes else {}
    engine = Engine(model, units, sharding, used, count)
    if recipe.train.compile:
        for block in model.blocks.values():
            block.compile()
    executor = _executor(model, stage_layouts, recipe, ranks, schedule, engine, weight_gradients, count, mesh)
    return Assembly(model, engine, executor, mesh)


def _mesh(recipe: Recipe, ranks: Ranks, count: Count) -> TensorMesh:
    """Connect the ranks that share this one's layers. Collective."""
    layout = ranks.layout
    degree = layout.degree(Axis.TENSOR)
    if degree == 1:
        return TensorMesh()
    group = make_groups(ranks, layout.groups(Axis.TENSOR))
    tier = axis_tiers(ranks.tiers, layout, Axis.TENSOR)[-1].name
    place = layout.coordinate(ranks.rank, Axis.TENSOR)
    words = None
    if not schedule_of(recipe).actions:
        # What arrives first differs from rank to rank, and the order of a layer's collectives must not.
        words = make_groups(ranks, layout.groups(Axis.TENSOR), "gloo")
    return TensorMesh(place, degree, group, recipe.parallel.sequence, tier, count, ranks.activity, words)


def _units(
    model: GPT,
    recipe: Recipe,
    ranks: Ranks,
    stage_layouts: tuple[StageLayout, ...],
    sharding: ShardingSpec,
    levels: tuple[Level, ...],
) -> list[ShardedUnit]:
    layout, rank = ranks.layout, ranks.rank
    tensor, data = layout.coordinate(rank, Axis.TENSOR), layout.coordinate(rank, Axis.DATA)
    exact = sharding.weights.packing is None or sharding.degrees.optimizer == sharding.degrees.weights
    return [
        build_unit(
            spec,
            model.unit(spec.name),
            ShardRanges.of(spec.numel, sharding.degrees, levels, data),
            ranks.device,
            DTYPES[recipe.precision.compute],
            recipe.seed,
            exact,
        )
        for spec in units_of(model.config, stage_layouts, tensor, layout.degree(Axis.TENSOR))
    ]


def _sharding(recipe: Recipe, config: GPTConfig, ranks: Ranks) -> tuple[ShardingSpec, tuple[Level, ...]]:
    degrees, quantize = degrees_of(recipe), recipe.quantize
    levels = levels_of(degrees, axis_tiers(ranks.tiers, ranks.layout, Axis.DATA))
    hops = make_hops(ranks, degrees, levels, bool(recipe.zero.hierarchical))
    weights = WeightPolicy(
        packing=Packing(8, quantize.block) if quantize.weights == "int8" else None,
        secondary=Packing(8, quantize.block) if quantize.secondary == "int8" else None,
        together=_together(recipe),
        # What arrives first differs from replica to replica, and the order of gathers must not.
        held=not schedule_of(recipe).actions,
        tensor_parallel=ranks.layout.degree(Axis.TENSOR) > 1,
    )
    gradients = Packing(4, quantize.block) if quantize.gradients == "int4" else None
    return ShardingSpec(degrees, hops, weights, gradients), levels


def _with_replica_groups(
    sharding: ShardingSpec, recipe: Recipe, ranks: Ranks, stage_layouts: tuple[StageLayout, ...]
) -> ShardingSpec:
    """Say which states ranks beyond the data-parallel ones hold as well. Collective."""
    layout, copies = ranks.layout, ranks.layout.degree(Axis.TENSOR)
    partial = None
    if recipe.parallel.sequence and copies > 1:
        # Groups of their own, as these sums are made beside the layers'.
        partial = make_groups(ranks, layout.groups(Axis.TENSOR))
    stage = None
    if sharding.gradients is not None and copies > 1:
        stages = range(layout.degree(Axis.PIPELINE))
        members = [
            [rank for rank in range(layout.world) if layout.coordinate(rank, Axis.PIPELINE) == one] for one in stages
        ]
        stage = make_groups(ranks, members)
    schedule = schedule_of(recipe)
    ends = [schedule.place(stage)[0] for stage in (0, schedule.stages - 1)]
    tied, second = {}, frozenset[str]()
    if stage_layouts[0].tied and ends[0] != ends[1]:
        pairs = [[group[end] for end in ends] for group in layout.groups(Axis.PIPELINE)]
        group = join_group(ranks, pairs)
        tied = {} if group is None else {"embedding": group}
        if any(stage_layout.closes for stage_layout in stage_layouts):
            # Positions are there beside the tokens, so that both copies are cut alike, and compute nothing.
            second = frozenset({"embedding"})
    return replace(sharding, replica_groups=ReplicaGroups(copies, partial, stage, tied, second))


def _executor(
    model: GPT, stage_layouts: tuple[StageLayout, ...], recipe: Recipe, ranks: Ranks, schedule: Schedule, engine:
    Engine, weight_gradients: WeightGradientQueue | None, count: Count, mesh: TensorMesh,
) -> Executor:  # fmt: skip
    parts = ranks.layout.degree(Axis.TENSOR) if recipe.parallel.sequence else 1
    line = ranks.layout.group_of(ranks.rank, Axis.PIPELINE)

    def count_sent(channel: Channel, nbytes: int) -> None:
        target = line[schedule.place(channel.target)[0]]
        tier = tier_between(ranks.tiers, ranks.rank, target)
        count([Traffic("pipeline", "send", tier, nbytes, nbytes, packed=False)])

    return Executor(
        [Stage(model, stage_layout) for stage_layout in stage_layouts],
        ranks.layout.coordinate(ranks.rank, Axis.PIPELINE),
        schedule,
        _limit(recipe),
        engine,
        _transport(recipe, ranks, schedule),
        lambda sequences, tokens: torch.Size((sequences, tokens // parts, model.config.hidden)),
        weight_gradients,
        count_sent,
        ranks.activity,
        mesh.first_says,
    )


def _transport(recipe: Recipe, ranks: Ranks, schedule: Schedule) -> Transport | None:
    """Connect this rank to the stages before and behind its own. Collective."""
    if schedule.ranks == 1:
        return None
    lines, dtype = ranks.layout.groups(Axis.PIPELINE), DTYPES[recipe.precision.compute]
    own, over_mpi = ranks.layout.group_of(ranks.rank, Axis.PIPELINE), recipe.pipeline.transport == "mpi"
    peers, groups = {}, {}
    for channel in channels(schedule):
        ends = [schedule.place(stage)[0] for stage in (channel.source, channel.target)]
        # Every rank takes part in making every group, in the same order.
        if not over_mpi:
            groups[channel] = join_group(ranks, [[line[end] for end in ends] for line in lines])
        if ranks.rank in (own[ends[0]], own[ends[1]]):
            peers[channel] = own[ends[1]] if own[ends[0]] == ranks.rank else own[ends[0]]
    # As many are under way on a channel; and two where they come one at a time.
    ahead = max(2, ceil(max(peak_live(schedule)) / schedule.chunks) if schedule.actions else _limit(recipe))
    if over_mpi:
        return MpiTransport(peers, schedule.stages, ranks.layout.world, ranks.device, dtype, ahead)
    return TorchTransport(
        {channel: (group, peers[channel]) for channel, group in groups.items() if group is not None},
        ranks.device,
        dtype,
        ahead,
    )


def _limit(recipe: Recipe) -> int:
    limit = recipe.pipeline.limit
    assert limit != "auto"
    return limit


def _together(recipe: Recipe) -> int:
    """Return how many blocks have to be whole at once."""
    split = recipe.pipeline.split
    assert not isinstance(split, str)
    # A backward pass whose gradients of weights wait tells of no block that it is done with it, only of all.
    stage_layout = max(split) if schedule_of(recipe).splits_backward else 0
    # All blocks of one recomputed group compute at once; a tied head computes with the embedding as well.
    return max(recompute_of(recipe), stage_layout, 2)
