"""Chooses the backend of collectives and of messages by the device."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from llmtrain.comm.collectives import Collectives
from llmtrain.comm.gloo import GlooCollectives
from llmtrain.comm.messages import Channel, Messages
from llmtrain.comm.messages_gloo import GlooMessages
from llmtrain.comm.messages_nccl import NcclMessages
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
    if len({rank // node for rank in dist.get_process_group_ranks(group)}) == 1:
        # Two slots for each collective that may be under way.
        slots = share_slots(group, 4 if workspace is None else 2)
        if slots:
            return SharedMemoryCollectives(group, slots, order)
    return GlooCollectives(group, order, workspace)


def messages_of(peers: Mapping[Channel, tuple[dist.ProcessGroup, int]], device: torch.device, ahead: int) -> Messages:
    """Return NCCL's messages on GPUs and gloo's on CPUs. peers, ahead: see GlooMessages."""
    return NcclMessages(peers, device) if device.type == "cuda" else GlooMessages(peers, ahead)
