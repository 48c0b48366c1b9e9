"""Kernels of causal attention on GPUs, and which of them suit a run. No torch in here."""

from importlib.util import find_spec
from typing import Literal, get_args

Kernel = Literal["torch", "cudnn", "flash-attn-2", "flash-attn-3"]
"""torch: FlashAttention 2 in torch; for fp32, torch's memory-efficient kernel. cudnn: cuDNN's, which torch calls.
flash-attn-2, flash-attn-3: those of the packages flash_attn and flash_attn_interface."""

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
PACKAGES: dict[Kernel, str] = {"flash-attn-2": "flash_attn", "flash-attn-3": "flash_attn_interface"}

FLASH_CHANNELS = 256
"""Channels of the widest head that torch's FlashAttention takes on GPUs."""


def is_installed(kernel: Kernel) -> bool:
    """Return whether the package of a kernel is installed; torch has the others."""
    return kernel not in PACKAGES or find_spec(PACKAGES[kernel]) is not None


def lack(kernel: Kernel, wide: bool, dropout: float, deterministic: bool) -> str:
    """Return what a run needs and a kernel lacks, in words; empty if it lacks nothing.

    wide: whether the run computes in fp32. deterministic: whether its results must have the same bits in every run.
    """
    if wide and kernel != "torch":
        return "fp32"
    if dropout and kernel == "flash-attn-3":
        return "dropout"
    # cuDNN rounds others to these, or torch refuses them (pytorch/pytorch#174245).
    if kernel == "cudnn" and 16 * dropout % 1:
        return "dropout but in multiples of 1/16"
    # torch does not take cuDNN's kernel where it may take deterministic ones alone.
    return "deterministic results" if deterministic and kernel == "cudnn" else ""
