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
from llmtrain.comm.shared_memory import SharedMemoryCollectives, share_slots
from llmtrain.comm.workspace import Workspace


def collectives_of(
    group: dist.ProcessGroup,
    device: torch.device,
    node: int,
    order: Sequence[int] | None = None,
    workspace: Workspace | None = None,
) -> Collectives:
    """Return the collectives of `group`: NCCL on GPUs, shared memory between CPUs of one node, else gloo. Collective.

    node: ranks of a node. order, workspace: see Collectives.
    """
    if device.type == "cuda":
        return NcclCollectives(group, order, workspace)
    if _in_one_node(group, node):
        # Two slots for each collective that may be under way.
        slots = share_slots(group, 4 if workspace is None else 2)
        if slots:
            return SharedMemoryCollectives(group, slots, order)
    return GlooCollectives(group, order, workspace)


def messages_of(
    peers: Mapping[Channel, tuple[dist.ProcessGroup, int]], device: torch.device, node: int, ahead: int, nbytes: int
) -> Messages:
    """Return messages over NCCL on GPUs, through shared memory between CPUs of one node, else over gloo. Collective.

    peers: see TorchMessages; in an order that all ranks share. node: ranks of a node. ahead: messages that a channel
    has in flight. nbytes: of a message; longer ones are allowed.
    """
    if device.type == "cuda":
        return NcclMessages(peers, device)
    rings = {
        channel: ring
        for channel, (group, _) in peers.items()
        if _in_one_node(group, node) and (ring := share_ring(group, ahead, nbytes))
    }
    others = {channel: peer for channel, peer in peers.items() if channel not in rings}
    if not rings:
        return GlooMessages(others, ahead)
    shared = SharedMemoryMessages(rings)
    if not others:
        return shared
    return RoutedMessages(shared, frozenset(rings), GlooMessages(others, ahead, shared.wake))


def _in_one_node(group: dist.ProcessGroup, node: int) -> bool:
    return len({rank // node for rank in dist.get_process_group_ranks(group)}) == 1
