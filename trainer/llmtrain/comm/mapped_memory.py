"""Memory that processes of one machine share."""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TOKEN = 16


def shared_memory(group: dist.ProcessGroup, nbytes: int) -> list[Tensor]:
    """Allocate uint8 `[nbytes]` for each rank of `group`, which all of them see; return them by rank. Collective.

    The list is empty unless all ranks are on one machine and can share memory. NCCL_SHM_DISABLE=1 forbids it, as it
    does for NCCL. Hosts with different names are different machines, also where one machine emulates several.
    """
    if group.size() == 1:
        return []
    descriptor = _file_in_memory(nbytes)
    own = _mapped(os.getpid(), descriptor, nbytes)
    token = os.urandom(_TOKEN)
    if own is not None:
        own[:_TOKEN] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    where = (socket.gethostname(), os.getpid(), descriptor, token)
    everyone = gather_objects(group, where)
    memory = [own if one == where else _opened(nbytes, where[0], *one) for one in everyone]
    found = [part for part in memory if part is not None]
    everywhere = all(gather_objects(group, len(found) == len(memory)))
    if descriptor is not None:
        os.close(descriptor)
    return found if everywhere else []


def gather_objects(group: dist.ProcessGroup, own: object) -> list[Any]:
    """Return every rank's object, by rank. Collective."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def _file_in_memory(nbytes: int) -> int | None:
    """Create a file in memory and return its descriptor; None where that fails. Only written pages take memory."""
    if os.environ.get("NCCL_SHM_DISABLE") == "1" or not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("llmtrain")
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _opened(nbytes: int, here: str, host: str, process: int, descriptor: int | None, token: bytes) -> Tensor | None:
    """Map another rank's memory, which the last four arguments identify; return None where this is not possible."""
    memory = _mapped(process, descriptor, nbytes) if host == here else None
    # In a container, another process may have the same id.
    return memory if memory is not None and bytes(memory[:_TOKEN].tolist()) == token else None


def _mapped(process: int, descriptor: int | None, nbytes: int) -> Tensor | None:
    """Map a process's file in memory as uint8 `[nbytes]`; return None where that fails. No file stays open."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if descriptor is None or os.stat(path).st_size != nbytes:
            return None
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
