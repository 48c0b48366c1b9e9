"""Where the model states of a unit rest: over which ranks they are cut, and which ranks hold copies."""

from dataclasses import dataclass
from math import lcm
from typing import Literal

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees, Level

# A shard begins at a multiple of this many elements: aligned for any kernel, and even for two elements in a byte.
ALIGNMENT = 32

# Kernels that step AdamW.
Backend = Literal["torch", "apex", "reference"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the model states of a unit rest.

    axes: the ranks along the product of these axes compute a share of the batch each with the same parameters; their
    gradients are summed. Ranks along the other axes hold other parameters (another stage, other experts) or the rest of
    each matrix. degrees: over how many of those ranks each state is cut; the others hold copies. levels: the digits of
    a place along `axes`, the fastest link first. hierarchical: whether weights are gathered level by level. masters:
    whether the fp32 masters are the weights themselves, which are fp32 then, or memory of their own. backend: the
    kernel that steps the optimizer states. alignment: elements; every shard begins at a multiple of it.
    """

    axes: tuple[Axis, ...]
    degrees: Degrees
    levels: tuple[Level, ...]
    hierarchical: bool = True
    masters: Literal["weights", "separate"] = "separate"
    backend: Backend = "torch"
    alignment: int = ALIGNMENT

    def padded(self, numel: int) -> int:
        """Return the elements that a unit of `numel` takes, with the padding that makes all its shards equal."""
        multiple = self.degrees.ranks * self.alignment if self.degrees.ranks > 1 else 1
        return -(-numel // multiple) * multiple


def alignment(block: int) -> int:
    """Return the alignment of shards that travel packed in blocks of `block` elements, 0 for unpacked: no block then
    lies in two shards."""
    return lcm(ALIGNMENT, block) if block else ALIGNMENT
