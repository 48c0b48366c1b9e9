"""Collectives over gloo and NCCL. The ranks are threads, each with its own process group; NCCL's implementation runs
over gloo here."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from llmtrain.comm import nccl
from llmtrain.comm.backend import collectives_of
from llmtrain.comm.collectives import Collectives, add_in_order
from llmtrain.comm.gloo import GlooCollectives
from llmtrain.comm.nccl import NcclCollectives
from llmtrain.comm.workspace import Workspace
from llmtrain.plan import collective_buffers
from llmtrain.plan.collective_buffers import CollectiveBackend, CollectiveBuffers, SizedCollective
from torch import Tensor

RANKS, ORDER = 3, (2, 0, 1)
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def on_ranks(work: Callable[[dist.ProcessGroup, int], Any], ranks: int = RANKS) -> list[Any]:
    """Return the result of each rank."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        group = dist.ProcessGroup(store, number, ranks)
        backend = dist.ProcessGroupGloo(store, number, ranks, timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return work(group, number)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


def values(number: int, dtype: torch.dtype = torch.float32, numel: int = 10) -> Tensor:
    """Return a rank's numbers, of very different sizes, so that the order of a sum matters."""
    random = torch.Generator().manual_seed(number)
    return (torch.randn(numel, generator=random) * 10**number).to(dtype)


@pytest.fixture(params=["gloo", "gloo in large", "NCCL", "NCCL on its own stream"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Collectives]:
    """Returns a group's collectives."""
    if request.param == "gloo in large":
        monkeypatch.setattr(collective_buffers, "ONE_ROUND", 0)
    kind = GlooCollectives if request.param.startswith("gloo") else NcclCollectives
    reused = request.param in ("gloo in large", "NCCL")
    sizes = dict.fromkeys(("sent", "received", "gathered"), 1000)
    return lambda group, order=None: kind(group, order, Workspace(CPU, sizes) if reused else None)


class Taking(Workspace):
    """A workspace that gives what is asked for, and records the most bytes of each buffer."""

    def __init__(self) -> None:
        super().__init__(CPU, {})
        self.most: dict[str, int] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        self.most[name] = max(self.most.get(name, 0), numel * dtype.itemsize)
        return torch.empty(numel, dtype=dtype)


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("order", [None, ORDER], ids=["in order", "shuffled"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_buffers_are_those_that_are_planned(
    backend: CollectiveBackend, ranks: int, order: tuple[int, ...] | None, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each collective takes what its size and dtypes say before it runs, whatever the values are."""
    kind = {"gloo": GlooCollectives, "nccl": NcclCollectives}[backend]
    places = None if order is None else tuple(place for place in order if place < ranks)
    if not small:
        monkeypatch.setattr(collective_buffers, "ONE_ROUND", 8)
    half, wide = torch.bfloat16, torch.float32
    cases: list[tuple[SizedCollective, Callable[[Collectives], object]]] = [
        (SizedCollective("all_gather", 40 * ranks), lambda one: one.all_gather(torch.zeros(10 * ranks)).wait()),
        (SizedCollective("all_reduce", 40), lambda one: one.all_reduce(torch.zeros(10)).wait()),
        *(
            (
                SizedCollective("reduce_scatter", 5 * ranks * wire.itemsize, wire.itemsize, converted=held != wire),
                lambda one, held=held, wire=wire: one.reduce_scatter(
                    torch.zeros(5 * ranks, dtype=held), torch.zeros(5), wire
                ).wait(),
            )
            for held, wire in ((wide, wide), (wide, half), (half, half))
        ),
    ]
    for collective, run in cases:

        def work(group: dist.ProcessGroup, number: int, run: Callable[[Collectives], object] = run) -> dict[str, int]:
            taken = Taking()
            run(kind(group, places, taken))
            return taken.most

        planned = CollectiveBuffers(ranks, frozenset({collective}), in_order=places in (None, tuple(range(ranks))))
        for found in on_ranks(work, ranks):
            assert found == planned.workspace(backend)


def test_slots_hold_one_round() -> None:
    """A slot is as large as what a rank passes on at once, in whole pages, and 8 MiB at most."""

    def slot(*collectives: SizedCollective) -> int:
        return CollectiveBuffers(4, frozenset(collectives)).slot_bytes

    assert slot() == 4096
    assert slot(SizedCollective("all_gather", 4 * 5000)) == slot(SizedCollective("all_reduce", 5000)) == 8192
    assert slot(SizedCollective("all_gather", 4 * 5000, shards=True)) == 4096
    assert slot(SizedCollective("all_reduce", 4096), SizedCollective("reduce_scatter", 9 << 20)) == 8 << 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_the_same_on_all_ranks(dtype: torch.dtype, made: Callable[..., Collectives]) -> None:
    def work(group: dist.ProcessGroup, number: int) -> Tensor:
        own = values(number, dtype).view(2, 5)
        made(group).all_reduce(own).wait()
        return own.view(-1)

    first, *others = on_ranks(work)
    expected = sum(values(number, dtype).double() for number in range(RANKS))
    torch.testing.assert_close(first.double(), expected, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.parametrize("order", [None, ORDER])
def test_gathered_parts_are_in_their_places(order: tuple[int, ...] | None, made: Callable[..., Collectives]) -> None:
    def work(group: dist.ProcessGroup, number: int) -> Tensor:
        ours, whole = made(group, order), torch.full((RANKS, 10), torch.nan)
        whole[ours.position] = values(number)
        ours.all_gather(whole.view(-1)).wait()
        return whole[list(ours.order)]

    expected = torch.stack([values(number) for number in range(RANKS)])
    for found in on_ranks(work):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("held", "wire", "into"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_parts_are_rounded_once_and_added_in_fp32(
    held: torch.dtype, wire: torch.dtype, into: torch.dtype, made: Callable[..., Collectives]
) -> None:
    def work(group: dist.ProcessGroup, number: int) -> Tensor:
        total = torch.full((5,), torch.nan, dtype=into)
        made(group).reduce_scatter(values(number, held, 5 * RANKS), total, wire).wait()
        return total

    sent = [values(number, held, 5 * RANKS).to(wire).float().view(RANKS, 5) for number in range(RANKS)]
    for number, found in enumerate(on_ranks(work)):
        expected = sent[0][number] + sent[1][number] + sent[2][number]
        # NCCL adds in its own order.
        torch.testing.assert_close(found, expected.to(into), rtol=1e-6 if into == torch.float32 else 0, atol=1e-5)


def test_every_rank_gets_its_row(made: Callable[..., Collectives]) -> None:
    def work(group: dist.ProcessGroup, number: int) -> Tensor:
        received, sent = torch.empty(RANKS, 7, dtype=torch.uint8), torch.arange(RANKS * 7, dtype=torch.uint8)
        made(group).all_to_all(received, sent.view(RANKS, 7) + 100 * number).wait()
        return received

    for number, found in enumerate(on_ranks(work)):
        rows = [torch.arange(7 * number, 7 * number + 7) + 100 * rank for rank in range(RANKS)]
        assert found.tolist() == torch.stack(rows).to(torch.uint8).tolist()


@pytest.mark.parametrize("made", ["gloo", "NCCL on its own stream"], indirect=True)
def test_several_may_be_under_way(made: Callable[..., Collectives]) -> None:
    def work(group: dist.ProcessGroup, number: int) -> list[Tensor]:
        ours, sums = made(group), [values(number + step) for step in range(4)]
        wholes = [torch.stack([values(number + step)] * RANKS) for step in range(4)]
        works = [
            (ours.all_reduce(own), ours.all_gather(whole.view(-1))) for own, whole in zip(sums, wholes, strict=True)
        ]
        for pair in reversed(works):
            for one in pair:
                one.wait()
        return [*sums, *wholes]

    for found in on_ranks(work):
        for step in range(4):
            parts = torch.stack([values(number + step) for number in range(RANKS)])
            torch.testing.assert_close(found[step], parts.sum(0), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[4 + step], parts, rtol=0, atol=0)


def test_small_tensors_go_in_one_round() -> None:
    def sent(nbytes: int, ranks: int) -> int:
        return on_ranks(lambda group, number: GlooCollectives(group).all_reduce_bytes(nbytes), ranks)[0]

    assert sent(collective_buffers.ONE_ROUND // 2, 3) == collective_buffers.ONE_ROUND
    # A ring sends 3/4 of the buffer twice.
    assert sent(collective_buffers.ONE_ROUND // 2, 4) == collective_buffers.ONE_ROUND * 3 // 4


def test_narrow_sums_are_rounded_once() -> None:
    parts = [torch.full((3,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    total = torch.empty(3, dtype=torch.bfloat16)
    add_in_order(parts, total)
    # If each addition rounded its result, the ones would be lost.
    assert total.tolist() == [260.0] * 3


class Recorded:
    """NCCL as one rank of `ranks` sees it; `calls` records the launches, each with its stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 4) -> None:
        self.calls: list[str] = []
        self.group: Any = self
        self._ranks = ranks
        for name in ("ALL_GATHER", "REDUCE_SCATTER"):
            monkeypatch.setattr(nccl, name, self._launch(name.lower()))
        for name in ("all_to_all_single", "all_reduce"):
            monkeypatch.setattr(dist, name, self._launch(name))

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return self._ranks

    def _launch(self, name: str) -> Callable[..., Any]:
        def launch(*tensors: Tensor, group: Any, async_op: bool) -> Any:
            assert group is self
            assert all(tensor.is_contiguous() for tensor in tensors)
            self.calls.append(f"{name} {tensors[0].dtype}".replace("torch.", ""))
            return Waited(self.calls) if async_op else None

        return launch


class Waited:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def wait(self) -> None:
        self._calls.append("wait")


@pytest.mark.parametrize("own_stream", [False, True])
def test_nccl_launches_once_for_each_collective(own_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    workspace = None if own_stream else Workspace(CPU, dict.fromkeys(("sent", "received", "gathered"), 32))
    ours, shuffled = (NcclCollectives(recorded.group, order, workspace) for order in (None, (3, 2, 1, 0)))
    wide, narrow = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    for work, call in (
        (lambda: ours.all_gather(narrow), "all_gather bfloat16"),
        (lambda: shuffled.all_gather(narrow), "all_gather bfloat16"),
        (lambda: ours.all_to_all(wide.to(torch.uint8), wide.to(torch.uint8)), "all_to_all_single uint8"),
        # NCCL sums by itself only on an fp32 wire.
        (lambda: ours.reduce_scatter(wide, torch.zeros(2), torch.float32), "reduce_scatter float32"),
        (lambda: ours.reduce_scatter(narrow, torch.zeros(2), torch.bfloat16), "all_to_all_single bfloat16"),
        (lambda: ours.reduce_scatter(wide, torch.zeros(2), torch.bfloat16), "all_to_all_single bfloat16"),
        (lambda: ours.all_reduce(wide), "all_reduce float32"),
    ):
        recorded.calls.clear()
        started = work()
        assert recorded.calls == [call]
        started.wait()
        assert recorded.calls == [call, *(["wait"] if own_stream else [])]


def test_each_group_gets_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: shared memory inside a node if possible, and gloo otherwise."""
    slots = [torch.zeros(4, 4096, dtype=torch.uint8)] * 2
    asked: list[tuple[int, int]] = []

    def share(group: Any, count: int, nbytes: int) -> list[Tensor]:
        asked.append((count, nbytes))
        return slots

    monkeypatch.setattr("llmtrain.comm.backend.share_slots", share)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, 3])
    recorded = Recorded(monkeypatch, 2).group

    def kind(device: str, node: int, sequential: bool = False) -> str:
        buffers = CollectiveBuffers(2, frozenset({SizedCollective("all_reduce", 5000)}), sequential)
        return type(collectives_of(recorded, torch.device(device), node, buffers)).__name__

    assert kind("cuda", 4) == "NcclCollectives"
    assert kind("cpu", 1) == kind("cpu", 3) == "GlooCollectives"
    assert asked == []
    assert kind("cpu", 2) == kind("cpu", 4, sequential=True) == "SharedMemoryCollectives"
    assert asked == [(4, 8192), (2, 8192)]
    slots.clear()
    assert kind("cpu", 2) == "GlooCollectives"
