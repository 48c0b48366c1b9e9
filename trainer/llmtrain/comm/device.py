"""What differs between devices, for code that runs on any of them."""

import torch


def synchronize(device: torch.device) -> None:
    """Wait until `device` has computed all that was queued on it. The CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def own_generators(device: torch.device) -> list[torch.device]:
    """Return the devices, besides the CPU, whose random number generators computation on `device` uses."""
    return [device] if device.type == "cuda" else []
