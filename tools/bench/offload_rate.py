"""The rate of training whose optimizer states are on the host, with an emulated accelerator (see `emulated`).

Its computation, its host link and its kernel take their time; what runs is the stepper of a run. Each ratio is of the
seconds that the computation of one microbatch, the gradients on the host link, and the steps of all buckets take;
weights take half of the gradients' time, up. Beside the measured seconds of a step are those of the simulated program
(`llmtrain.plan.cost.offload_simulation`), and of the busiest lane.
"""

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
from llmtrain.cluster.levels import Degrees
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import model_units
from llmtrain.offload.optimizer_states import open_states
from llmtrain.plan.cost.offload_simulation import Computation, Order, Rates, exact_least, least_seconds, simulate_steps
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.offload import OVERLAP
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.program.offload_moves import Moves, order_problems
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.sharding.hops import Hops
from llmtrain.sharding.unit import ShardedUnit

from tools.bench.emulated import EmulatedRun
from tools.bench.table import machine, table, write_section

# Compute, host link and step.
RATIOS = ((1, 0.25, 0.25), (1, 0.5, 0.5), (1, 1, 0.5), (1, 0.5, 1), (1, 0.5, 2))
# Microbatches, and whether they all pass a unit before the next one.
ACCUMULATIONS = ((1, False), (4, False), (4, True), (16, False), (16, True))
# A block of llama3.2-1b has 15 buckets.
UNITS, PER_UNIT, ELEMENTS, THREADS = 32, 8, 500, 4
TOTAL = UNITS * PER_UNIT * ELEMENTS
# Seconds of a volume beside one of computation, and bytes of an element's states.
DISKS, STATES = (0.5, 1, 2, 4), 12
FROM_FILES = Order(1, fetched=OVERLAP)
# AxoNN's chunks of the reduction: seconds of the whole reduction, and of beginning each of its calls.
REDUCTION, CALL = 0.4, 0.004


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. spare: one bucket in so many may be stepped ahead, 0 for none. weights_on_device: whether their weights
    wait there (`offload.spare_weights`). by_unit: whether all microbatches pass a unit before the next one
    (`pipeline.schedule: breadth-first`). disk: seconds in which a volume reads all states, and in which it writes them;
    0: they are in the host's memory."""

    ratio: tuple[float, float, float]
    microbatches: int
    spare: int = 0
    order: Order = field(default_factory=lambda: Order(THREADS))
    on_device: bool = False
    by_unit: bool = False
    weights_on_device: bool = False
    disk: float = 0.0

    def moves(self) -> list[Moves]:
        """Return what each bucket moves."""
        link = (12, 12, 14, 2) if self.on_device else (4, 2, *((2, 0) if self.weights_on_device else (0, 2)))
        there, back, ahead, commit = (count * ELEMENTS for count in link)
        units = [unit for unit in range(UNITS) for _ in range(PER_UNIT)]
        return [
            Moves(
                unit=unit,
                spare=bool(self.spare) and place % self.spare == 0,
                elements=ELEMENTS,
                on_device=self.on_device,
                there=there,
                back=back,
                back_ahead=ahead,
                commit=commit,
                files=(STATES * ELEMENTS,) if self.disk else (),
            )
            for place, unit in enumerate(units)
        ]

    def given(self, second: float) -> tuple[list[Moves], Computation, Rates]:
        """Return what is simulated. second: seconds of a microbatch's computation."""
        compute, link, step = (part * second for part in self.ratio)
        forward, backward = [compute / 3 / UNITS] * UNITS, [2 * compute / 3 / UNITS] * UNITS
        rate = 4 * TOTAL / link
        computation = Computation(forward, backward, self.microbatches, (1,) * UNITS if self.by_unit else ())
        files = (STATES * TOTAL / (self.disk * second),) if self.disk else ()
        return self.moves(), computation, Rates(down=rate, up=rate, step=TOTAL / step, files=files)


@dataclass(frozen=True)
class Found:
    """Seconds of a step: measured, simulated, of the busiest lane, and the least of an exact step."""

    measured: Sequence[float]
    simulated: float
    busiest: float
    exact: float


