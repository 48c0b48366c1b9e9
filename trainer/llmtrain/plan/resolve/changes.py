"""The changes of a recipe that may make it fit a memory, in the order in which they are tried. No torch in here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from llmtrain.cluster.layout import Axis
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.auto_share import EIGHTHS
from llmtrain.recipe.schema import Recipe
from llmtrain.recipe.zero import STAGES, PartitionConfig

# The keys of `offload` that say where something rests.
OFFLOADABLE = ("activations", "optimizer", "parameters")
# A folder of which nothing is known but that there is one.
ANY_VOLUME = "."
# The most stages of a pipeline that are tried before tensor parallelism is tried with a pipeline.
SMALL = 8
# What keys of a recipe are set to.
Values = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A change of a recipe. keys: what it sets, as `key=value`. recipe: the changed recipe."""

    keys: tuple[str, ...]
    recipe: Recipe

    @classmethod
    def of(cls, recipe: Recipe, values: Values) -> "Change":
        """Return the change of a recipe that sets values."""
        changed = recipe
        for key, value in values.items():
            changed = _set(changed, key.split("."), value)
        return cls(tuple(f"{key}={_text(value)}" for key, value in values.items()), changed)

    @property
    def advice(self) -> str:
        """What to do to make the change."""
        unnamed = f"offload.paths={_text((ANY_VOLUME,))}" in self.keys
        volume = f" with the folder of an NVMe volume in place of {ANY_VOLUME}" if unnamed else ""
        return f"set {' '.join(self.keys)}{volume}"


def changes(recipe: Recipe, plan: Plan) -> Iterator[Change]:
    """Yield the changes that may take less memory, those that cost least time first: single ones, pairs of them and
    the strongest together, and those that offload, alone and with others. What is offloaded is sharded first where
    there are replicas, each of which would else have all of it in its host's memory."""
    sharding, activations = _sharding(recipe, plan), list(_activations(recipe, plan))
    tensors = _tensors(recipe, plan)
    ahead = _not_ahead(plan)
    least, together = _fewest(activations)
    # Tensor parallelism splits all activations only with that of the sequence.
    wide = [values | {"parallel.sequence": True} for values in tensors[-1:]]
    for values in (
        *_whole_share(recipe),
        *ahead,
        *sharding,
        *activations,
        *tensors,
        *_pipelines(recipe, plan, tensors),
        *(_merged([shard, fewer]) for fewer in least for shard in sharding),
        *map(_merged, combinations(least, 2)),
        *(_merged([*ahead[:1], fewer]) for fewer in least if ahead),
        *(_merged([*sharding[-1:], fewer]) for fewer in together),
        *wide,
        *(_merged([*sharding[-1:], *least, values]) for values in wide),
        *_offloads(recipe, plan, sharding, [*least, *together]),
    ):
        yield Change.of(recipe, values)


def file_changes(recipe: Recipe, plan: Plan) -> Iterator[Change]:
    """Yield, where no volume is named, the changes that offload to files on one, those that cost least time first."""
    if "nvme" in _tiers(recipe, plan):
        return
    least, together = _fewest(list(_activations(recipe, plan)))
    moved: Values = {f"offload.{key}": "nvme" for key in OFFLOADABLE if getattr(recipe.offload, key) == "host"}
    if len(moved) > 1 and "offload.optimizer" in moved:
        yield Change.of(recipe, {"offload.optimizer": "nvme", "offload.paths": (ANY_VOLUME,)})
    further = _offloads(recipe, plan, _sharding(recipe, plan), [*least, *together], files_alone=True)
    for values in (*([moved] if moved else ()), *further):
        yield Change.of(recipe, moved | values | {"offload.paths": (ANY_VOLUME,)})


def host_changes(recipe: Recipe, plan: Plan) -> Iterator[Change]:
    """Yield the single changes that may take less of the host's memory: no copies for checkpoints, less spare memory,
    files instead of the host, a smaller share of what leaves the device, and none."""
    given, share = recipe.offload, plan.sharding.offload.share
    # Offloaded states are written to the checkpoint directly, without a copy.
    if plan.checkpoint.asynchronous and not share:
        yield Change.of(recipe, {"checkpoint.async": False})
    for eighths in range(EIGHTHS - 1, -1, -1):
        if eighths / EIGHTHS < plan.sharding.offload.spare:
            yield Change.of(recipe, {"offload.spare": eighths / EIGHTHS})
    for key in OFFLOADABLE:
        if getattr(given, key) == "host" and "nvme" in _tiers(recipe, plan):
            yield Change.of(recipe, {f"offload.{key}": "nvme"})
    if given.activations == "host":
        yield Change.of(recipe, {"offload.activations": "none"})
    if given.optimizer == "none":
        return
    for tenths in range(9, 0, -1):
        if tenths / 10 < share:
            yield Change.of(recipe, {"offload.share": tenths / 10})
    if not given.paths:
        step = {"offload.step": "host"} if given.step == "device" else {}
        yield Change.of(recipe, step | {"offload.optimizer": "none"})


