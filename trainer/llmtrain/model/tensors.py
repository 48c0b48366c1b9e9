"""The parameters of a model as flat units of canonical tensors. No torch in here.

A unit (embedding, one block, head) is one flat buffer of canonical tensors, back to back. Tensors that tensor
parallelism splits come before those that it replicates; in both parts matrices come before vectors, so that weight
decay covers few ranges. A split matrix is stored so that each slice is a contiguous range: column-parallel ones
output-major `[out, in]`, row-parallel ones input-major `[in, out]`. Tensors that one product reads together (Q, K and
V; gate and up) are neighbours, so that the module has them as one parameter; files have each under its own name.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

from llmtrain.cluster.layout import even_share
from llmtrain.model.config import GPTConfig


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One canonical tensor, or the rows of it that a tensor-parallel rank holds.

    name: name in checkpoints. parameter: name of the module parameter that views it, relative to the unit's module;
    neighbours with the same parameter are stacked along dim 0. shape: shape of the full tensor. std: standard
    deviation of the normal initialisation; None fills with `fill`. decay: whether weight decay applies. split: whether
    tensor parallelism splits it along dim 0. rows: the `[start, end)` along dim 0 that this rank holds; None for all.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    decay: bool
    std: float | None = None
    fill: float = 0.0
    split: bool = False
    rows: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return prod(self.shape)

    @property
    def local_range(self) -> tuple[int, int]:
        """The `[start, end)` of the full tensor's elements that this rank holds."""
        if self.rows is None:
            return 0, self.numel
        row = prod(self.shape[1:])
        return self.rows[0] * row, self.rows[1] * row


@dataclass(frozen=True)
class UnitSpec:
    """One flat buffer: canonical tensors back to back."""

    name: str
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        """Raise ValueError if a tensor that tensor parallelism splits comes after one that it replicates."""
        splits = [tensor.split for tensor in self.tensors]
        if splits != sorted(splits, reverse=True):
            raise ValueError(f"{self.name} has tensors that tensor parallelism splits behind others; put them first")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each tensor, and the end of the last."""
        return tuple(accumulate((tensor.local_range[1] - tensor.local_range[0] for tensor in self.tensors), initial=0))

    @property
    def numel(self) -> int:
        """Number of elements of the full unit."""
        return self.offsets[-1]

    @property
    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        """The unit's ranges (start, end, decay): consecutive tensors with the same weight decay form one range."""
        found: list[tuple[int, int, bool]] = []
        for tensor, start, end in zip(self.tensors, self.offsets, self.offsets[1:], strict=False):
            begin = found.pop()[0] if found and found[-1][2] == tensor.decay else start
            found.append((begin, end, tensor.decay))
        return found

    @property
    def parameter_ranges(self) -> list[tuple[str, int, int]]:
        """The unit's ranges (module parameter, start, end): neighbours that share a parameter form one range."""
        found: list[tuple[str, int, int]] = []
        for tensor, start, end in zip(self.tensors, self.offsets, self.offsets[1:], strict=False):
            begin = found.pop()[1] if found and found[-1][0] == tensor.parameter else start
            found.append((tensor.parameter, begin, end))
        return found

    @property
    def replicated_from(self) -> int:
        """The first element of the TP-replicated tensors, which come last in the unit."""
        return self.offsets[sum(tensor.split for tensor in self.tensors)]

    @property
    def replicated_numel(self) -> int:
        """Number of elements of the TP-replicated tensors."""
        return self.numel - self.replicated_from

    def tensor_ranges(self, start: int, end: int) -> list[tuple[TensorSpec, int, int]]:
        """Return (tensor, first, last) for the part of each full tensor in `[start, end)` of the unit, in order."""
        index = bisect_right(self.offsets, start) - 1
        found = []
        while start < end:
            tensor, offset = self.tensors[index], self.offsets[index]
            stop, shift = min(end, self.offsets[index + 1]), tensor.local_range[0] - offset
            if stop > start:
                found.append((tensor, start + shift, stop + shift))
            start, index = stop, index + 1
        return found

    def slice(self, tensor_rank: int, parts: int) -> "UnitSpec":
        """Return the part of this full unit that tensor-parallel rank `tensor_rank` of `parts` holds.

        Rows are divided as evenly as possible (a vocabulary need not be a multiple of `parts`).
        """

        def part(tensor: TensorSpec) -> TensorSpec:
            return replace(tensor, rows=even_share(tensor.shape[0], parts, tensor_rank)) if tensor.split else tensor

        return UnitSpec(self.name, tuple(map(part, self.tensors))) if parts > 1 else self


