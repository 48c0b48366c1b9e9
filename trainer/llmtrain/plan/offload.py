"""Where optimizer states rest outside of the memory that computes, and in which buckets they move. No torch in here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import lcm
from typing import Literal

from llmtrain.cluster.description import Nvme
from llmtrain.cluster.quantity import quantity
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Device
from llmtrain.plan.placement import PAGE, MemoryTier, OptimizerBackend, Placement
from llmtrain.recipe.offload import OffloadConfig

# Offloaded ranges are split at multiples of this many elements: fp32 in files begins at multiples of 4096 bytes.
GRANULE = 1024
# Elements of which each block of a unit has a sum of squares of its own.
NORM_BLOCK = 4096
# Elements of a bucket, if the recipe leaves them open.
BUCKET = 2**19
# The same for buckets that the host's memory and a GPU exchange: Python's threads hand out some thousand in a second.
HOST_BUCKET = 2**22
# Buckets that are on their way while one is stepped, if the recipe leaves them open.
OVERLAP = READ_AHEAD = 3
# Buckets in files that may still be being written while another one is stepped.
WRITE_BEHIND = 2
# Parts of buckets in files that are read, or written, at the same time while no bucket is stepped: by the start and by
# checkpoints.
PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where a part of the optimizer states rests, and where weights do.

    tier: none (with the other part), host (memory of the host) or nvme (files). share: size of the part on each rank, 0
    for none. shares: the same of units by name, where they differ. parameters, gradients: where all weights, and all
    sums of gradients, rest. paths: folders of files, one for each volume. bandwidths: those of the volumes, relative.
    bucket: most elements that move at the same time. on_device: whether the part comes to the device to be stepped.
    backend: the kernel that steps it. overlap: buckets that are on their way while one is stepped. spare: share of the
    part that may be stepped before the gradients' norm is known, in memory of its own. spare_weights: memory of the
    weights that this makes, until the norm is known.
    """

    tier: Literal["none", "host", "nvme"] = "none"
    share: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    parameters: MemoryTier = "device"
    gradients: MemoryTier = "device"
    paths: tuple[str, ...] = ()
    bandwidths: tuple[float, ...] = ()
    bucket: int = BUCKET
    on_device: bool = False
    backend: OptimizerBackend = "cpu"
    overlap: int = OVERLAP
    spare: float = 0.0
    spare_weights: Literal["host", "device"] = "host"

    @classmethod
    def of(cls, recipe: OffloadConfig, backend: OptimizerBackend, volumes: Sequence[Nvme], device: Device) -> "Offload":
        """Return what a recipe asks for. recipe: without `gradients: auto`. backend: the device's kernel. volumes: of
        the cluster's nodes. Raises BadInputError."""
        in_files = [key for key in ("optimizer", "parameters", "gradients") if getattr(recipe, key) == "nvme"]
        paths = folders_of_files(in_files[0], recipe.paths, volumes) if in_files else ()
        default = HOST_BUCKET if device != "cpu" and recipe.optimizer == "host" else BUCKET
        bucket = default if recipe.bucket == "auto" else recipe.bucket
        share = 1.0 if recipe.share == "auto" else recipe.share
        waits_on_device = recipe.spare_weights == "device" and recipe.parameters == "none" and device != "cpu"
        return cls(
            tier=recipe.optimizer,
            share=0.0 if recipe.optimizer == "none" else share,
            parameters=_memory(recipe.parameters),
            gradients=_memory(recipe.gradients),
            paths=paths,
            bandwidths=volume_bandwidths(paths, volumes),
            bucket=rounded(bucket),
            on_device=recipe.step == "device",
            backend=backend if recipe.step == "device" or device == "cpu" else "cpu",
            overlap=OVERLAP if recipe.overlap == "auto" else recipe.overlap,
            spare=0.0 if recipe.spare == "auto" else recipe.spare,
            spare_weights="device" if waits_on_device else "host",
        )

    @property
    def workers(self) -> int:
        """Threads that step buckets, each one at a time. There is only one for buckets in files, and where gradients
        are offloaded: it steps buckets, or the parts of them that a bucket of gradients covers, in order."""
        return 1 if self.tier == "nvme" or self.gradients != "device" else self.overlap + 1

    def resident(self, unit: str, stepped: int) -> int:
        """Return how many of the elements of a unit that a rank steps stay, from the first one. stepped: their number,
        with padding."""
        share = self.shares.get(unit, self.share)
        return int(stepped * (1 - share)) // GRANULE * GRANULE if share else stepped

    def buckets(self, resident: int, stepped: int) -> list[tuple[int, int]]:
        """Return the ranges of the other elements, as `[start, end)` from the first element that the rank steps.
        resident: how many stay."""
        return list(pairwise([*range(resident, stepped, self.bucket), stepped]))


