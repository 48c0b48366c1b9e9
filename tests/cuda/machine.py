"""A GPU and its host: streams, events, threads, copies and freed memory, as vector clocks see them.

Only one thread runs at a time, until it waits; so a run is the same each time, and what other threads do comes late.
"""

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.cuda.clocks import Clocks, Extent, Knowledge

# Seconds in which no thread begins to run, after which the main thread's wait is a deadlock.
PATIENCE = 60
MAIN = "the main thread"
DEFAULT = "the default stream"


@dataclass(kw_only=True)
class Machine:
    """What happens. waits: where the main thread waits for the device. drained: where it waits for another thread that
    has waited for all that the default stream has been given, so that the device idles. pageable: copies between the
    device and host memory that is not pinned, or that more than a few numbers are copied from to be pinned. modes: what
    a new thread enters. strays: where threads used the device that had not set it; of several GPUs, they would have
    used the first. rounded: where operators round a number to 16 bits before they compute with it. early: memory that
    was freed before another stream than its own was surely done with it. The allocator hands it out again at once, in
    the order of the stream on which it was allocated. linked: bytes of weights, gradients, states and activations
    that were copied to the host and to the device, by whatever code."""

    clocks: Clocks = field(default_factory=Clocks)
    waits: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    modes: list[Any] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)
    early: Counter[str] = field(default_factory=Counter)
    linked: list[int] = field(default_factory=lambda: [0, 0])
    streams: int = 0
    priorities: set[int] = field(default_factory=set)
    threads: int = 0

    def __post_init__(self) -> None:
        self.turn = threading.Condition(threading.Lock())
        # How often a thread began to run, or went on.
        self._turns = 0
        self._pinned: set[int] = set()
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._homes: dict[int, str] = {}
        self._guests: dict[int, dict[str, tuple[int, str]]] = {}
        self._stays: set[tuple[int, str]] = set()
        self._threads: dict[int, str] = {}
        self._waiting: list[tuple[str, Callable[[], bool]]] = []
        self._current: dict[str, str] = {}
        self._set = {MAIN}
        self._pool: Pool | None = None

    @property
    def thread(self) -> str:
        """The thread that runs. Threads of autograd act for the main thread, which waits for them."""
        return self._threads.get(threading.get_ident(), MAIN)

    @property
    def stream(self) -> str:
        """The current stream of the thread that runs."""
        return self._current.get(self.thread, DEFAULT)

    def set_device(self, device: object) -> None:
        """Stand for `torch.cuda.set_device`."""
        self._set.add(self.thread)

    def use_device(self) -> None:
        """Note where the thread that runs uses the device and has not set it."""
        if self.thread not in self._set:
            self.strays.append(f"{self.thread} in {self.where()}")

    @contextmanager
    def using(self, stream: str) -> Iterator[None]:
        """Make a stream the current one."""
        self.use_device()
        thread, before = self.thread, self.stream
        self._current[thread] = stream
        try:
            yield
        finally:
            self._current[thread] = before

    def compute(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor], stream: str | None = None) -> int:
        """Let a kernel or a copy run on a stream, by default the current one; or, if no tensor is on the device, on the
        host. Return the number of the act."""
        reads, writes = list(reads), list(writes)
        on_device = stream is not None or any(tensor.is_cuda for tensor in (*reads, *writes))
        agent = (stream or self.stream) if on_device else self.thread
        if on_device:
            self.use_device()
            self.clocks.learn(agent, self.clocks.known(self.thread))
        self.find_freed()
        extents = self._extents(reads), self._extents(writes)
        number = self.clocks.act(agent, what, *extents)
        if on_device:
            for extent in (*extents[0], *extents[1]):
                if self._homes.get(extent.memory, agent) != agent:
                    self._guests.setdefault(extent.memory, {})[agent] = number, what
        return number

    def pin(self, tensor: Tensor) -> Tensor:
        """Note that a tensor's memory is pinned, and return the tensor."""
        self._pinned.add(_memory(tensor))
        self._kept[_memory(tensor)] = tensor.untyped_storage()
        return tensor

    @contextmanager
    def allocating(self, pool: "Pool") -> Iterator[None]:
        """Stand for `torch.cuda.use_mem_pool`."""
        self._pool = pool
        try:
            yield
        finally:
            self._pool = None

    def allocated(self, tensors: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """Note new memory of the device. given: tensors that were there before."""
        there = set(map(_memory, given))
        new = {memory for tensor in tensors if tensor.is_cuda and (memory := _memory(tensor)) not in there}
        self._homes.update(dict.fromkeys(new, self.stream))
        if self._pool is not None:
            self._pool.memory.update(new)

    def stays(self, tensor: Tensor, stream: str) -> None:
        """Stand for `Tensor.record_stream`: memory that is freed is kept until the stream has done what it has."""
        self._stays.add((_memory(tensor), stream))

    def find_freed(self) -> None:
        """Find memory that nothing refers to any more and that another stream than its own may still use."""
        for memory in [one for one in self._guests if _references(self._kept[one]) == 1]:
            home = self._homes[memory]
            known, done = self.clocks.known(home), self.clocks.known(self.thread)
            for agent, (number, what) in self._guests.pop(memory).items():
                if (memory, agent) not in self._stays and max(known.get(agent, 0), done.get(agent, 0)) < number:
                    self.early[f"{what} on {agent} used memory of {home}"] += 1

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Stand for `cudaHostRegister`, of all of a storage."""
        self._pinned.add(address)
        return 0

    def unregister(self, address: int) -> int:
        """Stand for `cudaHostUnregister`."""
        self._pinned.discard(address)
        return 0

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the host is in pinned memory."""
        return _memory(tensor) in self._pinned

    def wait(self, what: str, knowledge: Knowledge) -> None:
        """Let the thread that runs wait for the device."""
        self.find_freed()
        self.clocks.learn(self.thread, knowledge)
        if self.thread == MAIN:
            self.waits.append(f"{what} in {self.where()}")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note where the main thread waits inside for a thread that has waited for the whole device."""
        before = self.clocks.known(MAIN).get(DEFAULT, 0)
        yield
        given, done = (self.clocks.known(agent).get(DEFAULT, 0) for agent in (DEFAULT, MAIN))
        if self.thread == MAIN and before < done == given:
            self.drained.append(self.where("/comm/", "/in_flight.py"))

    def where(self, *beside: str) -> str:
        """Return the function of the project that runs. beside: parts of the paths of files that do not count."""
        for frame in reversed(traceback.extract_stack(limit=40)):
            if "/llmtrain" in frame.filename and not any(part in frame.filename for part in beside):
                return f"{frame.filename.rpartition('/')[2]}:{frame.name}"
        return "the test"

    def until(self, reached: Callable[[], bool]) -> None:
        """Let other threads run until `reached`."""
        waiting = (self.thread, reached)
        self._waiting.append(waiting)
        while not reached():
            self._pause()
        self._waiting.remove(waiting)
        self._turns += 1

    def let_others(self) -> None:
        """Let other threads run until all of them wait, if the main thread calls this."""
        self.turn.notify_all()
        while self.thread == MAIN and any(reached() for _, reached in self._waiting):
            self._pause()

    def _pause(self) -> None:
        # A thread that runs may take longer: an fsync on a busy disk does. The main thread's wait ends the others'.
        before, patience = self._turns, PATIENCE if self.thread == MAIN else None
        if not self.turn.wait(patience) and self._turns == before:
            raise RuntimeError("no thread can go on")

    def start(self, target: Callable[[], object], name: str) -> Callable[[], None]:
        """Start a thread; return what waits for its end."""
        self.threads += 1
        agent, ended = f"thread {self.threads} ({name})", list[Knowledge]()
        self.clocks.learn(agent, self.clocks.known(self.thread))

        def run() -> None:
            with self.turn, ExitStack() as entered:
                self._turns += 1
                self._threads[threading.get_ident()] = agent
                for mode in self.modes:
                    entered.enter_context(mode)
                target()
                ended.append(self.clocks.known(agent))
                self.turn.notify_all()
                del self._threads[threading.get_ident()]

        threading.Thread(target=run, daemon=True).start()

        def join() -> None:
            with self.waiting():
                self.until(lambda: bool(ended))
                self.clocks.learn(self.thread, ended[0])

        return join

    def _extents(self, tensors: Iterable[Tensor]) -> list[Extent]:
        found = []
        for tensor in tensors:
            memory = _memory(tensor)
            # The device reaches no other memory of the host.
            if tensor.numel() and (tensor.is_cuda or memory in self._pinned):
                if memory not in self._kept:
                    # Other tensors must not get the same place while the run lasts.
                    self._kept[memory] = tensor.untyped_storage()
                start, size = int(tensor.storage_offset()), tensor.element_size()
                last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
                found.append(Extent(memory, start * size, (start + last + 1) * size))
        return found


class Pool:
    """Stands for `torch.cuda.MemPool`."""

    def __init__(self, allocator: object) -> None:
        self.memory = set[int]()

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in it."""
        return _memory(tensor) in self.memory


def _references(storage: torch.UntypedStorage) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, machine: Machine, name: str | None = None, priority: int = 0) -> None:
        if name is None:
            machine.streams += 1
            machine.priorities.add(priority)
        self._machine, self.name = machine, name or f"stream {machine.streams}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_stream(self, other: "Stream") -> None:
        """See torch."""
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        """See torch."""
        self._machine.find_freed()
        self._machine.clocks.learn(self.name, event.before)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """See torch."""
        event = event or Event(self._machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """See torch."""
        self._machine.wait("a stream", self._machine.clocks.known(self.name))


class Event:
    """Stands for `torch.cuda.Event`. Without a record, nothing waits for it."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.before = machine, Knowledge()

    def record(self, stream: Stream | None = None) -> None:
        """See torch."""
        self._machine.use_device()
        machine, name = self._machine, stream.name if stream else self._machine.stream
        machine.clocks.learn(name, machine.clocks.known(machine.thread))
        self.before = machine.clocks.known(name)

    def wait(self) -> None:
        """See torch."""
        Stream(self._machine, self._machine.stream).wait_event(self)

    def synchronize(self) -> None:
        """See torch."""
        self._machine.use_device()
        self._machine.wait("an event", self.before)

    def query(self) -> bool:
        """See torch. The host learns nothing of what came before."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """See torch."""
        return 0.0


def synchronize(machine: Machine, device: torch.device | None = None) -> None:
    """Stand for `torch.cuda.synchronize`."""
    for agent in machine.clocks.agents():
        machine.clocks.learn(machine.thread, machine.clocks.known(agent))
    machine.wait("the device", {})