def main() -> None:
    """Measure, print the tables, and write them to the document if --write is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--second", type=float, default=0.8, help="seconds of a microbatch's computation")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each row")
    parser.add_argument("--write", type=Path, help="document to update with the tables")
    arguments = parser.parse_args()
    load, rows, others = os.getloadavg()[0], list[Sequence[str]](), list[Sequence[str]]()
    for ratio in RATIOS:
        for microbatches, by_unit in ACCUMULATIONS:
            cases = [Case(ratio=ratio, microbatches=microbatches, spare=spare, by_unit=by_unit) for spare in (0, 4, 1)]
            cases.append(replace(cases[-1], weights_on_device=True))
            found = [measure(case, arguments.second, arguments.steps) for case in cases]
            rows.append(row(ratio, named(microbatches, by_unit), found))
            print(rows[-1], flush=True)
        others.append(other_orders(ratio, arguments.second, arguments.steps))
        print(others[-1], flush=True)
    files = list(file_rows(arguments.second, arguments.steps))
    text = report(rows, others, files, memory_rows(), arguments.second, arguments.steps, load)
    print(text)
    if arguments.write:
        write_section(arguments.write, "offload rate", text)


def file_rows(second: float, steps: int) -> Iterator[Sequence[str]]:
    """Yield rows of states in files."""
    for disk, (microbatches, by_unit) in product(DISKS, ACCUMULATIONS[:3]):
        ratio = (1, 0.25, 0.25)
        case = Case(ratio=ratio, microbatches=microbatches, by_unit=by_unit, order=FROM_FILES, disk=disk)
        cases = [case, replace(case, spare=4), replace(case, spare=1), replace(case, spare=1, weights_on_device=True)]
        found = [measure(one, second, steps) for one in cases]
        yield row((*ratio, disk), named(microbatches, by_unit), found)


def named(microbatches: int, by_unit: bool) -> str:
    """Return a number of microbatches, and their order, as text."""
    return f"{microbatches}{', breadth-first' if by_unit else ''}"


def measure(case: Case, second: float, steps: int) -> Found:
    """Run a case, and simulate it."""
    given = case.given(second)
    run = EmulatedRun(*given, case.order)
    run.run(steps + 1)
    problems = order_problems(given[0], run.happened)
    assert not problems, problems[:3]
    simulated = simulate_steps(*given, case.order)
    return Found(run.seconds[1:], simulated.seconds, max(least_seconds(*given).values()), exact_least(*given))


def row(ratio: Sequence[float], microbatches: str, found: Sequence[Found]) -> Sequence[str]:
    """Return a row of the first table."""
    full = found[-1]
    cells = [f"{statistics.median(one.measured) / full.busiest:.2f}" for one in found]
    noise = (max(full.measured) - min(full.measured)) / full.simulated
    return (
        shown(ratio),
        microbatches,
        *cells,
        f"{statistics.median(full.measured) / full.simulated:.3f}",
        f"{noise:.3f}",
        f"{full.simulated / full.busiest:.3f}",
        f"{full.simulated / full.exact:.3f}",
    )


def other_orders(ratio: tuple[float, float, float], second: float, steps: int) -> Sequence[str]:
    """Return a row of the second table, of one microbatch: other orders, as multiples of the busiest lane."""
    apart = measure(Case(ratio=ratio, microbatches=1, order=Order(1, waits_for=None)), second, steps)
    at_end = measure(Case(ratio=ratio, microbatches=1, order=Order(THREADS, waits_for=None)), second, steps)
    cells = [f"{statistics.median(one.measured) / one.busiest:.2f}" for one in (apart, at_end)]
    cells += [f"{axonn(ratio, chunk, second) / second:.2f}" for chunk in (1, 2, 4, UNITS * PER_UNIT)]
    return shown(ratio), *cells


def axonn(ratio: tuple[float, float, float], chunk: int, second: float) -> float:
    """Return the seconds of a step in AxoNN's order (section V): after the passes, the reduction goes through chunks of
    buckets, and the device steps those that are reduced."""
    moves, computation, rates = Case(ratio=ratio, microbatches=1, on_device=True).given(second)
    chunks = len(moves) // chunk
    run = EmulatedRun(moves, Computation((), ()), rates, Order(THREADS))
    return computation.seconds + run.reduced(chunk, (REDUCTION * second) / chunks + CALL)


def shown(ratio: Sequence[float]) -> str:
    """Return a ratio as text."""
    return " : ".join(f"{part:g}" for part in ratio)


def memory_rows() -> list[Sequence[str]]:
    """Return rows of the device's memory, planned, and counted in what a run allocates."""
    rows: list[Sequence[str]] = []
    recipe = Path(__file__).with_name("offload_rate.yaml")
    ahead = ("offload.overlap=3", "offload.spare=1")
    waiting = (*ahead, "offload.spare_weights=device")
    for keys in (("offload.overlap=1",), ("offload.overlap=3",), ahead, waiting):
        for step in ("host", "device"):
            plan = make_plan(load_recipe(str(recipe), (*keys, f"offload.step={step}")), Facts(world=1, device="cuda"))
            planned = memory_budget(plan).rows[0].device
            names = ("weights", "gradients", "optimizer", "offload_slots", "weights_ahead")
            alone, cpu, dtype = Degrees(), torch.device("cpu"), DTYPES[plan.compute]
            assert all(one.degrees == alone for one in plan.sharding.placements.values())
            model, placement = GPT(plan.model, cpu), next(iter(plan.sharding.placements.values()))
            units = [
                ShardedUnit(spec, model.unit(spec.name), Hops(placement), dtype, 0, cpu)
                for spec in model_units(plan.model)
            ]
            states = open_states(plan.sharding.offload, rank_buckets(plan, 0), cpu, dtype, torch.float32)
            assert states is not None
            for unit in units:
                states.take(unit, {})
            counted = sum(unit.nbytes for unit in units) + states.device_nbytes
            states.close()
            said = " ".join((*keys, f"offload.step={step}"))
            rows.append((said, f"{sum(planned[name] for name in names):,}", f"{counted:,}"))
    return rows


