"""Checks beyond types: keys that contradict each other, the number of ranks.

They run before any process starts and before anything is written. Each error is one sentence.
"""

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches

from llmtrain_kernels.attention.choice import lack
from llmtrain_kernels.quantize.packed_size import LARGEST_GPU_BLOCK

from llmtrain.cluster.memory import stated_host_memory
from llmtrain.cluster.topology import placement_advice
from llmtrain.errors import BadInputError
from llmtrain.model.config import GPTConfig, may_differ
from llmtrain.model.presets import PRESETS
from llmtrain.optim.config import OptimizerConfig, PrecisionConfig, SpikeConfig
from llmtrain.plan.facts import Facts
from llmtrain.plan.flops import lack_of_bf16
from llmtrain.plan.memory.memory_budget import host_memory
from llmtrain.plan.offload import Offload
from llmtrain.plan.per_rank.rank_activations import boundary_bytes
from llmtrain.plan.per_rank.rank_buckets import steps_ahead
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.pipeline.schedules import schedule_warning
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.gradient_dtype import gradient_dtype_problem
from llmtrain.plan.resolve.resident_check import resident_problem
from llmtrain.recipe.logging import LoggingConfig
from llmtrain.recipe.other_words import VALUES, unsupported
from llmtrain.recipe.schema import Recipe, TrainConfig
from llmtrain.yaml.shown import shown

# The fewest microbatches of a step that are many.
MANY = 4


def check_given(recipe: Recipe) -> None:
    """Check a recipe before it is planned: it has one model, and keys that apply to it. Raises BadInputError."""
    model = recipe.model
    ways = [key for key in ("preset", "hf", "family") if getattr(model, key) is not None]
    if not ways:
        raise BadInputError("the recipe has no model; set model.preset, model.hf, or model.family with its sizes")
    if model.preset is not None and len(ways) > 1:
        raise BadInputError(
            f"model.preset is {model.preset} and model.{ways[1]} is {getattr(model, ways[1])}; expected one of them, "
            "set the other to null"
        )
    if model.preset is not None and model.preset not in PRESETS:
        usual = VALUES.get(("model.preset", model.preset.lower()))
        near = [usual] if usual else get_close_matches(model.preset, PRESETS, n=1)
        advice = f"did you mean {near[0]}?" if near else "`llmtrain recipes presets` lists them"
        raise BadInputError(
            f"model.preset is {model.preset}, which is no preset; {unsupported(model.preset) or advice}"
        )
    family = PRESETS[model.preset].family if model.preset else model.family
    for key in ("rope_theta", "rope_scaling", "rotary_fraction"):
        if family == "gpt2" and getattr(model, key) is not None:
            raise BadInputError(f"model.{key} does not apply to family gpt2, whose positions are learned; leave it out")
    if recipe.optimizer.warmup > recipe.train.steps:
        default = ", its default" if recipe.optimizer.warmup == OptimizerConfig().warmup else ""
        raise BadInputError(
            f"optimizer.warmup is {recipe.optimizer.warmup}{default}; expected at most train.steps "
            f"({recipe.train.steps}), set optimizer.warmup to that or less"
        )
    _check_one_origin(recipe)
    pipeline = recipe.pipeline
    # recipe.resolved.yaml has both alpha and the list of layers that it led to.
    if pipeline.alpha != 1 and pipeline.split in ("uniform", "balanced"):
        raise BadInputError(
            f"pipeline.alpha is {pipeline.alpha}, but pipeline.split is {pipeline.split}, which does not look at the "
            "stages' speeds; leave alpha out, or set pipeline.split to auto"
        )


def _check_one_origin(recipe: Recipe) -> None:
    """Check that the weights of a run's start come from one place. Raises BadInputError."""
    weights, resume = recipe.checkpoint.weights, recipe.checkpoint.resume
    given = {"model.hf": recipe.model.hf, "checkpoint.resume": None if resume in ("auto", "never") else resume}
    for key, other in given.items():
        if weights is not None and other is not None:
            raise BadInputError(
                f"checkpoint.weights is {weights} and {key} is {other}; expected one of them, leave the other out"
            )


