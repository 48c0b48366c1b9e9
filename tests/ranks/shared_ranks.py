"""Ranks of one machine that tell each other things through shared memory, and through gloo for comparison.

`shared_ranks.py WORLD FOLDER` writes what each rank found into `rank-N.json` there.
"""

import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from forks import fork_ranks
from llmtrain.comm import shared_memory as shared

SLOT_BYTES, OPERATIONS = 4096, 150
NARROW = torch.bfloat16


def gather(slots: shared.SharedSlots, own: torch.Tensor) -> bool:
    expected = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(expected, own)
    parts = [torch.zeros_like(own) for _ in expected]
    slots.gather(parts, own)
    expected[dist.get_rank()].zero_()
    return torch.equal(torch.stack(parts), torch.stack(expected))


def exchange(slots: shared.SharedSlots, own: torch.Tensor) -> bool:
    sent = torch.stack([own + member for member in range(dist.get_world_size())])
    expected, received = torch.empty_like(sent), torch.empty_like(sent)
    dist.all_to_all_single(expected, sent)
    slots.exchange(received, sent)
    return torch.equal(received, expected)


def reduce(slots: shared.SharedSlots, own: torch.Tensor, wire: torch.dtype) -> bool:
    sent = torch.stack([own + member for member in range(dist.get_world_size())])
    told = [torch.empty_like(sent) for _ in range(len(sent))]
    dist.all_gather(told, sent)
    expected = told[0][dist.get_rank()].to(wire).float()
    for other in told[1:]:
        expected += other[dist.get_rank()].to(wire)
    total = torch.empty(len(own))
    slots.reduce(total, sent, wire)
    return torch.equal(total, expected)


def operations(slots: shared.SharedSlots, late: random.Random) -> dict[str, bool]:
    """Do many of each kind, of all sizes around a room's; ranks come to each at times of their own."""
    kinds: dict[str, Callable[[torch.Tensor], bool]] = {
        "gather": lambda own: gather(slots, own),
        "gather 16 bit": lambda own: gather(slots, own.to(NARROW)),
        "exchange": lambda own: exchange(slots, own),
        "exchange bytes": lambda own: exchange(slots, own.mul(9).to(torch.uint8)),
        "reduce": lambda own: reduce(slots, own, torch.float32),
        "reduce in 16 bit": lambda own: reduce(slots, own, NARROW),
        "reduce of 16 bit": lambda own: reduce(slots, own.to(NARROW), NARROW),
    }
    # Alike on all ranks, but for what they hold and when they come.
    alike, held = random.Random(0), torch.Generator().manual_seed(dist.get_rank())
    right = dict.fromkeys(kinds, True)
    for _ in range(OPERATIONS):
        name, size = alike.choice(list(kinds)), alike.choice([1, 31, 1024, 1025, 3000, 9999])
        own = torch.rand(size, generator=held) * 10
        if late.random() < 0.2:
            time.sleep(late.random() * 0.005)
        right[name] &= kinds[name](own)
    return right


def rank_main(world: int, rank: int, folder: Path) -> None:
    shared.SLOT_BYTES = SLOT_BYTES
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    slots = shared.share_slots(group)
    assert slots is not None
    found: dict[str, object] = {**operations(slots, random.Random(rank)), "bytes": slots.nbytes}
    os.environ["NCCL_SHM_DISABLE"] = "01"[rank == 1]
    found["where one forbids it"] = shared.share_slots(group) is not None
    os.environ["NCCL_SHM_DISABLE"] = "0"
    if rank == 1:
        socket.gethostname = lambda: "another"
    found["where one is on another machine"] = shared.share_slots(group) is not None
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.exit(fork_ranks(world, lambda rank: rank_main(world, rank, folder)))
