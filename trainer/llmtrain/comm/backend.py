"""Chooses the backend of collectives and of messages by the device."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from llmtrain.comm.collectives import Collectives
from llmtrain.comm.gloo import GlooCollectives
from llmtrain.comm.messages import Channel, Messages
from llmtrain.comm.messages_gloo import GlooMessages
from llmtrain.comm.messages_nccl import NcclMessages
from llmtrain.comm.messages_shared import RoutedMessages, SharedMemoryMessages, share_ring
from llmtrain.comm.nccl import NcclCollectives
from llmtrain.comm.posted_receives import PostedReceives
from llmtrain.comm.shared_memory import SharedMemoryCollectives, share_slots
from llmtrain.comm.workspace import Workspace
from llmtrain.plan.collective_buffers import CollectiveBackend, CollectiveBuffers, backend_of


def collectives_of(
    group: dist.ProcessGroup,
    device: torch.device,
    node: int,
    buffers: CollectiveBuffers,
    order: Sequence[int] | None = None,
) -> Collectives:
    """Return the collectives of `group`: NCCL on GPUs, shared memory between CPUs of one node, else gloo. Collective.

    node: ranks of a node. buffers: what they need. order: see Collectives.
    """

    def workspace(backend: CollectiveBackend) -> Workspace | None:
        return Workspace(device, buffers.workspace(backend)) if buffers.sequential else None

    backend = _backend_of(group, device, node)
    if backend == "nccl":
        return NcclCollectives(group, order, workspace("nccl"))
    if backend == "shared":
        slots = share_slots(group, buffers.slots, buffers.slot_bytes)
        if slots:
            return SharedMemoryCollectives(group, slots, order, workspace("shared"))
    return GlooCollectives(group, order, workspace("gloo"))


def messages_of(
    peers: Mapping[Channel, tuple[dist.ProcessGroup, int]],
    device: torch.device,
    node: int,
    ahead: int,
    nbytes: int,
    posted: PostedReceives | None = None,
) -> Messages:
    """Return messages over NCCL on GPUs, through shared memory between CPUs of one node, else over gloo. Collective.

    peers: see TorchMessages; in an order that all ranks share. node: ranks of a node. ahead: messages that a channel
    has in flight. nbytes: of a message; longer ones are allowed. posted: see NcclMessages.
    """
    if device.type == "cuda":
        return NcclMessages(peers, device, posted)
    rings = {
        channel: ring
        for channel, (group, _) in peers.items()
        if _backend_of(group, device, node) == "shared" and (ring := share_ring(group, ahead, nbytes))
    }
    others = {channel: peer for channel, peer in peers.items() if channel not in rings}
    if not rings:
        return GlooMessages(others, ahead)
    shared = SharedMemoryMessages(rings)
    if not others:
        return shared
    return RoutedMessages(shared, frozenset(rings), GlooMessages(others, ahead, shared.wake))


def _backend_of(group: dist.ProcessGroup, device: torch.device, node: int) -> CollectiveBackend:
    return backend_of("cuda" if device.type == "cuda" else "cpu", dist.get_process_group_ranks(group), node)