def check(plan: Plan, facts: Facts) -> None:
    """Check that the parts of a plan are consistent, with each other and with the facts that it was made from. Raises
    BadInputError."""
    model, training = plan.model, plan.training
    if facts.tokenizer is not None and model.vocab < facts.tokenizer:
        wanted = f"expected at least the {facts.tokenizer} of data.tokenizer, or auto"
        if facts.hf is not None or plan.checkpoint.origin is not None:
            # The model exists already, so that its vocabulary cannot grow.
            wanted = (
                f"data.tokenizer has {facts.tokenizer} ids; leave data.tokenizer out, as each id of the data is "
                "checked against model.vocab in any case"
            )
        raise BadInputError(f"model.vocab is {model.vocab}; {wanted}")
    if facts.hf is not None:
        _check_same_model(model, facts.hf)
    if plan.batch.sequence_length > model.positions:
        raise BadInputError(
            f"data.sequence_length is {plan.batch.sequence_length}; expected at most model.positions "
            f"({model.positions}), lower the one or raise the other"
        )
    if training.eval_every and not plan.data.validates:
        raise BadInputError(
            f"train.eval_every is {training.eval_every}, but data.split leaves nothing to validate on; give its "
            "second number a share, name a set in data.validation, or set train.eval_every=0"
        )
    backends = {placement.backend for placement in plan.sharding.placements.values()}
    if "apex" in backends and not (facts.apex and facts.device == "cuda"):
        raise BadInputError("optimizer.backend is apex, which needs NVIDIA's apex and a GPU; set it to auto")
    if "triton" in backends and not (facts.triton and facts.device == "cuda"):
        raise BadInputError("optimizer.backend is triton, which needs Triton and a GPU; set it to auto")
    if "cpu" in backends and facts.device != "cpu":
        raise BadInputError("optimizer.backend is cpu, and the run computes on a GPU; set it to auto")
    wide = plan.compute == "fp32"
    if facts.device == "cuda" and (what := lack(training.attention, wide, model.dropout, training.deterministic)):
        raise BadInputError(f"train.attention is {training.attention}, which has no {what}; set it to auto")
    quantization = plan.sharding.quantization
    if facts.device == "cuda" and quantization.any and quantization.block > LARGEST_GPU_BLOCK:
        raise BadInputError(
            f"quantize.block is {quantization.block}; expected at most {LARGEST_GPU_BLOCK} on GPUs, which have a block "
            "in registers"
        )
    if (most := max(plan.pipeline.recompute)) > model.layers:
        raise BadInputError(f"activation_checkpointing.every is {most}; expected at most model.layers ({model.layers})")
    if problem := resident_problem(plan) or gradient_dtype_problem(plan):
        raise BadInputError(problem)


def advice(recipe: Recipe, plan: Plan) -> list[str]:
    """Return a sentence for each setting that is allowed, but is likely a mistake. plan: of the recipe."""
    schedule, found = plan.pipeline.schedule, placement_advice(plan.cluster, plan.grid)
    if schedule.ranks > 1:
        sizes = (schedule.ranks, schedule.chunks, schedule.microbatches)
        warning = schedule_warning(plan.pipeline.name, *sizes, schedule.hands_back, plan.pipeline.limit)
        found += [] if warning is None else [warning]
    found += _breadth_first(plan)
    found += _moved_often(plan)
    found += _absolute_min_lr(plan)
    found += _emulated(plan)
    return [*found, *_unused(recipe, plan), *_without_effect(plan), *_idle_keys(recipe, plan)]


def _absolute_min_lr(plan: Plan) -> Iterator[str]:
    """Yield a sentence about a final learning rate that is given as other trainers take it."""
    lr, share = plan.optimizer.lr, plan.optimizer.min_lr
    if 0 < share <= lr and plan.optimizer.schedule != "constant":
        yield (
            f"optimizer.min_lr is {share:g}, a share of optimizer.lr, so that the learning rate ends at "
            f"{share * lr:.3g}; to end at {share:g}, set it to {share / lr:.3g}"
        )


def _emulated(plan: Plan) -> Iterator[str]:
    """Yield a sentence about a dtype that the described card does not have."""
    if plan.device == "cuda" and plan.cluster and (lack := lack_of_bf16(plan.compute, plan.cluster.accelerator)):
        yield f"precision.compute is bf16, but {lack}, and torch emulates it slowly; set it to fp16"


def _breadth_first(plan: Plan) -> Iterator[str]:
    """Yield a sentence about a breadth-first schedule that keeps too much, or that changes nothing."""
    microbatches = plan.batch.microbatches
    if plan.pipeline.name != "breadth-first":
        return
    if microbatches == 1:
        yield (
            "pipeline.schedule is breadth-first, but a step has one microbatch, so that it changes nothing; set a "
            "smaller train.microbatch, or leave it out"
        )
    elif not any(plan.pipeline.recompute):
        yield (
            f"pipeline.schedule is breadth-first, so that the activations of all {microbatches} microbatches stay; "
            "set activation_checkpointing to full to keep only the inputs of layers"
        )


