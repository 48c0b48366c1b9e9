"""A pipeline's timeline, waiting and memory, predicted before the run. Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from llmtrain_data import units

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.quantity import quantity
from llmtrain.cluster.topology import stage_speeds
from llmtrain.errors import BadInputError
from llmtrain.plan.per_rank.rank_activations import boundary_bytes
from llmtrain.plan.pipeline.actions import Schedule, peak_live
from llmtrain.plan.pipeline.layer_split import StageCosts, stage_costs
from llmtrain.plan.pipeline.message_times import MessageTimes, message_times
from llmtrain.plan.pipeline.schedules import live_bound, make_schedule, schedule_problems, schedule_warning
from llmtrain.plan.pipeline.timeline import Durations, Timeline, simulate, simulate_message_driven
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.pipeline import ScheduleName

# The unit of time if the speed of a rank is not given.
LAYERS = "forward passes of one layer"


@dataclass(frozen=True, kw_only=True)
class PipelineView:
    """A pipeline and its timeline.

    split: layers of each stage. bound: upper bound of the activations that each rank holds (see `live_bound`). warning:
    a sentence on what makes it slow. unit: the unit of its times. links: a sentence on the time of messages.
    """

    name: ScheduleName
    schedule: Schedule
    split: tuple[int, ...]
    timeline: Timeline
    bound: tuple[int, ...]
    warning: str | None = None
    unit: str = LAYERS
    links: str | None = None

    @property
    def live(self) -> list[int]:
        """The most activations that each rank holds at the same time, in microbatches of one stage."""
        return peak_live(self.schedule)

    @property
    def slowdown(self) -> float:
        """The duration of a step, relative to ranks that share the work evenly and never wait."""
        return 1 + self.timeline.bubble_over_ideal

    def as_data(self) -> dict[str, Any]:
        """Return the view as plain data, for JSON."""
        stages = [(stage, *self.schedule.rank_and_chunk(stage), layers) for stage, layers in enumerate(self.split)]
        return {
            "schedule": self.name,
            "ranks": self.schedule.ranks,
            "chunks": self.schedule.chunks,
            "microbatches": self.schedule.microbatches,
            "stages": [dict(zip(("stage", "rank", "chunk", "layers"), stage, strict=True)) for stage in stages],
            "bubble": self.timeline.bubble,
            "bubble_over_ideal": self.timeline.bubble_over_ideal,
            "slowdown": self.slowdown,
            "step_time": self.timeline.makespan,
            "unit": self.unit,
            "peak_live": self.live,
            "live_bound": list(self.bound),
            "warning": self.warning,
            "links": self.links,
            "actions": [
                [{"action": str(span.action), "start": span.start, "end": span.end} for span in spans]
                for spans in self.timeline.ranks
            ],
        }


def show(
    ranks: int,
    chunks: int,
    microbatches: int,
    name: ScheduleName,
    split: Sequence[int],
    durations: Durations,
    limit: int | None = None,
    hands_back: bool = False,
) -> PipelineView:
    """Return the view of a pipeline. split: layers of each stage. limit: microbatches that message-driven has in flight
    (None: as many as ranks). hands_back: see `Schedule`. Raises BadInputError for an impossible schedule.
    """
    problem = schedule_problems(name, ranks, chunks, microbatches)
    if problem is not None:
        raise BadInputError(problem)
    if name == "message-driven":
        timeline = simulate_message_driven(ranks, microbatches, limit or ranks, durations, hands_back)
        schedule = Schedule(ranks=ranks, chunks=1, microbatches=microbatches, actions=timeline.actions)
    else:
        schedule = replace(make_schedule(name, ranks, chunks, microbatches), hands_back=hands_back)
        timeline = simulate(schedule, durations)
    bound = live_bound(name, ranks, chunks, microbatches, limit)
    warning = schedule_warning(name, ranks, chunks, microbatches, hands_back, limit)
    return PipelineView(
        name=name, schedule=schedule, split=tuple(split), timeline=timeline, bound=tuple(bound), warning=warning
    )


def durations_by_work(
    split: Sequence[int],
    costs: StageCosts,
    speeds: Sequence[float] | None,
    stages: Schedule,
    layer: float = 1.0,
    recomputed: bool = False,
) -> Durations:
    """Return the durations of stages from their FLOPs and the speeds of their ranks (None: all 1). Messages take no
    time. layer: time of a forward pass of one layer at speed 1. The forward pass, the backward pass of the inputs and
    that of the weights have the same number of FLOPs. recomputed: whether the backward pass recomputes the layers.
    """
    own = [
        layer / (1.0 if speeds is None else speeds[stages.rank_and_chunk(stage)[0]]) for stage in range(stages.stages)
    ]
    times = [work / costs.layer * unit for work, unit in zip(costs.of(split), own, strict=True)]
    again = [recomputed * layers * unit for layers, unit in zip(split, own, strict=True)]
    return Durations(times, list(map(add, times, again)), times, [0.0] * (stages.stages - 1))


def show_recipe(
    name_or_path: str, overrides: Sequence[str], ranks: int | None, flops: str | None = None
) -> PipelineView:
    """Return the view of a recipe's pipeline, by FLOPs and the speeds that the cluster states.

    The data need not be there. ranks: number of ranks of the run; None for as many as the cluster has, or, where
    nothing says how many, as one replica needs. flops: what a rank of speed 1 computes in a second, such as 150TFLOP/s;
    with it, times are in seconds, and messages take theirs by the bandwidths and latencies that the cluster states.
    Raises BadInputError.
    """
    recipe, facts = described_run(name_or_path, overrides, ranks)
    plan = make_plan(recipe, facts)
    if plan.pipeline.schedule.stages == 1:
        raise BadInputError("parallel.pipeline is 1, which is no pipeline; set it to 2 or more")
    cluster, grid, pipeline, schedule = plan.cluster, plan.grid, plan.pipeline, plan.pipeline.schedule
    costs, speeds = stage_costs(plan.model, plan.batch.sequence_length), stage_speeds(cluster, grid)
    message = boundary_bytes(plan)
    hops = message_times(cluster, grid, schedule, message)
    layer = 1.0 if flops is None else _layer_seconds(plan, costs, flops)
    durations = durations_by_work(pipeline.layers, costs, speeds, schedule, layer, plan.recomputes)
    if flops is not None:
        durations = replace(durations, transfer=hops.transfer, latency=hops.latency, links=hops.links)
    view = show(
        schedule.ranks,
        schedule.chunks,
        schedule.microbatches,
        pipeline.name,
        pipeline.layers,
        durations,
        pipeline.limit,
        schedule.hands_back,
    )
    if flops is None:
        return replace(view, links=_UNCOUNTED if any((*hops.transfer, *hops.latency)) else None)
    # No number, where it is too long for one.
    if not view.timeline.makespan < _FOREVER:
        raise BadInputError("a step takes millions of years; check --flops and the bandwidths of the cluster")
    return replace(view, unit="s", links=_about_links(plan, message, hops))


# Seconds. A longer step is an error in the input.
_FOREVER = 1e14
_UNCOUNTED = (
    "messages take no time here; add --flops with what a rank computes in a second, such as 100TFLOP/s, to count them "
    "by the cluster's links"
)


def _about_links(plan: Plan, message: int, hops: MessageTimes) -> str:
    """Return a sentence on the time of messages, and on what is not counted."""
    most = units.seconds(max(map(add, hops.transfer, hops.latency)))
    said = f"messages are {units.size(message)}, in {plan.compute}, and take up to {most}"
    if hops.unknown:
        said += "; no description states the bandwidth of some of the links, which take only their latency"
    return f"{said}; sums over ranks and the optimizer are not counted"


def _layer_seconds(plan: Plan, costs: StageCosts, flops: str) -> float:
    """Return the seconds of a rank's forward pass through its part of a layer."""
    try:
        rate = quantity(flops, "FLOP/s")
    except ValueError as error:
        raise BadInputError(f"--flops is {flops!r}; {error}") from None
    # A third of a layer's work is in the forward pass.
    tokens = plan.batch.microbatch * plan.batch.sequence_length
    return costs.layer / 3 * tokens / plan.grid.degree(Axis.TENSOR) / rate
