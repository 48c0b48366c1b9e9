"""From a recipe and the facts of a run to its plan. No torch in here."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from math import sqrt
from typing import Literal

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.levels import Degrees, levels_of
from llmtrain.cluster.memory import stated_host_memory, stated_memory
from llmtrain.cluster.tiers import Tier, axis_tiers
from llmtrain.cluster.topology import stage_speeds
from llmtrain.errors import BadInputError
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units
from llmtrain.optim.config import AdamW, LossScaling, PrecisionConfig
from llmtrain.plan.activation_offload import ActivationOffload
from llmtrain.plan.checkpointing import checkpointing
from llmtrain.plan.cost.quickest import quickest, waits_for_moves
from llmtrain.plan.degrees import ZeroSettings, zero_settings
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget, surely_exceeds
from llmtrain.plan.offload import Offload, offloaded_placement
from llmtrain.plan.offloaded_gradients import offload_of
from llmtrain.plan.per_rank.roles import roles_of
from llmtrain.plan.per_rank.states import fits
from llmtrain.plan.pipeline.actions import Schedule
from llmtrain.plan.pipeline.layer_split import recomputed_flops, split_layers, stage_costs
from llmtrain.plan.pipeline.schedules import make_schedule, schedule_problems
from llmtrain.plan.pipeline.stage_layout import stage_layouts_of
from llmtrain.plan.placement import OptimizerBackend, Placement, alignment
from llmtrain.plan.plan import COMPUTE_BYTES, Batch, Compute, Pipeline, Plan, Sharding, Training
from llmtrain.plan.record import record_of
from llmtrain.plan.resolve.auto_activations import with_most_staying
from llmtrain.plan.resolve.auto_batch import MOST, batches_that_fit, microbatches, weighs_moves, with_least
from llmtrain.plan.resolve.auto_partition import with_larger_parts
from llmtrain.plan.resolve.auto_resident import Filling
from llmtrain.plan.resolve.auto_share import keeps_weights_ahead, least_share, most_spare
from llmtrain.plan.resolve.kernels import kernels_of
from llmtrain.plan.resolve.model_shape import model_shape
from llmtrain.plan.resolve.tensor_check import tensor_problems
from llmtrain.plan.resolve.unit_shares import with_share
from llmtrain.recipe.pipeline import ScheduleName
from llmtrain.recipe.schema import EveryK, Recipe, TrainConfig


def make_plan(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a recipe. A plan's record, read as a recipe, makes the same plan again.

    Raises BadInputError where a choice is impossible, or where the model, the batch or the schedule does not fit the
    ranks.
    """
    plan = _with_batch(recipe, facts)
    larger = list(with_larger_parts(recipe, plan))
    if larger and memory_budget(plan).exceeds:
        for other in larger:
            # Another key may not allow this number.
            with suppress(BadInputError):
                found = _with_batch(other, facts)
                if not memory_budget(found).exceeds:
                    return found
    return plan