def model_units(config: GPTConfig) -> list[UnitSpec]:
    """Return the model's units in the order of the forward pass: embedding, blocks, head."""
    return list(_model_units(config))


@lru_cache(maxsize=8)
def _model_units(config: GPTConfig) -> tuple[UnitSpec, ...]:
    """Return the units; cached, because every stage of a pipeline asks for them."""
    block = _block(config)
    blocks = [_unit(f"blocks.{index}", block) for index in range(config.layers)]
    return (_unit("embedding", _embedding(config)), *blocks, _unit("head", _head(config)))


@lru_cache(maxsize=64)
def sliced_units(config: GPTConfig, tensor_rank: int, parts: int) -> tuple[UnitSpec, ...]:
    """Return the parts of the model's units that tensor-parallel rank `tensor_rank` of `parts` holds. Cached, because
    plans ask for them for many ranks."""
    return tuple(unit.slice(tensor_rank, parts) for unit in _model_units(config))


def parameter_count(config: GPTConfig) -> int:
    """Return the number of trained parameters; tied ones count once."""
    return sum(unit.numel for unit in model_units(config))


def _unit(name: str, tensors: list[TensorSpec]) -> UnitSpec:
    ordered = sorted(tensors, key=lambda tensor: (not tensor.split, not tensor.decay))
    return UnitSpec(name, tuple(replace(tensor, name=f"{name}.{tensor.name}") for tensor in ordered))


def _matrix(
    name: str, shape: tuple[int, int], std: float, parameter: str | None = None, split: bool = True
) -> TensorSpec:
    return TensorSpec(name=name, parameter=parameter or name, shape=shape, decay=True, std=std, split=split)


def _vector(name: str, size: int, fill: float = 0.0, parameter: str | None = None, split: bool = False) -> TensorSpec:
    return TensorSpec(name=name, parameter=parameter or name, shape=(size,), decay=False, fill=fill, split=split)


def _norm(name: str, config: GPTConfig) -> list[TensorSpec]:
    weight = _vector(f"{name}.weight", config.hidden, fill=1.0)
    return [weight] if config.family == "llama" else [weight, _vector(f"{name}.bias", config.hidden)]


def _embedding(config: GPTConfig) -> list[TensorSpec]:
    std, _ = _deviations(config)
    tensors = [_matrix("tokens", (config.vocab, config.hidden), std)]
    if config.family == "gpt2":
        tensors.append(_matrix("positions", (config.positions, config.hidden), std, split=False))
    return tensors


def _deviations(config: GPTConfig) -> tuple[float, float]:
    """Return the initial standard deviation of matrices, and of those whose product a residual connection adds.

    In gpt2 and llama the latter start smaller by the square root of their number (GPT-2, section 2.3); neox starts as
    published (GPT-NeoX-20B, section 2.1.3).
    """
    if config.family == "neox":
        return (2 / (5 * config.hidden)) ** 0.5, 2 / (config.layers * config.hidden**0.5)
    return 0.02, 0.02 / (2 * config.layers) ** 0.5


def _block(config: GPTConfig) -> list[TensorSpec]:
    std, residual_std = _deviations(config)
    hidden, ffn = config.hidden, config.ffn
    widths = {"q": hidden, "k": config.kv_heads * config.head_dim, "v": config.kv_heads * config.head_dim}
    qkv = [_matrix(f"attention.{n}.weight", (w, hidden), std, "attention.qkv.weight") for n, w in widths.items()]
    out = _matrix("attention.out.weight", (hidden, hidden), residual_std)
    down = _matrix("mlp.down.weight", (ffn, hidden), residual_std)
    norms = [*_norm("norm1", config), *_norm("norm2", config)]
    if config.family == "llama":
        gate_up = [_matrix(f"mlp.{n}.weight", (ffn, hidden), std, "mlp.up.weight") for n in ("gate", "up")]
        return [*qkv, out, *gate_up, down, *norms]
    biases = [
        *(_vector(f"attention.{n}.bias", w, parameter="attention.qkv.bias", split=True) for n, w in widths.items()),
        _vector("attention.out.bias", hidden),
        _vector("mlp.up.bias", ffn, split=True),
        _vector("mlp.down.bias", hidden),
    ]
    return [*qkv, out, _matrix("mlp.up.weight", (ffn, hidden), std), down, *norms, *biases]


def _head(config: GPTConfig) -> list[TensorSpec]:
    norm = _norm("norm", config)
    if config.tie_embeddings:
        return norm
    return [_matrix("weight", (config.vocab, config.hidden), _deviations(config)[0]), *norm]
