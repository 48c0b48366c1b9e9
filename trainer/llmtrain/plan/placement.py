"""Where the model states of a unit are held: the ranks that shard them and the ranks that hold copies."""

from dataclasses import dataclass
from math import lcm
from typing import Literal

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees, Level

# A shard begins at a multiple of this many elements: aligned for every kernel, and even, as INT4 packs two in a byte.
UNIT_ALIGNMENT = 32

# Bytes of a page of memory. Files are read and written past the page cache at its multiples.
PAGE = 4096

MemoryTier = Literal["device", "host", "nvme"]
"""Where a state rests: in the memory of the device that computes, in the host's, or in files on NVMe volumes."""

# Kernels of the AdamW step.
OptimizerBackend = Literal["cpu", "triton", "torch", "apex", "reference"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the model states of a unit are held.

    axes: the ranks along the product of these axes have the same parameters and different parts of the batch; their
    gradients are summed. Ranks along the other axes have other parameters (another stage, other experts) or the rest of
    each matrix. degrees: the number of those ranks that shard each state; the others hold copies. levels: the digits of
    a coordinate along `axes`, fastest link first. hierarchical: whether weights are gathered level by level. masters:
    whether the fp32 masters are the weights themselves, which are then fp32, or separate memory. gradients: dtype of
    the sums of gradients: fp32, or that of computation. reduce: dtype in which ranks send each other sums of gradients
    that are not quantized. backend: kernel of the optimizer step. alignment: every shard begins at a multiple of this
    many elements. weights_on: where weight shards are held; if they are offloaded, they are brought to the device
    before they are used. gradients_on: where the sums of gradients rest. optimizer_on: where optimizer states rest, or
    a part of them. writes_at_rest: whether the CPU that steps writes the rounded weights directly into the offloaded
    shard, in the host's memory.
    """

    axes: tuple[Axis, ...]
    degrees: Degrees
    levels: tuple[Level, ...]
    hierarchical: bool = True
    masters: Literal["weights", "separate"] = "separate"
    gradients: Literal["fp32", "compute"] = "fp32"
    reduce: Literal["fp32", "compute"] = "compute"
    backend: OptimizerBackend = "torch"
    alignment: int = UNIT_ALIGNMENT
    weights_on: MemoryTier = "device"
    gradients_on: MemoryTier = "device"
    optimizer_on: MemoryTier = "device"
    writes_at_rest: bool = False

    @property
    def moves_weights(self) -> bool:
        """Whether the weights are offloaded."""
        return self.weights_on != "device"

    @property
    def moves_gradients(self) -> bool:
        """Whether the sums of gradients are offloaded."""
        return self.gradients_on != "device"

    @property
    def hops_after_sum(self) -> bool:
        """Whether the sums of all microbatches are reduced over further ranks."""
        return self.degrees.ranks > self.degrees.gradients

    def gradient_bytes(self, compute_bytes: int) -> int:
        """Return the bytes of an element of a sum of gradients. compute_bytes: bytes of an element of the compute
        dtype."""
        return compute_bytes if self.gradients == "compute" else 4

    def wire_bytes(self, compute_bytes: int) -> int:
        """Return the bytes of an element of a sum of gradients that ranks send each other. compute_bytes: bytes of an
        element of the compute dtype."""
        return compute_bytes if self.reduce == "compute" else 4

    def padded(self, numel: int) -> int:
        """Return the elements of a unit of `numel` with the padding that makes its shards equal, and whole pages of a
        file."""
        multiple = self.degrees.ranks * self.alignment if self.degrees.ranks > 1 or self.moves_weights else 1
        return -(-numel // multiple) * multiple


def alignment(block: int) -> int:
    """Return the alignment of shards that are quantized in blocks of `block` elements (0: not quantized). No block is
    then in two shards."""
    return lcm(UNIT_ALIGNMENT, block) if block else UNIT_ALIGNMENT
