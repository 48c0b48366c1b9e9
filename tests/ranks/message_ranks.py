"""Ranks of one machine that send messages to each other through shared memory and over gloo.

`message_ranks.py WORLD FOLDER` writes each rank's results into `rank-N.json` in that folder. Ranks 0 and 1 are one
node, rank 2 is another.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from llmtrain.comm.backend import messages_of
from llmtrain.comm.messages import Channel, Messages

from tests.ranks.forks import fork_ranks

NODE, AHEAD, NBYTES, COUNT = 2, 3, 1 << 12, 200
# Bytes up to several times all slots of a channel.
SIZES = (1, 64, 1 << 10, 1 << 12, (1 << 12) + 1, 1 << 16)


def channels(world: int) -> list[Channel]:
    """Return a channel in each direction between every two ranks."""
    return [Channel(one, other) for one in range(world) for other in range(world) if one != other]


def connect(world: int, rank: int, node: int) -> Messages:
    peers = {}
    for channel in channels(world):
        group = dist.new_group([channel.source, channel.target])
        if rank in (channel.source, channel.target):
            peers[channel] = group, channel.target if rank == channel.source else channel.source
    return messages_of(peers, torch.device("cpu"), node, AHEAD, NBYTES)


def message(channel: Channel, number: int) -> torch.Tensor:
    """Return what every rank knows to be a channel's message."""
    seed = (channel.source * 10 + channel.target) * COUNT + number
    size = random.Random(seed).choice(SIZES)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def exchange(messages: Messages, world: int, rank: int) -> bool:
    """Send all messages of this rank's channels, in bursts, and return whether it received all others' intact."""
    out = [channel for channel in channels(world) if channel.source == rank]
    into = [channel for channel in channels(world) if channel.target == rank]
    sent, found, right = dict.fromkeys(out, 0), dict.fromkeys(into, 0), True
    requests, chance = [], random.Random(rank)
    posted = {}
    while any(count < COUNT for count in (*sent.values(), *found.values())):
        for channel in out:
            for _ in range(min(chance.randrange(2 * AHEAD), COUNT - sent[channel])):
                values = message(channel, sent[channel])
                requests.append((messages.send(channel, values), values))
                sent[channel] += 1
        for channel in into:
            if channel not in posted and found[channel] < COUNT:
                values = torch.empty_like(message(channel, found[channel]))
                posted[channel] = messages.receive(channel, values), values
        if posted:
            messages.until(lambda: any(request.is_completed() for request, _ in posted.values()))
        for channel in [channel for channel, (request, _) in posted.items() if request.is_completed()]:
            request, values = posted.pop(channel)
            request.wait()
            right &= torch.equal(values, message(channel, found[channel]))
            found[channel] += 1
    for request, _ in requests:
        request.wait()
    return right


def loses_contact(messages: Messages, rank: int) -> str:
    """Kill rank 1 before it sends; return what rank 0, which waits for it, is told."""
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        messages.receive(Channel(1, 0), torch.empty(1)).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def files_of_memory() -> list[str]:
    """Return the files in memory that this process holds open. The memory of a closed file goes with its processes."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        # The listing itself had a descriptor.
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in names if "memfd" in name]


def rank_main(world: int, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    found: dict[str, object] = {}
    settings = {"in one node": (world, "0"), "in two nodes": (NODE, "0"), "each in its own": (1, "0")}
    settings["where one forbids it"] = (world, "01"[rank == 1])
    for name, (node, forbidden) in settings.items():
        os.environ["NCCL_SHM_DISABLE"] = forbidden
        messages = connect(world, rank, node)
        found[name] = [type(messages).__name__, exchange(messages, world, rank)]
        dist.barrier()
        messages.close()
    os.environ["NCCL_SHM_DISABLE"] = "0"
    messages = connect(world, rank, world)
    found["files of memory"] = files_of_memory()
    dist.barrier()
    messages.close()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def lost_main(rank: int, folder: Path) -> None:
    """Kill rank 1 before it sends; write what rank 0, which waits for it, is told."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    messages = connect(2, rank, 2)
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    told = ""
    try:
        messages.receive(Channel(1, 0), torch.empty(1)).wait()
    except RuntimeError as error:
        told = str(error)
    (folder / "told").write_text(told)


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    if world == 2:
        (folder / "lost").mkdir()
        fork_ranks(2, lambda rank: lost_main(rank, folder / "lost"))
    sys.exit(fork_ranks(world, lambda rank: rank_main(world, rank, folder)))
