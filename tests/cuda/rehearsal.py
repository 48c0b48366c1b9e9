"""Rehearses training steps of one rank of a run on the device that computes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from llmtrain.checkpoint import save
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateRange
from llmtrain.comm import arrivals, backend, collectives, messages_nccl, messages_torch, nccl, stream, subgroups
from llmtrain.comm import ranks as comm_ranks
from llmtrain.comm.ranks import Links, Ranks
from llmtrain.offload import stepper
from llmtrain.offload.usage import TierUsage
from llmtrain.optim.loss_scale import LossScale
from llmtrain.plan.cost.link_traffic import link_traffic
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.by_rank import programs_of
from llmtrain.plan.resolve.check import check
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.recipe.load import load_recipe
from llmtrain.training import evaluate, loop, rewind
from llmtrain.training.batches import BatchReader
from llmtrain.training.build import build
from llmtrain.training.replica_check import compare
from llmtrain.training.run import Run
from llmtrain.training.states import save as save_states
from pydantic import JsonValue
from torch import Tensor

from tests.cuda.cases import Case
from tests.cuda.kernel_calls import stand_ins
from tests.cuda.machine import Event, Machine, Pool, Stream, synchronize
from tests.cuda.nccl_calls import Decisions, Group, Nccl
from tests.cuda.recorder import Recorder
from tests.cuda.threads import standing_for

STEPS = 2
# Samples of an evaluation.
EVALUATED = 5
# So many may be copied to be pinned.
NUMBERS = 64
CUDA = torch.device("cuda", 0)


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a rank did. early: memory that was freed while another stream may use it. waits: in the last step, where its
    main thread waited for the device. drained: there, where it waited for threads while the device idled. pageable:
    copies between the device and pageable memory. strays: threads that used the device and had not set it. rounded:
    numbers that operators round to 16 bits. applied: steps that changed the weights. groups: its communicators, with
    their calls. copied: bytes that a step copied to the host and to the device for what rests elsewhere, as the run
    counts them. linked: the same as operators copied them; of cases that neither save nor check. planned: the same by
    the plan. priorities: of its streams."""

    races: list[str]
    early: list[str]
    waits: list[str]
    drained: list[str]
    pageable: list[str]
    strays: list[str]
    rounded: list[str]
    applied: int
    groups: list[Group]
    copied: tuple[float, float]
    linked: tuple[float, float]
    planned: tuple[int, int]
    priorities: set[int]


def rehearse(case: Case, rank: int, decisions: Decisions | None = None) -> Rehearsed:
    """Build a rank of a case, run some steps and close it. decisions: of the ranks that were rehearsed before."""
    machine = Machine()
    calls = Nccl(machine, rank, case.world)
    with machine.turn, ExitStack() as entered:
        for change in (*_device(machine), *_library(machine, calls, decisions or Decisions()), *stand_ins(machine)):
            entered.enter_context(change)
        machine.modes = [Recorder(machine)]
        for mode in machine.modes:
            entered.enter_context(mode)
        with running(plan_of(case), rank) as run:
            machine.pageable.clear()
            for number in range(STEPS):
                if case.saves:
                    save_states(run)
                if case.checks:
                    compare(run.engine, run.ranks, number, 0)
                    assert loop.evaluate(run)
                if number == case.uncounted:
                    run.engine.finish_steps()
                    before, begun = _copied(run), list(machine.linked)
                machine.waits.clear()
                machine.drained.clear()
                # The first step of a run is logged, so finished; others go on under the passes of the next one.
                loop.train_step(run, 1 + number)
            waits, drained, applied = list(machine.waits), list(machine.drained), run.progress.applied
            run.engine.finish_steps()
            after, ended, pageable = _copied(run), list(machine.linked), list(machine.pageable)
            if case.rewinds:
                with nullcontext() if case.saves else mock.patch.object(rewind, "load_latest", _zeros):
                    rewind.rewind_states(run)
                loop.train_step(run, run.progress.step)
                run.engine.finish_steps()
            counted, planned = STEPS - case.uncounted, _planned(run.plan, rank)
    return Rehearsed(
        races=list(machine.clocks.races), early=list(machine.early), waits=waits, drained=drained, pageable=pageable,
        strays=machine.strays, rounded=machine.rounded, applied=applied, groups=calls.groups,
        copied=_of_a_step(before, after, counted), linked=_of_a_step(begun, ended, counted),
        planned=planned, priorities=machine.priorities,
    )  # fmt: skip


def _zeros(path: Path, shards: Sequence[StateRange], *others: object) -> dict[str, JsonValue]:
    """Stand for `load_latest`: ranks that are rehearsed one after the other cannot save a checkpoint together."""
    for shard in shards:
        for name in shard.names:
            shard.write(name, 0, torch.zeros(()).expand(shard.end - shard.start))
    return {"step": 0}


class Rows:
    """Stands for samples, which are drawn at random."""

    def __init__(self, vocab: int, tokens: int) -> None:
        self._vocab, self._tokens, self._drawn = vocab, tokens, np.random.default_rng(0)

    def __len__(self) -> int:
        return EVALUATED

    def batch(self, seed: int, first: int, count: int) -> np.ndarray:
        """See `Samples`."""
        return self._drawn.integers(0, self._vocab, (count, self._tokens))

    def without_repeats(self, count: int) -> list[SimpleNamespace]:
        """See `Samples`: all of them, once."""
        return [SimpleNamespace(samples=self, count=EVALUATED, share=1.0)]


