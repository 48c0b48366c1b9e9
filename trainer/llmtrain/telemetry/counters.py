"""Byte counters of this machine's links: network cards, RDMA ports, disks, volumes, and between GPUs NVLink or XGMI.

Unreadable counters are left out: a machine without such links, or a container without the kernel's files, is no error.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from llmtrain.comm.device import gpu_count, gpus
from llmtrain.offload.usage import TierUsage

# Bytes that each link has sent (or written) and received (or read) since an arbitrary time.
Counts = dict[str, tuple[float, float]]

_SYS = Path("/sys")
_BLOCK_DEVICES = _SYS / "block"
# Bytes of the unit in which the kernel counts, whatever the disk's own sectors are.
_SECTOR = 512
# These are in memory, or files of other disks.
_NO_DISKS = ("loop", "ram", "zram")


class CounterSource(Protocol):
    """Counts the bytes of some links."""

    def counts(self) -> Counts:
        """Return the counts of its links, by name."""


class HostLinks:
    """The network cards (of this process's network namespace) and the disks of this machine.

    They count the bytes of all processes, without RDMA's. `nic lo` is the traffic between processes of this machine.
    """

    def counts(self) -> Counts:
        """Return the counts of `nic NAME` and `disk NAME`."""
        found: Counts = {}
        # psutil raises OSError from the kernel's files, and RuntimeError if there are none.
        with suppress(OSError, RuntimeError):
            for name, card in psutil.net_io_counters(pernic=True).items():
                found[f"nic {name}"] = card.bytes_sent, card.bytes_recv
        with suppress(OSError, RuntimeError):
            for name, disk in psutil.disk_io_counters(perdisk=True).items():
                # Skip partitions: their disk counts their bytes.
                if not name.startswith(_NO_DISKS) and (_BLOCK_DEVICES / name).exists():
                    found[f"disk {name}"] = disk.write_bytes, disk.read_bytes
        return found


class RdmaPorts:
    """The ports of this machine's RDMA cards, over which NCCL talks on InfiniBand, RoCE and EFA.

    They count the bytes of all processes. The kernel's documentation: ABI/stable/sysfs-class-infiniband.
    """

    # Files of the bytes sent and received below a port's folder, and the bytes of their unit. A card has one pair.
    _FILES = (
        ("counters/port_xmit_data", "counters/port_rcv_data", 4),
        ("hw_counters/tx_bytes", "hw_counters/rx_bytes", 1),
    )

    def __init__(self, sys: Path = _SYS) -> None:
        """sys: the folder of the kernel's files."""
        self._ports = sorted((sys / "class/infiniband").glob("*/ports/*"))

    def counts(self) -> Counts:
        """Return the counts of `rdma CARD:PORT`."""
        found: Counts = {}
        for port in self._ports:
            for sent, received, unit in self._FILES:
                with suppress(OSError, ValueError):
                    both = [unit * int((port / name).read_text(encoding="ascii")) for name in (sent, received)]
                    found[f"rdma {port.parent.parent.name}:{port.name}"] = both[0], both[1]
                    break
        return found


class VolumeCounters:
    """The volumes of some folders, as the kernel counts the bytes of their block devices, of all processes. A file
    system on several devices, or on none, has no such count."""

    def __init__(self, paths: Sequence[str], sys: Path = _SYS) -> None:
        """sys: the folder of the kernel's files."""
        self._files: dict[str, Path] = {}
        for path in paths:
            with suppress(OSError):
                device = os.stat(path).st_dev
                self._files[f"volume {path}"] = sys / f"dev/block/{os.major(device)}:{os.minor(device)}/stat"

    def counts(self) -> Counts:
        """Return the counts of `volume PATH`: bytes written and read."""
        found: Counts = {}
        for name, file in self._files.items():
            with suppress(OSError, ValueError, IndexError):
                fields = file.read_text(encoding="ascii").split()
                found[name] = _SECTOR * int(fields[6]), _SECTOR * int(fields[2])
        return found


class HostLink:
    """What a rank copies to its GPU (sent) and from it. usage: returns what it has moved so far."""

    def __init__(self, usage: Callable[[], TierUsage]) -> None:
        self._usage = usage

    def counts(self) -> Counts:
        """Return the count of `host link`."""
        usage = self._usage()
        return {"host link": (usage.to_device, usage.to_host)}


class NvidiaLinks:
    """The sum of NVLink and PCIe bytes of the GPUs of a machine's ranks, through NVML.

    Not all cards count PCIe bytes, so these are estimated as the current PCIe rate times the time since the last call.
    Written after NVML's documentation; not yet run on a GPU.
    """

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._pcie, self._asked = [0.0, 0.0], time.monotonic()

    @staticmethod
    def open() -> "NvidiaLinks | None":
        """Return the links; None without a GPU, or without NVML for Python. The GPUs are those that torch sees, or all
        of the machine where each of its ranks sees its own alone."""
        if not gpu_count():
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
            if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpu_count():
                every = range(pynvml.nvmlDeviceGetCount())
                return NvidiaLinks(pynvml, [pynvml.nvmlDeviceGetHandleByIndex(number) for number in every])
            return NvidiaLinks(pynvml, [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}") for gpu in gpus()])
        except Exception:
            # NVML is not installed, or there is no driver, or the card is virtual: training does not need it.
            return None

    def counts(self) -> Counts:
        """Return the counts of `nvlink` and `pcie`, as far as the cards report them."""
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


class AmdLinks:
    """The sum of the XGMI bytes of all AMD GPUs of this machine, through AMD SMI, which counts them in kilobytes.

    Written after its documentation; not yet run on a GPU.
    """

    def __init__(self, smi: Any, handles: list[Any]) -> None:
        self._smi, self._handles = smi, handles

    @staticmethod
    def open() -> "AmdLinks | None":
        """Return the links; None without a GPU, or without AMD SMI for Python, which comes with ROCm."""
        if not gpu_count():
            return None
        try:
            import amdsmi

            amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
            return AmdLinks(amdsmi, amdsmi.amdsmi_get_processor_handles())
        except Exception:
            # It is not installed, or there is no driver: training does not need it.
            return None

    def counts(self) -> Counts:
        """Return the count of `xgmi`, if the cards report it."""
        written = read = 0
        with suppress(self._smi.AmdSmiException):
            for handle in self._handles:
                metrics = self._smi.amdsmi_get_gpu_metrics_info(handle)
                written += _kilobytes(metrics["xgmi_write_data_acc"])
                read += _kilobytes(metrics["xgmi_read_data_acc"])
        return {"xgmi": (written * 1e3, read * 1e3)} if written or read else {}


def _kilobytes(of_links: Any) -> int:
    # A link that is not there has a text in place of its count.
    return sum(count for count in of_links if isinstance(count, int)) if isinstance(of_links, list) else 0


def all_sources() -> list[CounterSource]:
    """Return all sources that this machine has."""
    of_gpus: tuple[CounterSource | None, ...] = (NvidiaLinks.open(), AmdLinks.open())
    return [HostLinks(), RdmaPorts(), *(source for source in of_gpus if source is not None)]