def _moved_often(plan: Plan) -> Iterator[str]:
    """Yield a sentence about offloaded weights or gradients that move for each of many microbatches."""
    placements, microbatches = plan.sharding.placements, plan.batch.microbatches
    if plan.pipeline.name != "1f1b" or plan.pipeline.schedule.ranks > 1 or microbatches < MANY:
        return
    sizes = [placements[unit.name].padded(unit.numel) * plan.compute_bytes for unit in rank_units(plan, 0)]
    # A CPU's memory is the host's.
    elsewhere = ("nvme",) if plan.device == "cpu" else ("host", "nvme")
    weights = plan.sharding.offload.parameters in elsewhere and plan.sharding.resident < sum(sizes)
    gradients = any(placement.gradients_on in elsewhere for placement in placements.values())
    if weights or gradients:
        what = " and ".join(["weights"] * weights + ["gradients"] * gradients)
        if instead := _moved_once(plan):
            yield f"offloaded {what} move for each of the {microbatches} microbatches of a step; {instead}"


def _moved_once(plan: Plan) -> str | None:
    """Return how offloaded weights and gradients move less often, where what that keeps has room."""
    once = "pipeline.schedule=breadth-first moves them once, and keeps the inputs of layers of all microbatches, "
    host, (role,) = stated_host_memory(plan.cluster, plan.grid.world), roles(plan)[:1]
    inputs = plan.batch.microbatches * plan.model.layers * boundary_bytes(plan)
    if host is None or plan.device == "cpu" or sum(host_memory(plan, role).values()) + inputs <= host.size:
        return f"{once}on the host with offload.activations=host"
    if plan.sharding.offload.paths or (plan.cluster and plan.cluster.node.nvme):
        return f"{once}in files with offload.activations=nvme"
    if plan.recomputes:
        return None
    return "a larger train.microbatch with activation_checkpointing=full moves them less often"


