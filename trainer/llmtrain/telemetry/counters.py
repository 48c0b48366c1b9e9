"""What the links of this machine have moved so far: network cards, disks, and on NVIDIA machines NVLink and PCIe.

What cannot be read is left out: a machine without such links, or a container without the kernel's files, is no error.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

# Bytes that each link has sent (or written) and received (or read) since some time in the past.
Counts = dict[str, tuple[float, float]]

_BLOCK_DEVICES = Path("/sys/block")
# In memory, or pieces of other files.
_NO_DISKS = ("loop", "ram", "zram")


class Source(Protocol):
    """Something that counts."""

    def counts(self) -> Counts:
        """Return the counts of its links, by name."""


class HostLinks:
    """The network cards and whole disks of this machine, or of the network namespace that this process is in.

    They count what every process moves. `nic lo` is what processes of this machine tell each other.
    """

    def counts(self) -> Counts:
        """Return the counts of `nic NAME` and `disk NAME`."""
        found: Counts = {}
        # psutil lets through what the kernel's files raise, and a RuntimeError where there are none.
        with suppress(OSError, RuntimeError):
            for name, card in psutil.net_io_counters(pernic=True).items():
                found[f"nic {name}"] = card.bytes_sent, card.bytes_recv
        with suppress(OSError, RuntimeError):
            for name, disk in psutil.disk_io_counters(perdisk=True).items():
                # A partition counts towards its disk.
                if not name.startswith(_NO_DISKS) and (_BLOCK_DEVICES / name).exists():
                    found[f"disk {name}"] = disk.write_bytes, disk.read_bytes
        return found


class NvidiaLinks:
    """NVLink and PCIe of this process's visible GPUs, all together, through NVML.

    PCIe is not counted by all cards, so its rate at the moment stands for the time since it was last asked for.
    Written after NVML's documentation; not yet run on a GPU.
    """

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._pcie, self._asked = [0.0, 0.0], time.monotonic()

    @staticmethod
    def open() -> "NvidiaLinks | None":
        """Return the links of the GPUs that torch sees; None where there is none, or no NVML for Python."""
        if not torch.cuda.is_available():
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuids = (torch.cuda.get_device_properties(index).uuid for index in range(torch.cuda.device_count()))
            return NvidiaLinks(pynvml, [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids])
        except Exception:
            # Not installed, no driver, or a virtual card: training does not need it.
            return None

    def counts(self) -> Counts:
        """Return the counts of `nvlink` and `pcie`, of those that the cards tell."""
        found: Counts = {}
        with suppress(self._nvml.NVMLError):
            found["nvlink"] = self._nvlink()
        with suppress(self._nvml.NVMLError):
            found["pcie"] = self._pcie_until_now()
        return {name: counts for name, counts in found.items() if any(counts)}

    def _nvlink(self) -> tuple[float, float]:
        nvml, sums = self._nvml, [0.0, 0.0]
        all_links = 2**32 - 1
        fields = [(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, all_links)]
        fields.append((nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, all_links))
        for handle in self._handles:
            for direction, field in enumerate(nvml.nvmlDeviceGetFieldValues(handle, fields)):
                if field.nvmlReturn == nvml.NVML_SUCCESS:
                    sums[direction] += field.value.ullVal * 1024
        return sums[0], sums[1]

    def _pcie_until_now(self) -> tuple[float, float]:
        nvml, now = self._nvml, time.monotonic()
        for direction, counter in enumerate((nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)):
            rate = sum(nvml.nvmlDeviceGetPcieThroughput(handle, counter) for handle in self._handles) * 1000
            self._pcie[direction] += rate * (now - self._asked)
        self._asked = now
        return self._pcie[0], self._pcie[1]


def all_sources() -> list[Source]:
    """Return whatever counts on this machine."""
    nvidia = NvidiaLinks.open()
    return [HostLinks()] if nvidia is None else [HostLinks(), nvidia]
