"""Ranks of one machine that communicate through shared memory, and through gloo for comparison.

`shared_ranks.py WORLD FOLDER` writes each rank's results into `rank-N.json` in that folder.
"""

import json
import os
import random
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from llmtrain.comm import shared_memory as shared

from tests.ranks.forks import fork_ranks

SLOT_BYTES, OPERATIONS = 4096, 150
NARROW = torch.bfloat16


Answer = Callable[[], bool]


def gather(ours: shared.SharedMemoryCollectives, own: torch.Tensor) -> Answer:
    expected = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(expected, own)
    whole = torch.zeros(len(expected), len(own), dtype=own.dtype)
    whole[ours.position] = own
    work = ours.all_gather(whole.view(-1))

    def answer() -> bool:
        work.wait()
        return torch.equal(whole[list(ours.order)], torch.stack(expected))

    return answer


def exchange(ours: shared.SharedMemoryCollectives, own: torch.Tensor) -> Answer:
    sent = torch.stack([own + member for member in range(dist.get_world_size())])
    expected, received = torch.empty_like(sent), torch.empty_like(sent)
    dist.all_to_all_single(expected, sent)
    work = ours.all_to_all(received, sent)

    def answer() -> bool:
        work.wait()
        return torch.equal(received, expected)

    return answer


def total(ours: shared.SharedMemoryCollectives, own: torch.Tensor) -> Answer:
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    expected = told[0].to(max(own.dtype, torch.float32, key=lambda dtype: dtype.itemsize), copy=True)
    for other in told[1:]:
        expected += other
    work = ours.all_reduce(own)

    def answer() -> bool:
        work.wait()
        return torch.equal(own, expected.to(own.dtype))

    return answer


def reduce(
    ours: shared.SharedMemoryCollectives, own: torch.Tensor, wire: torch.dtype, into: torch.dtype = torch.float32
) -> Answer:
    sent = torch.stack([own + member for member in range(dist.get_world_size())])
    told = [torch.empty_like(sent) for _ in range(len(sent))]
    dist.all_gather(told, sent)
    expected = told[0][dist.get_rank()].to(wire).float()
    for other in told[1:]:
        expected += other[dist.get_rank()].to(wire)
    found = torch.empty(len(own), dtype=into)
    work = ours.reduce_scatter(sent.view(-1), found, wire)

    def answer() -> bool:
        work.wait()
        return torch.equal(found, expected.to(into))

    return answer


def operations(ours: shared.SharedMemoryCollectives, under_way: int, late: random.Random) -> dict[str, bool]:
    """Run many collectives of each kind, with sizes around a slot's; the ranks start each one at different times.

    under_way: number of collectives to start before waiting for the first of them.
    """
    kinds: dict[str, Callable[[torch.Tensor], Answer]] = {
        "gather": lambda own: gather(ours, own),
        "gather 16 bit": lambda own: gather(ours, own.to(NARROW)),
        "exchange": lambda own: exchange(ours, own.mul(9).to(torch.uint8)),
        "reduce": lambda own: reduce(ours, own, torch.float32),
        "reduce in 16 bit": lambda own: reduce(ours, own, NARROW),
        "reduce of 16 bit": lambda own: reduce(ours, own.to(NARROW), NARROW),
        "reduce to 16 bit": lambda own: reduce(ours, own.to(NARROW), NARROW, NARROW),
        "sum": lambda own: total(ours, own),
        "sum of 16 bit": lambda own: total(ours, own.to(NARROW)),
        "sum of 64 bit": lambda own: total(ours, own.double()),
    }
    # These are equal on all ranks; values and start times differ.
    common, held = random.Random(0), torch.Generator().manual_seed(dist.get_rank())
    right = dict.fromkeys(kinds, True)
    started: deque[tuple[str, Answer]] = deque()
    for _ in range(OPERATIONS):
        name, size = common.choice(list(kinds)), common.choice([1, 31, 1024, 1025, 3000, 9999])
        own = torch.rand(size, generator=held) * 10
        if late.random() < 0.2:
            time.sleep(late.random() * 0.005)
        started.append((name, kinds[name](own)))
        # Usually wait for the oldest first, sometimes for the newest.
        while len(started) == under_way:
            name, answer = started.popleft() if common.random() < 0.8 else started.pop()
            right[name] &= answer()
    for name, answer in started:
        right[name] &= answer()
    return right


def rank_main(world: int, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    backwards = list(reversed(range(world)))
    by_one, by_several = (
        shared.SharedMemoryCollectives(group, shared.share_slots(group, slots, SLOT_BYTES), backwards)
        for slots in (2, 4)
    )
    found: dict[str, object] = {
        "one by one": operations(by_one, 1, random.Random(rank)),
        "several under way": operations(by_several, 4, random.Random(rank)),
        "bytes": by_one.nbytes,
    }
    os.environ["NCCL_SHM_DISABLE"] = "01"[rank == 1]
    found["where one forbids it"] = bool(shared.share_slots(group, 2, SLOT_BYTES))
    os.environ["NCCL_SHM_DISABLE"] = "0"
    if rank == 1:
        socket.gethostname = lambda: "another"
    found["where one is on another machine"] = bool(shared.share_slots(group, 2, SLOT_BYTES))
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.exit(fork_ranks(world, lambda rank: rank_main(world, rank, folder)))