def report(
    rows: Sequence[Sequence[str]], others: Sequence[Sequence[str]], files: Sequence[Sequence[str]],
    memory: Sequence[Sequence[str]], second: float, steps: int, load: float,
) -> str:  # fmt: skip
    """Return the section."""
    header = (
        "microbatches", "spare 0", "spare 1/4", "spare 1", "its weights on the device",
        "measured / simulated", "noise", "simulated / busiest lane", "simulated / least exact",
    )  # fmt: skip
    chunks = ("AxoNN, k = 1", "k = 2", "k = 4", "no chunks")
    return f"""## Stepping on the host beside the computation

`python -m tools.bench.offload_rate`: {machine()}, load {load:.1f} at the start. An emulated accelerator: {UNITS} units
of {PER_UNIT} buckets, {second:g} s for the computation of one microbatch, {steps} steps a row.
`compute : link : step` are the seconds of one microbatch's computation, of all gradients on the host link, and of
stepping all buckets. `spare` columns are the measured seconds of a step as multiples of the busiest lane (compute, host
link each way, step). In the last of them, the weights of `spare 1` wait for the norm on the device
(`offload.spare_weights`), else on the host. `measured / simulated`, `noise` (of the measured steps, largest less
smallest, over simulated) and the last two columns are with that. The least exact step is longer than the busiest lane
where gradients are complete only in the last of several microbatches. With `pipeline.schedule: breadth-first`, all
microbatches pass a unit before the next one, so that most gradients are complete early.
Measured is the order that the run's own stepper and threads take: emulated lanes begin when what they wait for is over,
so the seconds have no time of threads that wake, of locks and of Python.

{table(("compute : link : step", *header), rows)}

The same with states in files (`offload.optimizer: nvme`), one thread, {OVERLAP} buckets read ahead. `disk` is the
seconds in which the volume reads all states; in as many it writes them at the same time.

{table(("compute : link : step : disk", *header), files)}

One microbatch in other orders, as multiples of the busiest lane: no overlap at all; all gradients down after the
passes (ZeRO-Offload's order), four threads. AxoNN's columns are seconds as multiples of the computation, with the
states on the host link (12 bytes an element each way), a reduction of {REDUCTION:g} of the computation after the passes
in chunks of k buckets, and {CALL * 1000:g} ms for each call.

{table(("compute : link : step", "no overlap", "down at the end", *chunks), others)}

The device's memory for weights, gradients, optimizer states and slots, bytes:

{table(("keys", "planned", "counted"), memory)}"""


if __name__ == "__main__":
    main()