def _memory(tier: str) -> MemoryTier:
    """Return the memory that holds a state: the device unless the recipe says host or nvme."""
    return "host" if tier == "host" else "nvme" if tier == "nvme" else "device"


def offloaded_placement(
    placement: Placement, offload: Offload, compute_bytes: int, device: Device, quantized: bool
) -> Placement:
    """Return a placement with what an offload changes in it. compute_bytes: of an element of the compute dtype. device:
    what computes. quantized: whether ranks send anything packed."""
    # The CPU cannot step masters that are weights on a GPU, and offloaded weights are not on the device when masters
    # are stepped.
    apart = (offload.share > 0 and device != "cpu") or offload.parameters != "device"
    # Whole pages are read without a copy. But what ranks round depends on which of them holds an element.
    paged = PAGE // compute_bytes if offload.parameters == "nvme" and not quantized else 1
    # A rank then steps all of its weight shard, and what it steps on the host need not pass through the device.
    same = placement.degrees.weights == placement.degrees.optimizer
    at_rest = offload.parameters == "host" and offload.share > 0 and not offload.on_device and same
    return replace(
        placement,
        masters="separate" if apart else placement.masters,
        alignment=lcm(placement.alignment, paged),
        weights_on=offload.parameters,
        gradients_on=offload.gradients,
        optimizer_on=_memory(offload.tier) if offload.share > 0 else "device",
        writes_at_rest=at_rest,
    )


def folders_of_files(key: str, paths: Sequence[str], volumes: Sequence[Nvme]) -> tuple[str, ...]:
    """Return the folders of files. key: of the recipe's `offload`, which asks for files. paths: of the recipe. volumes:
    of the cluster's nodes. Raises BadInputError if neither names a folder."""
    found = tuple(paths) or tuple(volume.path for volume in volumes)
    if not found:
        raise BadInputError(
            f"offload.{key} is nvme, but neither offload.paths nor the cluster file's node.nvme names a folder; give a "
            "folder of each NVMe volume"
        )
    return found


def volume_bandwidths(paths: Sequence[str], volumes: Sequence[Nvme]) -> tuple[float, ...]:
    """Return the described bandwidth of each path's volume; equal ones if one of them is not described."""
    described = {volume.path: volume.bandwidth for volume in volumes}
    known = [described.get(path) for path in paths]
    return tuple(1.0 if None in known or one is None else float(quantity(one, "byte/s")) for one in known)


@dataclass(frozen=True)
class Bucket:
    """Elements of a unit whose states move together. In a file, each state takes `part` bytes, one after another.

    start, end: from the first element that the rank steps. states: number of states. spare: whether it may be stepped
    before the gradients' norm is known, into spare memory of the same size."""

    unit: str
    start: int
    end: int
    states: int
    spare: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start

    @property
    def part(self) -> int:
        """Bytes of one state."""
        return 4 * rounded(self.end - self.start)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.states * self.part


def largest(buckets: Iterable[Bucket]) -> int:
    """Return the elements of the largest bucket."""
    return max(bucket.end - bucket.start for bucket in buckets)


def bucket_slots(buckets: int, overlap: int = OVERLAP) -> int:
    """Return how many of a rank's buckets in files, of states or of gradients, are in memory at the same time. overlap:
    how many of them are read ahead."""
    return min(1 + overlap + WRITE_BEHIND, buckets)


def rounded(elements: int) -> int:
    """Return `elements` rounded up to whole granules."""
    return -(-elements // GRANULE) * GRANULE
