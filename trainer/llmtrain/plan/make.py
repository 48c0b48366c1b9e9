"""From a resolved recipe and the facts of a run to its plan. No torch in here."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.levels import levels_of
from llmtrain.cluster.tiers import Tier, axis_tiers, tiers
from llmtrain.cluster.topology import layout_degrees
from llmtrain.errors import BadInputError
from llmtrain.optim.config import AdamW, LossScaling
from llmtrain.plan.degrees import degrees_of
from llmtrain.plan.pipeline.actions import Schedule
from llmtrain.plan.pipeline.schedules import make_schedule, schedule_problems
from llmtrain.plan.pipeline.stage_layout import stage_layouts_of
from llmtrain.plan.plan import Batch, Pipeline, Plan, Quantization, Sharding, Training
from llmtrain.plan.resolve import Facts, as_data, decided, replica_share, shape
from llmtrain.plan.tensor_check import tensor_problems
from llmtrain.recipe.pipeline import ScheduleName
from llmtrain.recipe.schema import EveryK, Recipe

_BITS = {None: 0, "none": 0, "int8": 8, "int4": 4}

T = TypeVar("T")


def make_plan(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a resolved recipe.

    Raises BadInputError where the batch, the layers or the schedule do not fit the ranks.
    """
    grid, model = Layout(layout_degrees(recipe.parallel, facts.world)), shape(recipe)
    cluster = recipe.cluster if isinstance(recipe.cluster, Cluster) else None
    links = tiers(cluster, facts.world, facts.ranks_per_node or facts.world)
    batch = _batch(recipe, grid)
    if problem := tensor_problems(model, recipe.parallel, recipe.data.sequence_length):
        raise BadInputError(problem)
    recompute, sharding = _recompute(recipe), _sharding(recipe, grid, links)
    return Plan(
        name=recipe.name,
        seed=recipe.seed,
        model=model,
        import_from=recipe.model.hf,
        grid=grid,
        tiers=links,
        cluster=cluster,
        batch=batch,
        compute=decided(recipe.precision.compute),
        sequence_parallel=recipe.parallel.sequence,
        recompute=recompute,
        sharding=sharding,
        pipeline=_pipeline(recipe, batch, recompute, sharding),
        optimizer=_same(AdamW, recipe.optimizer),
        loss_scaling=_same(LossScaling, recipe.precision),
        spikes=recipe.on_spike,
        training=_same(Training, recipe.train),
        data=recipe.data,
        checkpoint=recipe.checkpoint,
        logging=recipe.logging,
        record=as_data(recipe),
    )


def _same(section: type[T], source: object) -> T:
    """Return a section with the values that the recipe's section of the same names has."""
    return section(**{entry.name: decided(getattr(source, entry.name)) for entry in fields(section)})  # type: ignore[arg-type]


def _batch(recipe: Recipe, grid: Layout) -> Batch:
    replicas, microbatch = grid.degree(Axis.DATA), decided(recipe.train.microbatch)
    share = replica_share(recipe, replicas)
    if share % microbatch:
        raise BadInputError(
            f"train.microbatch is {microbatch}; expected a divisor of the {share} sequences that each of {replicas} "
            f"replicas takes of train.global_batch ({recipe.train.global_batch})"
        )
    return Batch(
        sequences=recipe.train.global_batch,
        sequence_length=recipe.data.sequence_length,
        microbatch=microbatch,
        microbatches=share // microbatch,
    )


def _sharding(recipe: Recipe, grid: Layout, links: Sequence[Tier]) -> Sharding:
    degrees, quantize = degrees_of(recipe), recipe.quantize
    return Sharding(
        degrees=degrees,
        levels=levels_of(degrees, axis_tiers(links, grid, Axis.DATA)),
        hierarchical=decided(recipe.zero.hierarchical),
        quantization=Quantization(
            weights=_BITS[quantize.weights],
            secondary=_BITS[quantize.secondary],
            gradients=_BITS[quantize.gradients],
            block=quantize.block,
        ),
    )


def _pipeline(recipe: Recipe, batch: Batch, recompute: int, sharding: Sharding) -> Pipeline:
    given, ranks, layers = recipe.pipeline, recipe.parallel.pipeline, decided(recipe.pipeline.split)
    # One stage has no schedule to choose.
    name: ScheduleName = given.schedule if ranks > 1 else "1f1b"
    chunks = decided(given.chunks) if ranks > 1 else 1
    if problem := schedule_problems(name, ranks, chunks, batch.microbatches):
        raise BadInputError(problem)
    # What is recomputed, or gathered, would have to stay until the weights' gradients are computed, and torch.compile
    # does not see through it. Where ranks share the sequence, what waits is gathered once more, in most passes of
    # GPipe.
    held = recipe.train.compile or recompute or sharding.degrees.weights > 1
    hands_back = ranks > 1 and not held and not (recipe.parallel.sequence and name == "gpipe")
    if name == "message-driven":
        schedule = Schedule(ranks, 1, batch.microbatches, (), hands_back=hands_back)
    else:
        schedule = replace(make_schedule(name, ranks, chunks, batch.microbatches), hands_back=hands_back)
    config = shape(recipe)
    return Pipeline(
        schedule=schedule,
        layers=layers,
        stages=tuple(stage_layouts_of(config, schedule, layers, rank) for rank in range(ranks)),
        limit=decided(given.limit),
        transport=given.transport,
    )


def _recompute(recipe: Recipe) -> int:
    match recipe.activation_checkpointing:
        case EveryK(every=every):
            return every
        case "full":
            return 1
        case _:
            return 0