def _with_batch(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a recipe with the microbatch and the activation checkpointing that it leaves open."""
    batches = batches_that_fit(recipe, facts, _plan, _with_share)
    plan = _with_gradients(next(batches), facts)
    # The other one computes more, and is planned only where that may pay.
    compares = weighs_moves(recipe, facts) and not plan.recomputes and waits_for_moves(plan)
    if compares and (other := next(batches, None)) is not None:
        plan = quickest(plan, _with_gradients(other, facts))
    return with_most_staying(plan)


def _with_gradients(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a recipe. Where the recipe leaves open where sums of gradients rest, they rest with the
    weights, but on a host whose stated memory has room for them rather than in files; or on the device, if they fit its
    stated memory and less time is spent on moves."""
    given = recipe.offload
    decided = offload_of(recipe, facts.device, _compute(recipe, facts)).gradients
    if given.gradients != "auto" or decided == "none":
        return _with_spare(recipe, facts)
    host, plan = stated_host_memory(facts.cluster, facts.world), None
    if decided == "nvme" and host is not None and facts.device != "cpu":
        plan = _with_spare(replace(recipe, offload=replace(given, gradients="host")), facts)
    if plan is None or memory_budget(plan).host_excess:
        plan = _with_spare(recipe, facts)
    staying = replace(recipe, offload=replace(given, gradients="none"))
    if stated_memory(facts.cluster) is None or surely_exceeds(_plan(with_least(staying), facts)):
        return plan
    plans = [plan, _with_spare(staying, facts)]
    lacking = [budget.excess + budget.host_excess for budget in map(memory_budget, plans)]
    return quickest(*(one for one, lacks in zip(plans, lacking, strict=True) if lacks == min(lacking)))


def _with_spare(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a recipe, with the least activations on the device."""
    plan, given = _with_share(recipe, facts), recipe.offload
    if given.optimizer == "none" or not (spare := most_spare(plan) if given.spare == "auto" else given.spare):
        return plan
    known = replace(given, share=plan.sharding.offload.share, spare=spare)
    if given.spare == "auto":
        plan = _plan(replace(recipe, offload=known), facts)
    if given.spare_weights != "auto" or facts.device == "cpu":
        return plan
    ahead = _plan(replace(recipe, offload=replace(known, spare_weights="device")), facts)
    return ahead if keeps_weights_ahead(plan, ahead) else plan


def _with_share(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a recipe with its share of states that leave. `offload.spare: auto` is 0."""
    given = recipe.offload
    if given.optimizer == "none" or given.share != "auto":
        return _plan(recipe, facts)
    # The memory that is left goes to gathered weights after that.
    share = least_share(_plan(with_least(recipe), facts))
    least = _plan(replace(recipe, offload=replace(given, share=share)), facts)
    once = least.pipeline.name == "breadth-first" or least.batch.microbatches == 1
    if given.parameters == "none" or recipe.zero.resident != "auto" or share == 1.0 or once:
        return least
    # Offloaded weights come back for each microbatch, so memory may serve them better than optimizer states.
    filled = _plan(replace(recipe, offload=replace(given, share=1.0)), facts)
    zero = replace(recipe.zero, resident=filled.sharding.resident)
    first = _plan(replace(recipe, zero=zero, offload=replace(given, share=least_share(filled))), facts)
    return quickest(least, first)


def _plan(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a recipe whose offloaded share is a number, if it offloads."""
    model, topology = model_shape(recipe, facts), facts.topology(recipe.parallel)
    grid, links = topology.grid, topology.tiers
    batch, compute, backend = _batch(recipe, grid), _compute(recipe, facts), _backend(recipe, facts)
    # In fp32 both are the same.
    precision = recipe.precision if compute != "fp32" else replace(recipe.precision, gradients="fp32", reduce="compute")
    pipeline = _pipeline(recipe, model, batch, grid, facts)
    every_role, tensor = roles_of(model, grid, pipeline.stages), grid.degree(Axis.TENSOR)
    registered = recipe.zero.registered and facts.device != "cpu" and grid.degree(Axis.DATA) > 1
    volumes = facts.cluster.node.nvme if facts.cluster else ()
    offload = Offload.of(offload_of(recipe, facts.device, compute), backend, volumes, facts.device)
    fitting = fits(facts.cluster, every_role, COMPUTE_BYTES[compute], tensor)

    def sharding(zero: ZeroSettings) -> Sharding:
        placement = _placement(zero, grid, links, compute, precision, backend)
        placement = offloaded_placement(placement, offload, COMPUTE_BYTES[compute], facts.device, zero.quantization.any)
        made = _sharding(zero, placement, model, offload, pipeline.schedule.ranks)
        made = replace(made, registered=registered)
        return with_share(made, every_role, offload.share) if offload.share else made

    zero = zero_settings(
        recipe,
        grid.degree(Axis.DATA),
        axis_tiers(links, grid, Axis.DATA),
        None if fitting is None else lambda zero: fitting(sharding(zero)),
    )
    recomputes, training = any(pipeline.recompute), _training(recipe.train, facts)
    if problem := tensor_problems(model, recipe.parallel, recipe.data.sequence_length):
        raise BadInputError(problem)
    plan = Plan(
        name=recipe.name,
        seed=recipe.seed,
        model=model,
        import_from=recipe.model.hf,
        device=facts.device,
        grid=grid,
        tiers=links,
        cluster=topology.cluster,
        batch=batch,
        compute=compute,
        kernels=kernels_of(facts, model, compute, recipe.train.deterministic),
        sequence_parallel=recipe.parallel.sequence,
        activation_offload=ActivationOffload.of(recipe, recomputes, pipeline.schedule, volumes),
        sharding=sharding(zero),
        pipeline=_with_hand_back(pipeline, recipe, training.compile or recomputes, zero.degrees),
        optimizer=AdamW(**{entry.name: getattr(recipe.optimizer, entry.name) for entry in fields(AdamW)}),
        loss_scaling=LossScaling(
            loss_scale=recipe.precision.loss_scale, loss_scale_window=recipe.precision.loss_scale_window
        ),
        spikes=recipe.on_spike,
        training=training,
        data=recipe.data,
        checkpoint=checkpointing(recipe.checkpoint),
        logging=recipe.logging,
        record={},
    )
    zero = _filled(recipe, plan, zero, sharding)
    return replace(plan, sharding=sharding(zero), record=record_of(recipe, zero, backend, plan))


def _batch(recipe: Recipe, grid: Layout) -> Batch:
    sequences, replicas = recipe.train.global_batch, grid.degree(Axis.DATA)
    if sequences % replicas:
        lower = sequences - sequences % replicas
        raise BadInputError(
            f"train.global_batch is {sequences}; expected a multiple of the {replicas} data-parallel ranks, such as "
            f"{f'{lower} or ' if lower else ''}{lower + replicas}"
        )
    share, microbatch = sequences // replicas, recipe.train.microbatch
    if microbatch == "auto":
        microbatch = microbatches(share, grid.degree(Axis.PIPELINE), MOST)[-1]
    if share % microbatch:
        raise BadInputError(
            f"train.microbatch is {microbatch}; expected a divisor of {share}, the sequences of a data-parallel "
            f"rank in train.global_batch ({sequences})"
        )
    return Batch(
        sequences=sequences,
        sequence_length=recipe.data.sequence_length,
        microbatch=microbatch,
        microbatches=share // microbatch,
    )


def _compute(recipe: Recipe, facts: Facts) -> Compute:
    compute = recipe.precision.compute
    if compute == "auto":
        return "fp32" if facts.device == "cpu" else "bf16" if facts.bf16 else "fp16"
    return compute


def _pipeline(recipe: Recipe, model: GPTConfig, batch: Batch, grid: Layout, facts: Facts) -> Pipeline:
    given, ranks = recipe.pipeline, grid.degree(Axis.PIPELINE)
    # One pipeline rank ignores other schedules and their chunks, so that it can run a recipe for many ranks.
    followed = ranks > 1 or given.schedule == "breadth-first"
    name = given.schedule if followed else "1f1b"
    chunks = given.chunks
    if chunks == "auto" or not followed:
        chunks = _chunks(name, ranks, max(1, model.layers // ranks))
    if problem := schedule_problems(name, ranks, chunks, batch.microbatches):
        raise BadInputError(problem)
    if name == "message-driven":
        schedule = Schedule(ranks=ranks, chunks=1, microbatches=batch.microbatches, actions=())
    else:
        schedule = make_schedule(name, ranks, chunks, batch.microbatches)
    layers = _layers(recipe, model, schedule, grid, facts)
    recompute = _recompute(recipe.activation_checkpointing, layers)
    return Pipeline(
        name=name,
        schedule=schedule,
        layers=layers,
        stages=tuple(stage_layouts_of(model, schedule, layers, recompute, rank) for rank in range(ranks)),
        limit=ranks if given.limit == "auto" or ranks == 1 else given.limit,
        transport=given.transport,
    )


def _chunks(name: ScheduleName, ranks: int, layers: int) -> int:
    """Return the stages of each rank if the recipe leaves them open. layers: of each rank."""
    match name:
        case "breadth-first":
            # Each border between ranks has two communicators, whose buffers take more than the layers of large models.
            return layers if ranks == 1 else min(layers, 4)
        case "interleaved" | "zero-bubble-v":
            return 2
        case _:
            return 1


def _layers(recipe: Recipe, model: GPTConfig, schedule: Schedule, grid: Layout, facts: Facts) -> tuple[int, ...]:
    """Return the layers of each stage."""
    if schedule.stages == 1:
        return (model.layers,)
    given, costs = recipe.pipeline, stage_costs(model, recipe.data.sequence_length)
    if recipe.activation_checkpointing != "none":
        again = recomputed_flops(model, recipe.data.sequence_length, ends=False)
        costs = replace(costs, layer=costs.layer + again)
    speeds = facts.speeds or stage_speeds(facts.cluster, grid)
    return split_layers(
        model.layers, schedule.ranks, given.split, costs, speeds, given.alpha, schedule.chunks, schedule.folded
    )


def _with_hand_back(pipeline: Pipeline, recipe: Recipe, opaque: bool, degrees: Degrees) -> Pipeline:
    """Decide whether stages hand the gradient of their inputs back before they compute that of their weights. opaque:
    whether blocks are compiled or recomputed."""
    # Recomputed activations and gathered weights would have to stay until the weights' gradients are computed, and
    # torch.compile does not see through it. Where ranks share the sequence, a waiting input is gathered once more: in
    # most passes of GPipe, and with message-driven in passes that arriving messages choose.
    prevented = opaque or degrees.weights > 1 or recipe.offload.parameters != "none"
    gathers_again = recipe.parallel.sequence and pipeline.name in ("gpipe", "message-driven")
    hands_back = pipeline.schedule.ranks > 1 and not prevented and not gathers_again
    return replace(pipeline, schedule=replace(pipeline.schedule, hands_back=hands_back))


def _sharding(zero: ZeroSettings, placement: Placement, model: GPTConfig, offload: Offload, stages: int) -> Sharding:
    placements = {unit.name: placement for unit in model_units(model)}
    if model.tie_embeddings and stages > 1:
        # The gradients of its two copies are added after those of all other units.
        placements["embedding"] = replace(placement, gradients_on="device")
    return Sharding(
        placements=placements,
        resident=zero.resident,
        quantization=zero.quantization,
        offload=offload,
    )


def _filled(
    recipe: Recipe, plan: Plan, zero: ZeroSettings, sharding: Callable[[ZeroSettings], Sharding]
) -> ZeroSettings:
    """Return settings in which `zero.resident: auto` fills the stated memory of a plan without it."""
    if recipe.zero.resident != "auto":
        return zero
    may_copy = recipe.zero.secondary is None and recipe.zero.preset is None
    return Filling(plan, sharding, may_copy).filled(zero)


def _placement(
    zero: ZeroSettings, grid: Layout, links: Sequence[Tier], compute: Compute, precision: PrecisionConfig,
    backend: OptimizerBackend,
) -> Placement:  # fmt: skip
    """Return the placement of all units: over the data axis."""
    degrees, quantization = zero.degrees, zero.quantization
    # Weights that other ranks receive quantized are rounded, so they cannot be the masters.
    exact = quantization.weights == 0 or degrees.optimizer == degrees.weights
    return Placement(
        axes=(Axis.DATA,),
        degrees=degrees,
        levels=levels_of(degrees, axis_tiers(links, grid, Axis.DATA)),
        hierarchical=zero.hierarchical,
        masters="weights" if compute == "fp32" and exact else "separate",
        gradients=precision.gradients,
        reduce=precision.reduce,
        backend=backend,
        alignment=alignment(quantization.block if quantization.weights else 0),
    )


def _recompute(setting: Literal["none", "full", "auto"] | EveryK, layers: Sequence[int]) -> Sequence[int]:
    """Return the blocks of one group of activation checkpointing of each stage, 0 for none. layers: of each stage, of
    whose group inputs and blocks of one group auto keeps few."""
    match setting:
        case EveryK(every=every):
            given = every if isinstance(every, tuple) else (every,) * len(layers)
            if len(given) != len(layers):
                raise BadInputError(
                    f"activation_checkpointing.every is {list(given)}, which is {len(given)} stages; expected "
                    f"{len(layers)}, one for each chunk of each rank of parallel.pipeline, or one number for all; or "
                    "set activation_checkpointing=auto"
                )
            return given
        case "auto":
            return [_factor_nearest_root(count) for count in layers]
        case "full":
            return (1,) * len(layers)
        case "none":
            return (0,) * len(layers)


def _factor_nearest_root(count: int) -> int:
    factors = [factor for factor in range(1, count + 1) if count % factor == 0]
    return min(factors, key=lambda factor: (abs(factor - sqrt(count)), factor))


def _backend(recipe: Recipe, facts: Facts) -> OptimizerBackend:
    backend = recipe.optimizer.backend
    if backend == "auto":
        if facts.device == "cpu":
            return "cpu"
        if facts.triton:
            return "triton"
        return "apex" if facts.apex else "torch"
    return backend


def _training(train: TrainConfig, facts: Facts) -> Training:
    return Training(
        steps=train.steps,
        eval_every=train.eval_every,
        eval_batches=train.eval_batches,
        attention=facts.attention if train.attention == "auto" else train.attention,
        compile=facts.compiled if train.compile == "auto" else train.compile,
        deterministic=train.deterministic,
        max_skipped=train.max_skipped,
        compare_every=train.compare_every,
        timeout=train.timeout,
    )
