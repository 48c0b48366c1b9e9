"""Twins of cases in which one synchronisation is left out, or one is too many. Each must be found."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from llmtrain.comm import ranks, stream
from llmtrain.comm.device import DeviceCopies
from llmtrain.comm.messages_nccl import NcclMessages
from llmtrain.comm.stream import CudaThreadStream
from llmtrain.comm.waits import AllOf, Done
from llmtrain.offload.activation_copies import GpuCopies
from llmtrain.offload.copies import StreamCopies
from llmtrain.offload.gradient_tiers import FileGradients
from llmtrain.offload.staging import Pinned
from llmtrain.offload.stepper import StepTicket
from llmtrain.offload.weight_stores import FileWeights
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.parallel.tensor.collectives import Pending
from llmtrain.sharding import in_flight
from llmtrain.sharding.engine import Engine
from llmtrain.sharding.gradients import GradientReducer
from llmtrain.sharding.replica_groups import ReplicaGroups
from llmtrain.sharding.weight_updates import WeightUpdates
from llmtrain.sharding.weights import GatheredWeights
from llmtrain.training import evaluate, loop, replica_check, rewind
from llmtrain_kernels.cross_entropy import op

from tests.cuda.cases import CASES, INT4, TIED, Case
from tests.cuda.machine import Event, Stream
from tests.cuda.nccl_calls import Work


class Twin(NamedTuple):
    """case: what is rehearsed, on its first rank. broken: a change to the project. breaks: ranks that have it, where
    the others are rehearsed too."""

    case: Case
    broken: Any
    breaks: tuple[int, ...] = ()


def _nothing(*arguments: object, **others: object) -> None:
    """Do nothing."""


WAITS = [
    *((owner, "wait") for owner in (stream._StreamTicket, AllOf, StepTicket, Work)),
    *((owner, "synchronize") for owner in (Stream, Event)),
]


def deaf(owner: Any, name: str) -> Any:
    """Let a function of `owner` wait for nothing."""
    function = getattr(owner, name)

    def broken(*arguments: Any, **others: Any) -> Any:
        with ExitStack() as entered:
            for waits in WAITS:
                entered.enter_context(mock.patch.object(*waits, _nothing))
            return function(*arguments, **others)

    return mock.patch.object(owner, name, broken)


def _not_yet(values: torch.Tensor) -> Any:
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    return lambda: host


def _read_at_once(values: torch.Tensor) -> Any:
    return _not_yet(values)()


def _thread_at_once(self: CudaThreadStream, job: Callable[[], object]) -> Any:
    done = torch.cuda.Event()

    def run() -> None:
        with torch.cuda.stream(self._stream):
            job()
            done.record()

    return AllOf([self._thread.submit(run), stream._StreamTicket(done, self._activity)])


@contextmanager
def _after_nothing(self: StreamCopies, event: object) -> Any:
    with torch.cuda.stream(self._stream):
        yield


def _publish_at_once(self: StreamCopies, to: torch.Tensor, values: torch.Tensor, after: object) -> Any:
    return PUBLISH(self, to, values, Done())


def _arrived_at_once(self: NcclMessages, channel: object, work: object) -> Any:
    return _nothing


def _at_once(ticket: object, job: Any) -> Any:
    return job


def _taken_at_once(self: Pinned, weight: torch.Tensor, to: torch.Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream(to.device)):
        to.copy_(weight, non_blocking=True)


def _writing_elsewhere(self: GatheredWeights, name: str) -> object:
    values = torch.empty(8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        values.zero_()
    return WAIT(self, name)


def _saved_and_forgotten(self: GpuCopies, values: torch.Tensor, region: int) -> None:
    SAVE(self, values, region)
    self._going = region, torch.empty(0)


PUBLISH, SAVE, WAIT = StreamCopies.publish, GpuCopies.save, GatheredWeights.wait
# By what waits for nothing, the cases in which it is found.
DEAF: dict[tuple[Any, str], tuple[str, ...]] = {
    (GatheredWeights, "wait"): (
        "stage 3", "stage 3, int8", "recomputed, stage 3", "registered, stage 3", "breadth-first, stage 3, 2 nodes",
    ),
    (GradientReducer, "finish"): ("stage 2", "stage 1, fp16", "registered, stage 2"),
    (Pending, "wait"): ("tensor", "tensor, sequence", "dropout, tensor, sequence"),
    (Transport, "receive"): (
        "gpipe", "1f1b", "interleaved", "zero bubble", "zero bubble v", "breadth-first, 2 stages, stage 3",
        "dropout, recomputed, 1f1b",
    ),
    (loop, "evaluate"): ("checked, stage 3", "checked, zero++", "checked, 1f1b, tied"),
    (rewind, "rewind_states"): ("rewound, optimizer on the host", "rewound, weights on the host"),
}  # fmt: skip
RACES = {
    **{
        f"{owner.__name__}.{name}, {case}": Twin(CASES[case], deaf(owner, name))
        for (owner, name), cases in DEAF.items()
        for case in cases
    },
    "streams start at once": Twin(CASES["stage 3"], mock.patch.object(Stream, "wait_stream", _nothing)),
    "hops after another": Twin(CASES["stage 3, 2 nodes"], mock.patch.object(in_flight, "_after", _at_once)),
    "updated weights": Twin(CASES["stage 2"], deaf(WeightUpdates, "wait")),
    "buffers of gradients": Twin(CASES["stage 3"], deaf(GradientReducer, "_new_buffer")),
    "sums over tensor-parallel ranks": Twin(CASES["tensor, sequence"], deaf(ReplicaGroups, "sum_partial")),
    "sums over tied stages": Twin(CASES["1f1b, tied"], deaf(ReplicaGroups, "finish")),
    "means of replicas": Twin(CASES["tensor, sequence, stage 3, int4"], deaf(ReplicaGroups, "finish")),
    "received messages, message-driven": Twin(
        CASES["message-driven"], mock.patch.object(NcclMessages, "arrival", _arrived_at_once)
    ),
    "gradients that go to the host": Twin(
        CASES["optimizer on the host"], mock.patch.object(StreamCopies, "after", _after_nothing)
    ),
    "weights that come after stores": Twin(
        CASES["weights on the host, stage 1"], mock.patch.object(StreamCopies, "after", _after_nothing)
    ),
    "published weights that come after stores": Twin(
        CASES["weights on the host, stage 1, stepped ahead"],
        mock.patch.object(StreamCopies, "publish", _publish_at_once),
    ),
    "gradients on the host": Twin(CASES["optimizer on the host"], deaf(StreamCopies, "wait")),
    "weights that wait on the device": Twin(
        CASES["optimizer on the host, weights ahead on the device"],
        mock.patch.object(Pinned, "_take_up", _taken_at_once),
    ),
    "states on the host": Twin(CASES["optimizer on the host, stepped on the device"], deaf(StreamCopies, "wait")),
    "stepped weights": Twin(CASES["optimizer on the host"], mock.patch.object(StepTicket, "wait", _nothing)),
    "stored weights": Twin(CASES["weights on the host, stage 1"], deaf(GatheredWeights, "_wait_until_stored")),
    "stored parts of weights": Twin(
        CASES["weights on the host, some states"], deaf(GatheredWeights, "_wait_until_stored")
    ),
    "sums on the host": Twin(
        CASES["gradients on the host, one rank"], mock.patch.object(CudaThreadStream, "submit", _thread_at_once)
    ),
    "slots of sums in files": Twin(CASES["gradients in files"], deaf(FileGradients, "put")),
    "parts of weights in files": Twin(CASES["weights in files"], deaf(FileWeights, "load")),
    "activations that go": Twin(CASES["activations on the host"], deaf(GpuCopies, "release")),
    "activations that come": Twin(CASES["activations on the host"], deaf(GpuCopies, "take")),
    "activations after passes": Twin(
        CASES["activations on the host"], mock.patch.object(Stream, "wait_stream", _nothing)
    ),
    "batches that come": Twin(CASES["one rank"], mock.patch.object(stream._StreamTicket, "wait", _nothing)),
    "batches that are read": Twin(CASES["one rank"], deaf(DeviceCopies, "copy")),
    "states that are saved": Twin(CASES["saved"], mock.patch.object(Event, "wait", _nothing)),
    "numbers that the host reads": Twin(CASES["one rank"], mock.patch.object(loop, "start_to_host", _not_yet)),
    "losses of an evaluation": Twin(CASES["checked"], mock.patch.object(evaluate, "to_host", _read_at_once)),
    "replicas that are compared": Twin(
        CASES["checked, stage 1"], mock.patch.object(replica_check, "to_host", _read_at_once)
    ),
}  # fmt: skip


def _pageable(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values.to(device)


def _scaled_by_a_number(grad_x: torch.Tensor, grad_weight: torch.Tensor, scale: torch.Tensor) -> Any:
    return grad_x.mul_(scale), SCALED(grad_x, grad_weight, scale)[1]


def _as_it_is(work: Any) -> Any:
    return work


def _each_number(self: ranks.Ranks, values: Any) -> torch.Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _backwards(self: Engine, numbers: Any) -> None:
    self.units = dict(reversed(self.units.items()))
    STEP(self, numbers)


# What frees memory as soon as nothing refers to it any more.
FREED = {
    "memory that another stream writes first": Twin(
        CASES["stage 3"], mock.patch.object(GatheredWeights, "wait", _writing_elsewhere)
    ),
    "activations that nothing keeps": Twin(
        CASES["activations on the host"], mock.patch.object(GpuCopies, "save", _saved_and_forgotten)
    ),
}


def _tied_first(self: ReplicaGroups, units: Any) -> None:
    FINISH(replace(self, stage=None), units)
    FINISH(replace(self, tied={}), units)


STEP, FINISH, SCALED = Engine.step, ReplicaGroups.finish, op.scaled
OTHERS = {
    "pageable": Twin(CASES["one rank"], mock.patch.object(ranks, "to_device", _pageable)),
    "rounded": Twin(CASES["one rank"], mock.patch.object(op, "scaled", _scaled_by_a_number)),
    "device": Twin(CASES["one rank"], mock.patch.object(stream, "on_this_device", _as_it_is)),
    "waits": Twin(CASES["one rank"], mock.patch.object(ranks.Ranks, "sums", _each_number)),
    "drained": Twin(CASES["gradients on the host, 2 nodes"], mock.patch.object(CudaThreadStream, "blocks", False)),
    "order": Twin(CASES["stage 1"], mock.patch.object(Engine, "step", _backwards), (0,)),
    # Two ranks that are in no group together.
    "deadlock": Twin(
        Case(8, (TIED, INT4), tensor=2, pipeline=2), mock.patch.object(ReplicaGroups, "finish", _tied_first), (0, 5)
    ),
}
TWINS = RACES | FREED | OTHERS