def _of_a_step(before: Sequence[int], after: Sequence[int], steps: int) -> tuple[float, float]:
    """Return the mean of so many steps of two counts."""
    return (after[0] - before[0]) / steps, (after[1] - before[1]) / steps


def _copied(run: Run) -> tuple[int, int]:
    """Return the bytes that a rank has copied to the host and to the device since its start."""
    usage = run.offloaded.usage() + (TierUsage() if run.activations is None else run.activations.usage())
    return usage.to_host, usage.to_device


def _planned(plan: Plan, rank: int) -> tuple[int, int]:
    """Return what a step copies by the plan."""
    copied = link_traffic(plan, rank, programs_of(plan)(rank)).values()
    return sum(down for down, _ in copied), sum(up for _, up in copied)


@cache
def plan_of(case: Case) -> Plan:
    """Return the plan of a case."""
    recipe = load_recipe(str(Path(__file__).with_name("rehearsed.yaml")), list(case.overrides))
    facts = named_facts(recipe, Facts(world=case.world, device="cuda", ranks_per_node=case.node or case.world))
    plan = make_plan(recipe, facts)
    check(plan, facts)
    return plan


@contextmanager
def running(plan: Plan, rank: int) -> Iterator[Run]:
    """Build a rank's part of a run, whose samples are drawn at random, and close it at the end."""
    # Whatever a rank waits for there, another one has written.
    store: Any = SimpleNamespace(set=_nothing, wait=_nothing, delete_key=_nothing, add=_nothing, clone=lambda: store)
    links = Links(tiers=plan.tiers, store=store if plan.grid.world > 1 else None)
    ranks = Ranks(rank, 0, plan.grid, CUDA, links)
    parts = build(plan, ranks, lambda calls: None)
    rows: Any = Rows(plan.model.vocab, plan.batch.sequence_length + 1)
    nothing = SimpleNamespace(
        check=_nothing, step=_nothing, warn=print, evaluation=_nothing, rewind=_nothing, asked=False, interrupted=False
    )
    checkpoints = Checkpointer(Path("checkpoints"), ranks, keep=1, asynchronous=True)
    batches = BatchReader(rows, plan, ranks)
    yield Run(
        plan=plan, ranks=ranks, folder=Path(), model=parts.model, engine=parts.engine, executor=parts.executor,
        train_data=rows, batches=batches, valid_data=rows, log=cast(Any, nothing),
        checkpoints=checkpoints, scale=LossScale.of(plan.loss_scaling, plan.compute), stop=cast(Any, nothing),
        lock=cast(Any, nothing), offloaded=parts.offloaded, activations=parts.activations,
    )  # fmt: skip
    batches.close()
    assert checkpoints.close() is None
    parts.close()


def _nothing(*arguments: object) -> None:
    """Do nothing."""


def _device(machine: Machine) -> list[Any]:
    """Return the changes to torch.cuda, and to methods that need memory or pin it."""

    def pinned(tensor: Tensor) -> Tensor:
        if machine.is_pinned(tensor):
            return tensor
        if tensor.numel() > NUMBERS:
            machine.pageable.append(f"{machine.thread}: {machine.where()}")
        return machine.pin(tensor.clone())

    tolist = torch.Tensor.tolist

    def listed(tensor: Tensor) -> Any:
        machine.compute("a read of numbers", [tensor], [])
        return tolist(tensor)

    stands = {
        "Stream": lambda device=None, priority=0: Stream(machine, priority=priority),
        "Event": lambda enable_timing=False, blocking=False: Event(machine),
        "current_stream": lambda device=None: Stream(machine, machine.stream),
        "stream": lambda one: machine.using(one.name),
        "synchronize": partial(synchronize, machine),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=machine.register, cudaHostUnregister=machine.unregister),
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "set_device": machine.set_device,
        "MemPool": Pool,
        "use_mem_pool": machine.allocating,
        "_lazy_init": lambda: None,
    }
    return [
        *(mock.patch.object(torch.cuda, name, stand) for name, stand in stands.items()),
        mock.patch.object(torch.Tensor, "pin_memory", pinned),
        # As if it were large.
        mock.patch("llmtrain.comm.pinned_memory.LARGE", 1),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: machine.stays(tensor, stream.name)),
        mock.patch.object(torch.Tensor, "tolist", listed),
    ]


def _library(machine: Machine, calls: Nccl, decisions: Decisions) -> list[Any]:
    """Return the changes to torch.distributed and to Python's threads, where the project calls them."""
    stands = standing_for(machine)
    modules = (backend, collectives, messages_nccl, messages_torch, nccl, comm_ranks)
    return [
        *(mock.patch.object(module, "dist", calls) for module in modules),
        mock.patch.object(nccl, "ALL_GATHER", calls.all_gather_single),
        mock.patch.object(nccl, "REDUCE_SCATTER", calls.reduce_scatter_single),
        mock.patch.object(dist, "broadcast", decisions.broadcast),
        mock.patch.object(dist, "destroy_process_group", calls.destroy_process_group),
        mock.patch.object(subgroups, "group_over", calls.group_over),
        # Ranks would agree how long a part of an evaluation has taken.
        mock.patch.object(evaluate, "BETWEEN", 1e9),
        mock.patch.object(stepper, "threading", stands),
        mock.patch.object(stream, "threading", stands),
        mock.patch.object(save, "threading", stands),
        *(mock.patch.object(stream, name, getattr(stands, name)) for name in ("SimpleQueue", "Future")),
        *(
            mock.patch.object(arrivals, name, getattr(stands, name))
            for name in ("SimpleQueue", "Future", "Thread", "Condition")
        ),
    ]
