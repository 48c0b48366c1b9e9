"""Ranks for tests: imports the trainer once, then forks the ranks of each job, which train its cases.

A job is a line on stdin, JSON of {world, port, folder, cases: [{recipe, overrides, ranks_per_node}]}; the answer on
stdout is a line with the exit codes of its ranks. A rank's output goes to `folder/rank-R.log`; its notes on a case's
engine go to `rank-R.json` in the run's folder.
"""

import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm import subgroups
from llmtrain.comm.messages import Channel
from llmtrain.comm.ranks import Ranks, connect, disconnect
from llmtrain.comm.stream import Job, ThreadStream
from llmtrain.comm.waits import Ticket
from llmtrain.offload.stepper import JobKind, Stepper
from llmtrain.offload.usage import TierUsage
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.telemetry import about
from llmtrain.training import loop as loop
from llmtrain.training import run as run
from llmtrain.training.build import build
from llmtrain.training.passes import Passes
from llmtrain.training.run import Run
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.direct_io.queue import DirectQueue
from torch import Tensor

from tests.ranks.allocations import LEAST_BYTES, Allocations
from tests.ranks.handed import Handed, handed
from tests.ranks.handed_bytes import bytes_handed
from tests.ranks.high_water import HighWater

Evaluated = tuple[list[list[int]], Handed, Handed]
"""An evaluation: the sequences of each microbatch of each part, and its calls."""

FORWARD_BACKWARD = loop.forward_backward
# The batch of the data on which the loss of some cases spikes.
SPOILT = 14
# Seconds for the other ranks to end after one has failed.
GRACE = 20
# Seconds that a job may take per case.
LIMIT = 120


def run_case(case: dict[str, Any], ranks: Ranks) -> None:
    """Train one recipe to its last step. Collective."""
    facts = Facts(world=ranks.layout.world, device="cpu", ranks_per_node=case["ranks_per_node"])
    plan = check_and_plan(load_recipe(case["recipe"], case["overrides"]), facts)
    notes: dict[str, list[Any]] = {"state_bytes": [], "copies": [], "moved": [], "groups": [ranks.layout.world]}
    notes |= {kind.value: [] for kind in JobKind} | {"transfers": []}
    high_water = HighWater()
    run.build = high_water.building(build)
    subgroups.group_over = noting_groups(notes["groups"])
    transfers = Counter[str]()
    DirectQueue._start = noting_transfers(transfers)  # type: ignore[method-assign]
    loop.forward_backward = spoiling() if case["spiking"] else FORWARD_BACKWARD
    loop.train_step = noting(notes, transfers)
    if case["counted"]:
        notes |= {"on_streams": [], "full": []}
        loop.train_step = counting(notes, loop.train_step)
    calls, nbytes = list[Handed](), list[Handed]()
    evaluated: list[Evaluated] = []
    if case["handed"]:
        loop.train_step = handing(calls, nbytes, loop.train_step)
        loop.evaluate = handing_evaluation(evaluated)
    loop.train(plan, ranks.on_grid(plan.grid, plan.tiers), [])
    noted = notes | {"handed": calls, "handed_bytes": nbytes, "evaluated": evaluated, "high_water": high_water.noted()}
    (Path(plan.logging.dir) / plan.name / f"rank-{ranks.rank}.json").write_text(json.dumps(noted))


def spoiling(passes: Callable[..., Passes] = FORWARD_BACKWARD) -> Callable[..., Passes]:
    """Return passes that multiply the loss of one batch of the data."""

    def spoilt(run: Run, step: int) -> Passes:
        found = passes(run, step)
        found.sums[0] *= 10 if step + run.progress.passed == SPOILT else 1
        return found

    return spoilt


def noting(
    notes: dict[str, list[Any]], transfers: Counter[str], step: Callable[..., bool] = loop.train_step
) -> Callable[..., bool]:
    """Return a train step that then records the sizes that the engine holds, and what was ever moved between volumes
    and memory: as the run says, and by its transfers."""

    def noted(run: Run, number: int) -> bool:
        stopping = step(run, number)
        notes["state_bytes"].append(run.engine.state_bytes)
        done = run.engine._ahead.done if isinstance(run.engine._ahead, Stepper) else {}
        for kind in JobKind:
            notes[kind.value].append(done.get(kind, 0))
        staging = run.checkpoints._staging
        assert staging is not None
        notes["copies"].append(sum(copy.nbytes for copy in staging.copies))
        if run.offloaded.moving or run.activations is not None:
            run.engine.weights.updates.finish()
            movers = [one for one in (run.offloaded, run.activations) if one is not None]
            usage = sum((one.usage() for one in movers), TierUsage())
            notes["moved"].append({path: (usage.read[path], usage.written[path]) for path in usage.read})
            notes["transfers"].append((transfers["read"], transfers["write"]))
        return stopping

    return noted


def noting_transfers(transfers: Counter[str], start: Callable[..., int] = DirectQueue._start) -> Callable[..., int]:
    """Return what starts a transfer of files, and adds its bytes to `transfers`, by its kind."""

    def noted(queue: DirectQueue, file: int, offset: int, memory: Tensor, kind: str) -> int:
        transfers[kind] += memory.nbytes
        return start(queue, file, offset, memory, kind)

    return noted


