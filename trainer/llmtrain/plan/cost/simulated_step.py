"""How long a step with offloaded optimizer states takes by the described rates: its program, simulated. No torch in
here.

The ranks of a node share its volumes and processors evenly. What else a step takes, such as collectives, messages
between stages and the waiting for them, is left out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from llmtrain.cluster.layout import Axis
from llmtrain.plan.cost.lane_times import CPU, DEVICE, LINK, LaneTime, volume_paths
from llmtrain.plan.cost.least_time import compute_peak
from llmtrain.plan.cost.offload_simulation import Computation, Order, Rates, simulate_steps
from llmtrain.plan.cost.optimizer_traffic import UPDATED_TOGETHER, stepped_by_cpu, stepped_by_device
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.pipeline.layer_split import recomputed_flops, stage_costs
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.offload_moves import Moves, bucket_moves

# The third step overlaps with the one before as all later ones do.
STEPS = 3
# The most buckets that are simulated one by one, as simulation is slow; of more, neighbours are merged.
BUCKETS = 256


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step of one rank, in seconds. moves: if the computation took no time. with_compute: with the
    computation at the accelerator's peak. Both are None where a rate is not known that they need, or where the
    simulation does not cover the program: also_moved then says which states or activations also move."""

    rank: int
    moves: float | None = None
    with_compute: float | None = None
    also_moved: str | None = None


def simulated_step(plan: Plan, rank: int, found: Sequence[LaneTime]) -> SimulatedStep | None:
    """Return a simulated step of a rank of the run; None if no optimizer states leave. found: the plan's lanes."""
    if not plan.sharding.offload.share:
        return None
    if others := _others(plan):
        return SimulatedStep(rank, also_moved=others)
    moves = bucket_moves(plan, rank)
    rates = _rates(plan, rank, moves, {(lane.name, lane.way): lane for lane in found})
    if rates is None:
        return SimulatedStep(rank)
    moves, count, order = merged(moves), len(rank_units(plan, rank)), _order(plan)
    alone = simulate_steps(moves, Computation([0.0] * count, [0.0] * count), rates, order, STEPS).seconds
    computation = rank_computation(plan, rank)
    return SimulatedStep(
        rank, alone, None if computation is None else simulate_steps(moves, computation, rates, order, STEPS).seconds
    )


def rank_computation(plan: Plan, rank: int) -> Computation | None:
    """Return a rank's computation at the accelerator's peak, with the forward passes that activation checkpointing
    repeats; None if the peak is not known."""
    accelerator = plan.cluster.accelerator if plan.cluster else None
    peak = None if accelerator is None else compute_peak(plan, accelerator)
    if peak is None:
        return None
    costs, batch = stage_costs(plan.model, plan.batch.sequence_length), plan.batch
    # A third of the FLOPs are in the forward pass.
    seconds = batch.microbatch * batch.sequence_length / plan.grid.degree(Axis.TENSOR) / 3 / peak
    names = [unit.name for unit in rank_units(plan, rank)]
    of_unit = {"embedding": costs.embedding, "head": costs.head}
    forward = [of_unit.get(name, costs.layer) * seconds for name in names]
    groups = [group for layout in plan.stages_of(rank) for group in layout.groups]
    # What recomputation repeats of each block.
    again = {
        f"blocks.{block}": 3 * seconds * recomputed_flops(plan.model, batch.sequence_length, block == group[-1])
        for group in groups
        for block in group
    }
    backward = [2 * one + again.get(name, 0.0) for name, one in zip(names, forward, strict=True)]
    return Computation(forward, backward, batch.microbatches, _runs(plan, rank, names))


def _runs(plan: Plan, rank: int, names: Sequence[str]) -> tuple[int, ...]:
    """Return how many units all microbatches pass before the next ones; none if one microbatch follows the other.
    names: of the rank's units, in the order of the model."""
    if not plan.sums_runs:
        return ()
    # A tied head computes with the embedding, which counts where the rank has it first.
    left, found = set(names), list[int]()
    for layout in plan.stages_of(rank):
        own = left & {*layout.units}
        left -= own
        found.append(len(own))
    return tuple(found)


def merged(moves: Sequence[Moves], most: int = BUCKETS) -> list[Moves]:
    """Return moves of about `most` buckets, each of which has those of neighbours of the same unit that may be stepped
    ahead, or may not."""
    size, by_unit = -(-len(moves) // most), defaultdict[tuple[int, bool], list[Moves]](list)
    found = list[Moves]()
    for one in moves:
        by_unit[one.unit, one.spare].append(one)
    for (unit, spare), own in by_unit.items():
        for first in range(0, len(own), size):
            group = own[first : first + size]
            there, back, ahead, commit, elements = (
                sum(getattr(one, name) for one in group)
                for name in ("there", "back", "back_ahead", "commit", "elements")
            )
            files = tuple(map(sum, zip(*(one.files for one in group), strict=True)))
            found.append(
                Moves(
                    unit=unit,
                    spare=spare,
                    elements=elements,
                    on_device=group[0].on_device,
                    there=there,
                    back=back,
                    back_ahead=ahead,
                    commit=commit,
                    files=files,
                )
            )
    return found


def _others(plan: Plan) -> str | None:
    """Return which states or activations move that the simulation does not cover; None if there are none."""
    offload = plan.sharding.offload
    moved = {
        "weights": offload.parameters != "device",
        "gradients": offload.gradients != "device",
        "activations": plan.activation_offload.tier != "none",
    }
    return " and ".join(name for name, moves in moved.items() if moves) or None


def _order(plan: Plan) -> Order:
    offload, placements = plan.sharding.offload, plan.sharding.placements.values()
    gathers = any(one.degrees.optimizer > one.degrees.weights for one in placements)
    return Order(
        offload.workers,
        waits_for=UPDATED_TOGETHER if gathers else 1,
        fetched=offload.overlap if offload.workers == 1 else 0,
    )


def _rates(plan: Plan, rank: int, moves: Sequence[Moves], found: dict[tuple[str, str], LaneTime]) -> Rates | None:
    """Return the rank's part of the rates; None if one is not known."""
    rates = [_share(found.get((LINK, way)), sum(moved)) for way, moved in _links(moves)]
    by_cpu, by_device = stepped_by_cpu(plan, rank), stepped_by_device(plan, rank)
    rates.append(_share(found.get((CPU, "read and written")), by_cpu.elements))
    if by_device.elements:
        rates[-1] = _share(found.get((DEVICE, "read and written")), by_device.elements)
    paths = volume_paths(plan)
    for volume, path in enumerate(paths):
        rates.append(_share(found.get((path, "read")), sum(one.files[volume] for one in moves)))
    if None in rates:
        return None
    down, up, step, *files = (one for one in rates if one is not None)
    return Rates(down=down, up=up, step=step, files=files)


def _links(moves: Sequence[Moves]) -> Sequence[tuple[str, Sequence[int]]]:
    return ("to the host", [one.down for one in moves]), ("to the device", [one.up for one in moves])


def _share(lane: LaneTime | None, own: int) -> float | None:
    """Return the rate at which a rank's own part of a lane is done when the whole lane is; None if the lane's rate is
    not known. lane: None if nothing moves on it. own: 0 if the rank moves nothing."""
    if lane is None or not own:
        return inf
    return None if lane.seconds is None else own / lane.seconds
