"""Chooses the torch.distributed backend of messages between pipeline stages."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from llmtrain.comm.messages import Channel, Messages
from llmtrain.comm.messages_gloo import GlooMessages
from llmtrain.comm.messages_nccl import NcclMessages


def torch_messages(
    peers: Mapping[Channel, tuple[dist.ProcessGroup, int]], device: torch.device, ahead: int
) -> Messages:
    """Return NCCL's messages on a GPU and gloo's on the CPU. peers, ahead: see GlooMessages."""
    return NcclMessages(peers, device) if device.type == "cuda" else GlooMessages(peers, ahead)
