"""Where optimizer states rest outside of the memory that computes, and in which buckets they move. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import Literal

from llmtrain.cluster.description import Nvme
from llmtrain.cluster.quantity import quantity
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Device
from llmtrain.plan.placement import PAGE, Backend, Memory, Placement
from llmtrain.recipe.offload import OffloadConfig

# Ranges outside are cut at multiples of this many elements: fp32 in files begins at multiples of 4096 bytes.
GRANULE = 1024
# Elements of which each block of a unit has a sum of squares of its own.
NORM_BLOCK = 4096
# Elements of a bucket, if the recipe leaves them open.
BUCKET = 2**19
# Buckets that are in memory at once: one is stepped, READ_AHEAD are read, the others are written.
SLOTS, READ_AHEAD = 6, 3


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where a part of each unit's optimizer states rests, and where its weights do.

    tier: none (with the other part), host (memory of the host) or nvme (files). share: size of the part, 0 for none.
    parameters, gradients: where all weights, and all sums of gradients, rest. paths: folders of files, one for each
    volume. weights: relative bandwidths of the volumes. bucket: most elements that move at once. backend: the kernel
    that steps the part, on the CPU.
    """

    tier: Literal["none", "host", "nvme"] = "none"
    share: float = 0.0
    parameters: Memory = "device"
    gradients: Memory = "device"
    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    bucket: int = BUCKET
    backend: Backend = "cpu"

    @classmethod
    def of(cls, recipe: OffloadConfig, backend: Backend, volumes: Sequence[Nvme]) -> "Offload":
        """Return what a recipe asks for. recipe: without `gradients: auto`. volumes: of the cluster's nodes. Raises
        BadInputError."""
        in_files = [key for key in ("optimizer", "parameters", "gradients") if getattr(recipe, key) == "nvme"]
        paths = (recipe.paths or tuple(volume.path for volume in volumes)) if in_files else ()
        if in_files and not paths:
            raise BadInputError(
                f"offload.{in_files[0]} is nvme, but neither offload.paths nor the cluster file's node.nvme names a "
                "folder; give a folder of each NVMe volume"
            )
        bucket = BUCKET if recipe.bucket == "auto" else recipe.bucket
        share = 1.0 if recipe.share == "auto" else recipe.share
        return cls(
            tier=recipe.optimizer,
            share=0.0 if recipe.optimizer == "none" else share,
            parameters=_memory(recipe.parameters),
            gradients=_memory(recipe.gradients),
            paths=paths,
            weights=volume_weights(paths, volumes),
            bucket=rounded(bucket),
            backend=backend,
        )

    def resident(self, stepped: int) -> int:
        """Return how many of the elements of a unit that a rank steps stay, from the first one. stepped: their number,
        with padding."""
        return int(stepped * (1 - self.share)) // GRANULE * GRANULE if self.share else stepped

    def buckets(self, stepped: int) -> list[tuple[int, int]]:
        """Return the ranges of the other elements, as `[start, end)` from the first element that the rank steps."""
        cuts = [*range(self.resident(stepped), stepped, self.bucket), stepped]
        return list(pairwise(cuts)) if self.share else []


def _memory(tier: str) -> Memory:
    """Return where a state rests. tier: as a recipe names it, decided."""
    return "host" if tier == "host" else "nvme" if tier == "nvme" else "device"


def placed_outside(placement: Placement, offload: Offload, compute_bytes: int, device: Device) -> Placement:
    """Return a placement with what an offload changes in it. compute_bytes: of an element of the compute dtype. device:
    what computes."""
    # The CPU cannot step masters that are weights on a GPU, and weights elsewhere are not there to be stepped.
    apart = (offload.share > 0 and device != "cpu") or offload.parameters != "device"
    paged = PAGE // compute_bytes if offload.parameters == "nvme" else 1
    # A block of the gradient norm is never cut.
    whole_blocks = NORM_BLOCK if offload.gradients != "device" else 1
    return replace(
        placement,
        masters="separate" if apart else placement.masters,
        alignment=lcm(placement.alignment, paged, whole_blocks),
        weights_on=offload.parameters,
        gradients_on=offload.gradients,
    )


def volume_weights(paths: Sequence[str], volumes: Sequence[Nvme]) -> tuple[float, ...]:
    """Return the described bandwidth of each path's volume; equal weights if one of them is not described."""
    described = {volume.path: volume.bandwidth for volume in volumes}
    known = [described.get(path) for path in paths]
    return tuple(1.0 if None in known or one is None else float(quantity(one, "byte/s")) for one in known)


@dataclass(frozen=True)
class Bucket:
    """Elements of a unit whose states move together. In a file, each state takes `part` bytes, one behind the other.

    start, end: from the first element that the rank steps. states: number of states."""

    unit: str
    start: int
    end: int
    states: int

    @property
    def part(self) -> int:
        """Bytes of one state."""
        return 4 * rounded(self.end - self.start)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.states * self.part


def largest(buckets: Sequence[Bucket]) -> int:
    """Return the elements of the largest bucket."""
    return max(bucket.end - bucket.start for bucket in buckets)


def slots(buckets: int) -> int:
    """Return how many of a rank's buckets are in memory at once."""
    return min(SLOTS, buckets)


def rounded(elements: int) -> int:
    """Return `elements` rounded up to whole granules."""
    return -(-elements // GRANULE) * GRANULE
