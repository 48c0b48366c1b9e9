"""The plan's figures for the main rank's memory and collectives, compared with what a run measures. No torch in
here."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from llmtrain_data import units

from llmtrain.plan.cost.link_traffic import link_traffic
from llmtrain.plan.cost.save_hold import save_hold
from llmtrain.plan.cost.simulated_step import rank_computation
from llmtrain.plan.cost.volume_traffic import volume_traffic
from llmtrain.plan.memory.memory_budget import role_memory
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.program.step_calls import StepCalls
from llmtrain.telemetry.metrics import Row

_NOT_COUNTED = ("replicated", "scalars")
"""Purposes of small sums that the run's counters leave out."""

_NOT_TENSORS = ("context", "communicators", "fragmentation")
"""Memory of a GPU that torch's allocator does not count."""

_MOVED: Mapping[str, str] = MappingProxyType(
    {
        "read_bytes": "read from volumes",
        "written_bytes": "written to volumes",
        "to_host_bytes": "copied to the host",
        "to_device_bytes": "copied to the device",
    }
)
"""Words for the ways in which offloaded states and activations move."""


def planned_figures(plan: Plan) -> Row:
    """Return what is planned for rank 0, which logs the run: memory_bytes, and comm_bytes of a step as `CommMeter` has
    them. On a GPU the memory is that of tensors, on a CPU that of the process. With offload also moved_bytes of a step
    that is applied: from and to volumes, and between a GPU and its host. With offloaded optimizer states also
    save_held_s, for which a checkpoint holds up the optimizer; None if not known."""
    programs = programs_of(plan)(0)
    memory = role_memory(plan, roles(plan)[0], programs).device
    counted: dict[str, Counter[str]] = {}
    for call in StepCalls(plan, 0, programs).all():
        if call.traffic.purpose not in _NOT_COUNTED:
            counted.setdefault(call.traffic.purpose, Counter())[call.traffic.op] += call.times * call.traffic.size
    left_out = _NOT_TENSORS if plan.device == "cuda" else ()
    found: Row = {
        "memory_bytes": sum(count for name, count in memory.items() if name not in left_out),
        "comm_bytes": {group: dict(ops) for group, ops in counted.items()},
    }
    if moved := _planned_moves(plan, programs):
        found["moved_bytes"] = moved
    computation = rank_computation(plan, 0)
    save = save_hold(plan, roles(plan)[0], None if computation is None else computation.seconds)
    return {**found, "save_held_s": save.held} if save is not None and save.waits else found


def _planned_moves(plan: Plan, programs: Programs) -> dict[str, int]:
    """Return the bytes that rank 0 moves in a step, by way; without the ways in which it moves nothing."""
    volumes = volume_traffic(plan, 0, programs).values()
    read, written = _sums(both for moved in volumes for both in moved.values())
    down, up = _sums(link_traffic(plan, 0, programs).values())
    return {way: size for way, size in zip(_MOVED, (read, written, down, up), strict=True) if size}


def _sums(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    listed = list(pairs)
    return sum(first for first, _ in listed), sum(second for _, second in listed)


def measured_figures(
    memory: object, comm_bytes: object, save_held: float | None = None, offload: Mapping[str, Any] | None = None
) -> Row:
    """Return the measured values of what `planned_figures` plans. memory: as `memory_bytes` returns it. comm_bytes:
    bytes of the collectives of the last step. save_held: the most seconds for which a checkpoint held up a step, None
    if not known. offload: of the last logged step, as its row has it."""
    peaks = _numbers(memory)
    peak = peaks.get("peak_allocated", peaks.get("peak_rss"))
    found: Row = {"memory_bytes": peak, "comm_bytes": comm_bytes}
    if save_held is not None:
        found["save_held_s"] = save_held
    moved = {way: size for way in _MOVED if (size := _moved(offload, way))}
    return {**found, "moved_bytes": moved} if moved else found


def _moved(offload: object, way: str) -> float:
    """Return the bytes that model states and activations moved in one way. offload: of a step's row."""
    rows = offload if isinstance(offload, dict) else {}
    total = 0.0
    for row in (rows, rows.get("activations")):
        size = row.get(way) if isinstance(row, dict) else None
        total += sum(_numbers(size).values()) if isinstance(size, dict) else _numbers({way: size}).get(way, 0)
    return total


def planned_and_measured(planned: object, measured: object) -> Iterator[tuple[str, str, str]]:
    """Yield (name, planned, measured) for each figure that either has. Takes any JSON."""
    sides = [side if isinstance(side, dict) else {} for side in (planned, measured)]
    memory = [_numbers(side).get("memory_bytes") for side in sides]
    if any(memory):
        yield "peak memory", units.size_or_dash(memory[0]), units.size_or_dash(memory[1])
    handed = [dict(_operations(side.get("comm_bytes"))) for side in sides]
    for name in dict.fromkeys([*handed[0], *handed[1]]):
        yield name, units.size_or_dash(handed[0].get(name)), units.size_or_dash(handed[1].get(name))
    moved = [_numbers(side.get("moved_bytes")) for side in sides]
    for way, name in _MOVED.items():
        if any(way in side for side in moved):
            yield name, units.size_or_dash(moved[0].get(way)), units.size_or_dash(moved[1].get(way))
    # Without offload nothing is planned, as no step waits.
    if "save_held_s" in sides[0]:
        waits = [_numbers(side).get("save_held_s") for side in sides]
        planned_for, measured_for = ("-" if one is None else units.seconds(one) for one in waits)
        yield "held up by a checkpoint", planned_for, measured_for


def in_words(planned: object) -> str:
    """Return what is planned as a sentence's part; empty if nothing is."""
    found = planned if isinstance(planned, dict) else {}
    memory = _numbers(found).get("memory_bytes")
    handed = sum(size for _, size in _operations(found.get("comm_bytes")))
    if memory is None:
        return ""
    return f"{units.size(memory)} of memory, {units.size_or_dash(handed)} handed to collectives in a step"


def _operations(groups: object) -> Iterator[tuple[str, float]]:
    for group, ops in (groups if isinstance(groups, dict) else {}).items():
        for op, size in _numbers(ops).items():
            yield f"{group} {op}", size


def _numbers(value: object) -> Mapping[str, float]:
    entries: Mapping[Any, Any] = value if isinstance(value, dict) else {}
    return {str(key): one for key, one in entries.items() if isinstance(one, int | float) and abs(one) < 2**63}
