"""The memory that processes on this machine may use. No torch in here."""

import sys
from pathlib import Path


def machine_memory(*, swap: bool = False) -> int:
    """Return the bytes of memory of this machine, or of its container's limit if that is smaller. swap: add the swap
    space."""
    import psutil  # 0.01 s that most verbs do not need

    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    memory = min(psutil.virtual_memory().total, int(limit) if limit.isdigit() else sys.maxsize)
    return memory + psutil.swap_memory().total if swap else memory