def noting_groups(sizes: list[int], make: Callable[..., Any] = subgroups.group_over) -> Callable[..., Any]:
    """Return `group_over` that records the number of ranks of each group of the run's backend that this rank joins."""

    def noted(cluster: Any, card: Any, groups: Any, backend: str | None = None, *options: Any) -> Any:
        group = make(cluster, card, groups, backend, *options)
        if group is not None and backend is None:
            sizes.append(group.size())
        return group

    return noted


def handing(calls: list[Handed], nbytes: list[Handed], step: Callable[..., bool]) -> Callable[..., bool]:
    """Return a train step that records what it hands to collectives and messages, its updates of weights included."""

    def handed_over(run: Run, number: int) -> bool:
        with handed() as found, bytes_handed() as sent:
            stopping = step(run, number)
            run.engine.weights.updates.finish()
        calls.append(found)
        nbytes.append(sent)
        return stopping

    return handed_over


def handing_evaluation(found: list[Evaluated], evaluate: Callable[[Run], bool] = loop.evaluate) -> Callable[..., bool]:
    """Return `evaluate` that records what it hands to collectives and messages, and the sequences of each microbatch of
    each part."""

    def handed_over(run: Run) -> bool:
        passes, parts = run.executor.evaluate, list[list[int]]()

        def noted(rows: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
            parts.append([len(one) for one in rows])
            return passes(rows)

        run.executor.evaluate = noted  # type: ignore[method-assign]
        # What the step before has left is not of the evaluation.
        run.engine.weights.updates.finish()
        with handed() as calls, bytes_handed() as nbytes:
            finished = evaluate(run)
        run.executor.evaluate = passes  # type: ignore[method-assign]
        found.append((parts, calls, nbytes))
        return finished

    return handed_over


def counting(notes: dict[str, list[int]], step: Callable[..., bool]) -> Callable[..., bool]:
    """Return a train step that records how many unit-sized tensors, and tensors on streams, it allocated."""

    def counted(run: Run, number: int) -> bool:
        found = Allocations(frozenset(unit.ranges.padded for unit in run.engine.units.values()))
        control = ThreadStream("control")
        with found.counting():
            stopping = step(run, number)
            # Count the work that the step has left for later too.
            run.engine.weights.updates.finish()
            # One allocation on a stream that the count has to see.
            control.submit(lambda: torch.empty(LEAST_BYTES, dtype=torch.uint8)).wait()
        control.close()
        notes["on_streams"].append(found.on_streams)
        notes["full"].append(found.full)
        return stopping

    return counted


def rank_main(job: dict[str, Any], rank: int) -> None:
    """Run one rank of a job."""
    log = os.open(Path(job["folder"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]))
    torch.set_num_threads(1)
    random.seed(rank)
    ranks = connect(Layout({Axis.DATA: job["world"]}))
    for case in job["cases"]:
        run_case(case, ranks)
        # A run's objects refer to each other in cycles; its process groups' threads end when they are collected.
        gc.collect()
    disconnect(ranks)


def forked(job: dict[str, Any], rank: int) -> int:
    """Start a rank and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        rank_main(job, rank)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def wait(pids: list[int], limit: float) -> list[int]:
    """Return the ranks' exit codes after all have ended. Kills the ranks that remain after a failed one, and all ranks
    after `limit` seconds."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit
    while len(codes) < len(pids):
        for pid in (pid for pid in pids if pid not in codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def sometimes_late(arrived: Callable[..., bool]) -> Callable[..., bool]:
    """Return `arrived` with the message order of a large network, which differs from rank to rank."""

    def late(transport: Transport, channel: Channel) -> bool:
        return random.random() < 0.5 and arrived(transport, channel)

    return late


def late_now_and_then(submit: Callable[..., Ticket]) -> Callable[..., Ticket]:
    """Return a stream's `submit` with a busy machine's delays: one job in fifty begins late."""

    def late(stream: ThreadStream, job: Job) -> Ticket:
        return submit(stream, job if random.random() < 0.98 else lambda: (time.sleep(0.002), job()))

    return late


def mostly_done_ahead(decide: Callable[..., None]) -> Callable[..., None]:
    """Return a stepper's `decide` that waits in most steps for what is stepped ahead. These passes are short."""

    def waiting(stepper: Stepper, numbers: AdamWStep | None) -> None:
        queue = stepper._queue
        if numbers is None or numbers.step % 3:
            stepper.wait_until(lambda: not queue.ahead and queue.steps_ahead_done)
        decide(stepper, numbers)

    return waiting


def main() -> None:
    """Serve jobs until stdin ends."""
    Stepper.decide = mostly_done_ahead(Stepper.decide)  # type: ignore[method-assign]
    ThreadStream.submit = late_now_and_then(ThreadStream.submit)  # type: ignore[method-assign]
    Transport.arrived = sometimes_late(Transport.arrived)  # type: ignore[method-assign]
    # This saves 0.15 s per case; no test here uses the value.
    about.measured_peak = lambda device, dtype, budget=0.3: 1e9
    os.environ["MASTER_ADDR"] = "localhost"
    # What the imports made stays: a collection after each case need not look through it.
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        os.environ["MASTER_PORT"] = str(job["port"])
        pids = [forked(job, rank) for rank in range(job["world"])]
        print(json.dumps(wait(pids, LIMIT * len(job["cases"]))), flush=True)


if __name__ == "__main__":
    main()