def _unused(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Yield a sentence for each number or name that is set, but that one other key leaves without use."""
    schedule, compute = plan.optimizer.schedule, plan.compute
    decays = f"optimizer.schedule is {schedule}"
    unscaled = f"precision.compute is {compute}" if compute != "fp16" else None
    keys = (
        ("optimizer.decay", OptimizerConfig.decay, decays if schedule != "wsd" else None),
        ("optimizer.min_lr", OptimizerConfig.min_lr, decays if schedule == "constant" else None),
        ("precision.loss_scale", PrecisionConfig.loss_scale, unscaled),
        ("precision.loss_scale_window", PrecisionConfig.loss_scale_window, unscaled),
        (
            "on_spike.window",
            SpikeConfig.window,
            "without on_spike.threshold nothing is a spike" if not plan.spikes.threshold else None,
        ),
        (
            "train.eval_batches",
            TrainConfig.eval_batches,
            "train.eval_every is 0" if not plan.training.eval_every else None,
        ),
        (
            "logging.wandb_project",
            LoggingConfig.wandb_project,
            "logging.wandb is off" if plan.logging.wandb == "off" else None,
        ),
    )
    for key, default, why in keys:
        section, _, name = key.partition(".")
        value = getattr(getattr(recipe, section), name)
        if why is not None and value != default:
            yield f"{key} is {value}, but {why}, so that it has no effect; leave it out"
    if plan.cluster is not None and plan.cluster.between is not None and len(plan.cluster.clusters) < 2:
        yield "cluster.between is given, but there is one cluster, so that it has no effect; leave it out"


def _without_effect(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each decision that has no effect with the others as they are."""
    pipeline, stages, spikes, sharding = plan.pipeline, plan.pipeline.schedule.ranks, plan.spikes, plan.sharding
    if spikes.action != "skip" and not spikes.threshold:
        yield f"on_spike.action is {spikes.action}, but without on_spike.threshold nothing is a spike; set it to 2, say"
    # The default limit is the number of stages.
    if pipeline.limit != stages and pipeline.name != "message-driven":
        yield (
            f"pipeline.limit is {pipeline.limit}, which pipeline.schedule {pipeline.name} does not have; leave it "
            "out, or set pipeline.schedule to message-driven"
        )
    if sharding.offload.parameters != "device" and pipeline.name == "message-driven":
        yield (
            f"offload.parameters is {sharding.offload.parameters}, but pipeline.schedule message-driven keeps all "
            "weights of a stage on the device during a step; leave it out, or take another schedule"
        )
    placements = sharding.placements.values()
    if any(not one.hierarchical and one.degrees.weights == 1 and one.degrees.ranks > 1 for one in placements):
        yield (
            "zero.hierarchical is false, but every rank holds all weights (zero.partition.weights is 1), so that it "
            "changes no gather; leave it out, or set zero.stage to 3"
        )
    if sharding.resident and all(one.degrees.weights == 1 and not one.moves_weights for one in placements):
        yield (
            f"zero.resident is {sharding.resident}, but every rank holds all weights (zero.partition.weights is 1), so "
            "that none are gathered; leave it out, or set zero.stage to 3"
        )


def _idle_keys(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Yield a sentence for each key of the recipe that is set, but of which its plan has no decision."""
    if recipe.precision.gradients == "compute" and plan.compute == "fp32":
        yield "precision.gradients is compute, but precision.compute is fp32, in which gradients are summed anyway"
    if recipe.precision.reduce == "fp32" and plan.compute != "fp32" and plan.grid.world > 1 and not plan.sends_sums:
        yield (
            "precision.reduce is fp32, but each rank sends gradients of one microbatch alone, which are "
            f"{plan.compute}, and no sum of them; leave it out"
        )
    yield from _of_several_stages(recipe, plan)
    if recipe.zero.registered and not plan.sharding.registered:
        idle = "NCCL does not join CPUs" if plan.device == "cpu" else "no other data-parallel rank has gradients to add"
        yield f"zero.registered is true, but {idle}; leave it out"
    offload, unset, made = recipe.offload, Offload(), plan.sharding.offload
    if offload.overlap != "auto" and made.tier == "host" and not made.on_device and made.gradients != "device":
        yield (
            f"offload.overlap is {offload.overlap}, but one thread steps buckets whose gradients are offloaded, and "
            "none is fetched ahead from the host's memory; leave it out"
        )
    # Sums of gradients move in buckets too.
    buckets = () if plan.sharding.offload.gradients != "device" else ("bucket",)
    given = {key: getattr(offload, key) for key in ("share", "spare", "spare_weights", *buckets, "overlap")}
    # A plan's record, read as a recipe, has the values of a plan without offload.
    unused = [f"offload.{key} is {value}" for key, value in given.items() if value not in ("auto", getattr(unset, key))]
    if offload.optimizer == "none" and unused:
        yield (
            f"{' and '.join(unused)}, but offload.optimizer is none, so that no optimizer states leave; set it to host "
            "or nvme"
        )
    if offload.optimizer != "none" and offload.share == 0:
        yield f"offload.share is 0, so that offload.optimizer={offload.optimizer} moves nothing; leave one of them out"
    elif plan.sharding.offload.spare and not steps_ahead(plan):
        yield (
            f"offload.spare is {offload.spare}, but no gradients are complete before the last pass ends, so that "
            "nothing is stepped ahead; leave it out"
        )
    elif offload.optimizer != "none" and offload.spare_weights == "device" and (why := _no_spare_weights(recipe, plan)):
        yield f"offload.spare_weights is device, but {why}; leave it out"


def _of_several_stages(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Yield a sentence about keys of a pipeline of several stages, which its one stage has in a way of its own."""
    # A plan's record, read as a recipe, has the values of its plan.
    made = {"chunks": plan.pipeline.schedule.chunks, "limit": plan.pipeline.limit, "split": plan.pipeline.layers}
    for key, own in made.items() if plan.pipeline.schedule.ranks == 1 else ():
        value = getattr(recipe.pipeline, key)
        if not isinstance(value, str) and value != own:
            yield (
                f"pipeline.{key} is {shown(value)}, but parallel.pipeline is 1, so that all layers are on one rank; "
                "leave it out"
            )


def _no_spare_weights(recipe: Recipe, plan: Plan) -> str | None:
    """Return why no weights of steps ahead can wait on the device, or None."""
    offload = plan.sharding.offload
    if plan.device == "cpu":
        return "a CPU computes, whose memory is the host's"
    if offload.parameters != "device":
        return f"offload.parameters is {offload.parameters}, so that weights rest there"
    if offload.spare:
        return None
    if recipe.offload.spare == "auto":
        return "there is no room for anything to be stepped ahead"
    return "offload.spare is 0, so that nothing is stepped ahead"


def _check_same_model(model: GPTConfig, hf: GPTConfig) -> None:
    free = may_differ(hf.family, weights_alone=True)
    for key in (entry.name for entry in fields(GPTConfig) if entry.name not in free):
        if getattr(model, key) != getattr(hf, key):
            raise BadInputError(
                f"model.{key} is {getattr(model, key)}, but the model in model.hf has {getattr(hf, key)}; leave it out"
            )