def _set(config: Any, names: Sequence[str], value: object) -> Any:
    """Return a section of a recipe with a value at names below it."""
    name, *below = names
    # `async` is no name in Python.
    name = "asynchronous" if name == "async" else name
    return replace(config, **{name: _set(getattr(config, name), below, value) if below else value})


def _text(value: object) -> str:
    """Return a value as it is written on the command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value).lower()


def _merged(several: Sequence[Values]) -> Values:
    return {key: value for values in several for key, value in values.items()}


def _whole_share(recipe: Recipe) -> list[Values]:
    """Return the change that lets as many optimizer states leave as must, if a smaller share may be given."""
    given = recipe.offload
    return [{"offload.share": "auto"}] if given.optimizer != "none" and given.share not in ("auto", 1) else []


def _not_ahead(plan: Plan) -> list[Values]:
    """Return the changes that leave less on the device for what is stepped ahead."""
    offload = plan.sharding.offload
    if not offload.spare:
        return []
    waiting: list[Values] = [{"offload.spare_weights": "host"}] if offload.spare_weights == "device" else []
    return [*waiting, *([{"offload.spare": 0.0}] if offload.on_device else [])]


def _sharding(recipe: Recipe, plan: Plan) -> list[Values]:
    """Return the larger stages of ZeRO, where there are replicas, or larger parts where the recipe sets parts."""
    replicas, zero = plan.grid.degree(Axis.DATA), recipe.zero
    if replicas == 1:
        return []
    if zero.preset is None and zero.partition == PartitionConfig():
        return [{"zero.stage": stage} for stage in STAGES[_stage(plan) + 1 :]]
    degrees = next(iter(plan.sharding.placements.values())).degrees
    states = [name for name in ("optimizer", "gradients", "weights") if getattr(degrees, name) < replicas]
    larger: list[Values] = []
    for state in states:
        numbers = [number for number in range(getattr(degrees, state) + 1, replicas + 1) if replicas % number == 0]
        larger += [{f"zero.partition.{state}": number} for number in (*numbers[:2], *numbers[2:][-1:])]
    return [*larger, {f"zero.partition.{state}": "all" for state in states}] if larger else []


def _stage(plan: Plan) -> int:
    """Return the stage of ZeRO that shards what a plan shards."""
    degrees = [placement.degrees for placement in plan.sharding.placements.values()]
    states = ("optimizer", "gradients", "weights")
    return max((stage for stage, name in enumerate(states, 1) for one in degrees if getattr(one, name) > 1), default=0)


def _activations(recipe: Recipe, plan: Plan) -> Iterator[Values]:
    """Yield changes that keep fewer activations: of the pipeline's schedule, sequence parallelism, activation
    checkpointing, and smaller microbatches."""
    pipeline, chunks = plan.pipeline, plan.pipeline.schedule.chunks // 2
    if pipeline.name in ("interleaved", "breadth-first"):
        while chunks > 1:
            yield {"pipeline.chunks": chunks}
            chunks //= 2
    if pipeline.name != "1f1b":
        stated = {} if recipe.pipeline.chunks == "auto" else {"pipeline.chunks": "auto"}
        yield {"pipeline.schedule": "1f1b"} | stated
    if plan.grid.degree(Axis.TENSOR) > 1 and not plan.sequence_parallel:
        yield {"parallel.sequence": True}
    if recipe.activation_checkpointing == "none":
        yield {"activation_checkpointing": "auto"}
    if recipe.activation_checkpointing != "full":
        yield {"activation_checkpointing": "full"}
    share = plan.batch.microbatch * plan.batch.microbatches
    yield from ({"train.microbatch": size} for size in range(plan.batch.microbatch - 1, 0, -1) if share % size == 0)


def _tensors(recipe: Recipe, plan: Plan) -> list[Values]:
    """Return larger degrees of tensor parallelism, inside a node; fewer replicas."""
    now, node = plan.grid.degree(Axis.TENSOR), _node(plan)
    # Of another degree, some groups would have ranks of two nodes.
    degrees = [degree for degree in range(2 * now, node + 1, now) if node % degree == 0]
    return [values for degree in degrees if (values := _grid(recipe, plan, degree // now, 1))]


def _pipelines(recipe: Recipe, plan: Plan, tensors: Sequence[Values]) -> Iterator[Values]:
    """Yield larger degrees of pipeline parallelism, with fewer replicas; before the large ones, whose ranks idle
    longer, those with the largest degree of `tensors` and sequence parallelism."""
    grid, wide = plan.grid, tensors[-1:]
    now = grid.degree(Axis.PIPELINE)
    times = range(2, plan.model.layers // now + 1)
    alone = {now * factor: values for factor in times if (values := _grid(recipe, plan, 1, factor))}
    yield from (values for degree, values in alone.items() if degree <= SMALL)
    for values in wide:
        wider = values["parallel.tensor"] // grid.degree(Axis.TENSOR)
        both = (_grid(recipe, plan, wider, factor) for factor in times)
        yield from (values | {"parallel.sequence": True} for values in both if values)
    yield from (values for degree, values in alone.items() if degree > SMALL)


def _node(plan: Plan) -> int:
    """Return the ranks of a machine."""
    return min(plan.grid.world, plan.cluster.node.ranks if plan.cluster else plan.grid.world)


def _grid(recipe: Recipe, plan: Plan, tensor: int, pipeline: int) -> Values:
    """Return the change to `tensor` and `pipeline` times as many ranks along these axes; none if the replicas do not
    divide."""
    grid = plan.grid
    replicas, rest = divmod(grid.degree(Axis.DATA), tensor * pipeline)
    if rest:
        return {}
    times = {axis: factor for axis, factor in ((Axis.TENSOR, tensor), (Axis.PIPELINE, pipeline)) if factor > 1}
    stated = {} if recipe.parallel.data == "auto" else {"parallel.data": replicas}
    return {f"parallel.{axis.value}": factor * grid.degree(axis) for axis, factor in times.items()} | stated


def _fewest(activations: Sequence[Values]) -> tuple[list[Values], list[Values]]:
    """Return, of the changes that keep fewer activations, the one of each section that keeps fewest, and all of these
    together where there are several."""
    least = list({next(iter(values)).partition(".")[0]: values for values in activations}.values())
    return least, [_merged(least)] if len(least) > 1 else []


def _offloads(
    recipe: Recipe, plan: Plan, sharding: Sequence[Values], activations: Sequence[Values], files_alone: bool = False
) -> Iterator[Values]:
    """Yield changes that offload activations, where they are recomputed, optimizer states, and all model states; then
    those of states with each of `activations`. files_alone: whether to leave out those without files."""
    tiers = ("host", "nvme") if files_alone else _tiers(recipe, plan)
    states = [moved for moved in _states(recipe, tiers) if not files_alone or "nvme" in moved.values()]
    if plan.recomputes and recipe.offload.activations == "none":
        yield from ({"offload.activations": tier} for tier in tiers[1 if files_alone else 0 :])
    unsharded = list[Values]()
    for moved in states:
        values = _merged([*_whole_share(recipe), moved])
        least = 3 if "offload.parameters" in moved else 1
        if _stage(plan) < least and sharding:
            unsharded.append(values)
        else:
            yield values
        yield from (_merged([shard, values]) for shard in sharding if shard.get("zero.stage", least) >= least)
    yield from unsharded
    for moved in states:
        values = _merged([*sharding[-1:], *_whole_share(recipe), moved])
        yield from (values | fewer for fewer in activations)


def _states(recipe: Recipe, tiers: Sequence[str]) -> Iterator[Values]:
    """Yield what offloads optimizer states to `tiers`, and what offloads all model states. Optimizer states go to files
    first: they move once a step, and weights and gradients for each microbatch."""
    given = recipe.offload
    if given.optimizer == "none":
        yield from ({"offload.optimizer": tier} for tier in tiers)
    if given.parameters != "none":
        return
    least = tiers.index(given.optimizer) if given.optimizer in tiers else 0
    for place, tier in enumerate(tiers):
        for below in tiers[max(place, least) :]:
            moved = {} if below == given.optimizer else {"offload.optimizer": below}
            yield {**moved, "offload.parameters": tier}


def _tiers(recipe: Recipe, plan: Plan) -> tuple[str, ...]:
    """Return where a run may offload to."""
    volumes = recipe.offload.paths or (plan.cluster and plan.cluster.node.nvme)
    return ("host", "nvme") if volumes else ("host",)
