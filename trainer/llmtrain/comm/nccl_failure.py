"""What NCCL says where it fails. Imports torch when it is asked."""

# What NCCL says where another rank, or the network to it, is gone.
_PEER_GONE = ("remote process exited", "ncclRemoteError", "Connection", "connection", "timeout", "timed out")


def nccl_failure(error: BaseException) -> str | None:
    """Return NCCL's reason, in one line, if an error is its own and not the loss of another rank; else None."""
    import torch.distributed as dist

    text = str(error)
    if not isinstance(error, dist.DistBackendError) or any(word in text for word in _PEER_GONE):
        return None
    return text.strip().splitlines()[-1].strip().removeprefix("Last error:").strip()
