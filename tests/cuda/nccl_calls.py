"""Stands for torch.distributed over NCCL: each communicator has a stream, and a list of what was called."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch

from tests.cuda.clocks import Knowledge
from tests.cuda.machine import DEFAULT, Machine, Pool


@dataclass
class Call:
    """A call. what: its operation, size and dtype; equal on all ranks of a collective. agent, number: the act. before:
    what happens before it. receives: whether it only writes. beside: number of acts that the host had launched on the
    default stream by then, and that may run at the same time. registered: whether its communicator knows all memory
    that it uses."""

    what: str
    agent: str
    number: int
    before: Knowledge
    _: KW_ONLY
    receives: bool
    beside: int
    registered: bool


@dataclass(eq=False)
class Group:
    """A communicator, from the view of one of its ranks. name: the same on all of them. pools: of registered memory.
    left: those that were deregistered. ctas: the most that its kernels take, None for NCCL's choice."""

    name: str
    members: Sequence[int]
    own: int
    calls: list[Call] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    left: list[Pool] = field(default_factory=list)
    _: KW_ONLY
    ctas: int | None = None

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(
            mem_allocator=None, register_mem_pool=self.pools.append, deregister_mem_pool=self.left.append
        )

    def rank(self) -> int:
        """See torch."""
        return list(self.members).index(self.own)

    def size(self) -> int:
        """See torch."""
        return len(self.members)


class Work:
    """Stands for `dist.Work` of a call on the communicator's stream. It refers to the call's tensors until somebody
    waits for it."""

    def __init__(self, machine: Machine, done: Knowledge, tensors: Sequence[Tensor]) -> None:
        self._machine, self._done, self._tensors = machine, done, tensors

    def wait(self) -> bool:
        """See torch: the current stream waits."""
        self._machine.find_freed()
        self._machine.clocks.learn(self._machine.stream, self._done)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """See torch. Nothing is ever seen to be over, so that all is kept as long as it may be."""
        return False


class Nccl:
    """The functions of torch.distributed that a rank of a run calls. The others are where it is, with what it has."""

    def __init__(self, machine: Machine, rank: int, world: int) -> None:
        self._machine, self._rank, self.groups = machine, rank, list[Group]()
        self._made = 0
        self.world = Group("world", range(world), rank)
        self.groups.append(self.world)
        self.group = SimpleNamespace(WORLD=self.world)

    def group_over(
        self, cluster: Any, card: Any, groups: Any, backend: Any = None, timeout: Any = None, ctas: int | None = None
    ) -> Any:
        """See `llmtrain.comm.groups`."""
        self._made += 1
        for members in groups:
            if self._rank in members:
                name = f"group {self._made} {list(members)}"
                self.groups.append(Group(name, list(members), self._rank, ctas=ctas))
                return self.groups[-1]
        return None

    def get_rank(self) -> int:
        """See torch."""
        return self._rank

    def get_process_group_ranks(self, group: Group) -> list[int]:
        """See torch."""
        return list(group.members)

    def destroy_process_group(self, group: Group | None = None) -> None:
        """See torch."""

    def all_gather_single(self, whole: Tensor, own: Tensor, group: Group, async_op: bool) -> Work | None:
        """See torch."""
        work = self._call(group, "all_gather", [own], [whole], async_op)
        with _DisableTorchDispatch():
            whole.view(group.size(), -1).copy_(own.clone())
        return work

    def reduce_scatter_single(self, total: Tensor, values: Tensor, group: Group, async_op: bool) -> Work | None:
        """See torch."""
        work = self._call(group, "reduce_scatter", [values], [total], async_op)
        with _DisableTorchDispatch():
            total.copy_(values.chunk(group.size())[group.rank()]).mul_(group.size())
        return work

    def all_gather(self, gathered: list[Tensor], own: Tensor) -> None:
        """See torch."""
        self._call(self.world, "all_gather", [own], gathered, False)
        with _DisableTorchDispatch():
            for one in gathered:
                one.copy_(own)

    def all_to_all_single(self, received: Tensor, sent: Tensor, group: Group, async_op: bool) -> Work | None:
        """See torch."""
        work = self._call(group, "all_to_all", [sent], [received], async_op)
        with _DisableTorchDispatch():
            # The part of this rank itself may be empty.
            received.view(group.size(), -1).copy_(sent.view(group.size(), -1)[group.rank() - 1])
        return work

    def all_reduce(self, x: Tensor, group: Group, async_op: bool) -> Work | None:
        """See torch."""
        work = self._call(group, "all_reduce", [x], [x], async_op)
        with _DisableTorchDispatch():
            x.mul_(group.size())
        return work

    def isend(self, values: Tensor, peer: int, group: Group) -> Work | None:
        """See torch."""
        return self._call(group, "message", [values], [], True)

    def irecv(self, values: Tensor, peer: int, group: Group) -> Work | None:
        """See torch."""
        work = self._call(group, "message", [], [values], True)
        with _DisableTorchDispatch():
            values.normal_()
        return work

    def send(self, values: Tensor, peer: int, group: Group) -> None:
        """See torch."""
        self._call(group, "message", [values], [], False)

    def recv(self, values: Tensor, peer: int, group: Group) -> None:
        """See torch."""
        self._call(group, "message", [], [values], False)

    def _call(
        self, group: Group, op: str, reads: list[Tensor], writes: list[Tensor], asynchronous: bool
    ) -> Work | None:
        machine = self._machine
        tensors = [*reads, *writes]
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors), op
        stream = f"the stream of {group.name}" if asynchronous else machine.stream
        if asynchronous:
            machine.clocks.learn(stream, machine.clocks.known(machine.stream))
        what = " ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
        number = machine.compute(op, reads, writes, stream)
        before = machine.clocks.known(stream)
        beside = machine.clocks.known(DEFAULT).get(DEFAULT, 0) - before.get(DEFAULT, 0)
        registered = all(any(tensor in pool for pool in group.pools) for tensor in tensors)
        made = Call(f"{op} of {what}", stream, number, before, receives=not reads, beside=beside, registered=registered)
        group.calls.append(made)
        return Work(machine, group.calls[-1].before, tensors) if asynchronous else None


class Decisions:
    """Stands for broadcasts over gloo of what the first rank of a group decides. Ranks are rehearsed one after the
    other, that rank before the others of its group, which then hear what it decided in the same step."""

    def __init__(self) -> None:
        self._made: dict[str, list[int]] = {}
        self._heard: Counter[tuple[str, int]] = Counter()

    def broadcast(self, chosen: torch.Tensor, group_src: int, group: Group) -> None:
        """See torch. chosen: one number."""
        made, heard = self._made.setdefault(group.name, []), (group.name, group.own)
        if group.rank() == group_src:
            made.append(int(chosen))
        else:
            chosen.fill_(made[self._heard[heard]])
            self._heard[heard] += 1
