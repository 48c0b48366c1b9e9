"""The time that a GPU needs for a list of operators, from what they compute and move: a roofline for each (Williams et
al., 2009), and the time of the host that launches them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from llmtrain_kernels.cross_entropy.chunks import row_stride

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rates:
    """What a card reaches: FLOP/s of products and of attention, bytes/s of its memory. launch: seconds of the host for
    each kernel."""

    products: float = 600e12
    attention: float = 350e12
    memory: float = 3.9e12
    launch: float = 4e-6


@dataclass(frozen=True)
class Operator:
    """A kernel. inputs, outputs: shapes of the tensors that it is given and that it writes. nbytes: that it moves."""

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    nbytes: int


@dataclass(frozen=True)
class Cost:
    """Kernels, FLOPs, bytes and seconds on the device, of some operators together."""

    kernels: float = 0
    flops: float = 0
    nbytes: float = 0
    seconds: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(one + two for one, two in zip(self._values(), other._values(), strict=True)))

    def times(self, factor: float) -> "Cost":
        """Return the cost of as many."""
        return Cost(*(factor * value for value in self._values()))

    def _values(self) -> tuple[float, ...]:
        return self.kernels, self.flops, self.nbytes, self.seconds


def costs(operators: Sequence[Operator], vocab: int, rates: Rates) -> dict[str, Cost]:
    """Return the cost of each class of operators. vocab: a tensor of this size, or of as many logits as a padded row
    has, is the head's or the embedding's."""
    found: dict[str, Cost] = {}
    for one in operators:
        kind, flops = kind_of(one, vocab), flops_of(one)
        peak = rates.attention if kind == "attention" else rates.products
        seconds = max(flops / peak, one.nbytes / rates.memory)
        found[kind] = found.get(kind, Cost()) + Cost(1, flops, one.nbytes, seconds)
    return found


def step_seconds(found: dict[str, Cost], rates: Rates) -> float:
    """Return the least seconds of a step: the device's, or the host's if it launches more slowly."""
    total = sum(found.values(), Cost())
    return max(total.seconds, total.kernels * rates.launch)


def flops_of(one: Operator) -> int:
    """Return the floating-point operations of a product or of causal attention; 0 of any other operator."""
    if one.name in ("mm", "addmm", "bmm"):
        left, right = one.inputs[1:3] if one.name == "addmm" else one.inputs[:2]
        return 2 * prod(left) * right[-1]
    if "flash_attention" in one.name:
        batch, heads, sequence, width = max(one.inputs[:4], key=prod)
        # Two products forward and five backward, of half of the scores.
        return (10 if one.name.endswith("backward") else 4) * batch * heads * sequence**2 * width // 2
    return 0


def kind_of(one: Operator, vocab: int) -> str:
    """Return the class of an operator."""
    sizes = {size for shape in (*one.inputs, *one.outputs) for size in shape}
    of_head = not sizes.isdisjoint({vocab, row_stride("cuda", vocab)})
    if one.name in ("mm", "addmm", "bmm"):
        return "head's products" if of_head else "blocks' products"
    if "attention" in one.name:
        return "attention"
    if one.name in ("adamw", "squared_sum", "_fused_adamw_"):
        return "optimizer"
    if "cross_entropy" in one.name or (of_head and "embedding" not in one.name):
        return "cross-entropy"
    if "norm" in one.name:
        return "norms"
    return "other"
