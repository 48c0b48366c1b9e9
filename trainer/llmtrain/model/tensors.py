"""Every model state as flat units of canonical one-dimensional ranges. No torch in here.

A unit (embedding, one block, head) is one flat buffer: its canonical tensors lie back to back, matrices first and
vectors after them, so that weight decay covers one range. Every matrix is stored so that a slice for
tensor parallelism is a contiguous range: column-parallel ones output-major `[out, in]`, row-parallel ones
input-major `[in, out]`. Tensors that one product reads together (Q, K and V; gate and up) lie next to each
other, so the module sees them as one parameter while files know each by its own name.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from llmtrain.model.config import GPTConfig


@dataclass(frozen=True)
class TensorSpec:
    """One canonical tensor.

    name: its name in checkpoints. parameter: the module parameter that shows it, relative to the unit's
    module; neighbours with the same parameter are stacked along dim 0. std: of the normal initialisation;
    None fills with `fill`. decay: whether weight decay applies.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    decay: bool
    std: float | None = None
    fill: float = 0.0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class UnitSpec:
    """One flat buffer: canonical tensors back to back."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each tensor, and the end of the last."""
        return tuple(accumulate((tensor.numel for tensor in self.tensors), initial=0))

    @property
    def numel(self) -> int:
        """Number of elements of the whole unit."""
        return self.offsets[-1]

    @property
    def decayed(self) -> int:
        """Length of the prefix that weight decay applies to."""
        return sum(tensor.numel for tensor in self.tensors if tensor.decay)

    def pieces(self, start: int, end: int) -> list[tuple[TensorSpec, int, int]]:
        """Return (tensor, first, last) for what `[start, end)` of the unit holds of each tensor, in order."""
        index = bisect_right(self.offsets, start) - 1
        found = []
        while start < end:
            tensor, offset = self.tensors[index], self.offsets[index]
            stop = min(end, offset + tensor.numel)
            if stop > start:
                found.append((tensor, start - offset, stop - offset))
            start, index = stop, index + 1
        return found


def model_units(config: GPTConfig) -> list[UnitSpec]:
    """Return the model's units in the order of the forward pass: embedding, blocks, head."""
    blocks = [_unit(f"blocks.{index}", _block(config)) for index in range(config.layers)]
    return [_unit("embedding", _embedding(config)), *blocks, _unit("head", _head(config))]


def parameter_count(config: GPTConfig) -> int:
    """Number of trained parameters; tied ones count once."""
    return sum(unit.numel for unit in model_units(config))


def _unit(name: str, tensors: list[TensorSpec]) -> UnitSpec:
    ordered = sorted(tensors, key=lambda tensor: not tensor.decay)
    return UnitSpec(name, tuple(_named(name, tensor) for tensor in ordered))


def _named(unit: str, tensor: TensorSpec) -> TensorSpec:
    return TensorSpec(f"{unit}.{tensor.name}", tensor.parameter, tensor.shape, tensor.decay, tensor.std, tensor.fill)


def _matrix(name: str, shape: tuple[int, int], std: float, parameter: str | None = None) -> TensorSpec:
    return TensorSpec(name, parameter or name, shape, decay=True, std=std)


def _vector(name: str, size: int, fill: float = 0.0, parameter: str | None = None) -> TensorSpec:
    return TensorSpec(name, parameter or name, (size,), decay=False, fill=fill)


def _norm(name: str, config: GPTConfig) -> list[TensorSpec]:
    weight = _vector(f"{name}.weight", config.hidden, fill=1.0)
    return [weight] if config.family == "llama" else [weight, _vector(f"{name}.bias", config.hidden)]


def _embedding(config: GPTConfig) -> list[TensorSpec]:
    tensors = [_matrix("tokens", (config.vocab, config.hidden), std=0.02)]
    if config.family == "gpt2":
        tensors.append(_matrix("positions", (config.positions, config.hidden), std=0.02))
    return tensors


def _block(config: GPTConfig) -> list[TensorSpec]:
    # Residual projections start smaller by the square root of their number (GPT-2, section 2.3).
    std, residual_std = 0.02, 0.02 / (2 * config.layers) ** 0.5
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
        *(_vector(f"attention.{n}.bias", w, parameter="attention.qkv.bias") for n, w in widths.items()),
        _vector("attention.out.bias", hidden),
        _vector("mlp.up.bias", ffn),
        _vector("mlp.down.bias", hidden),
    ]
    return [*qkv, out, _matrix("mlp.up.weight", (ffn, hidden), std), down, *norms, *biases]


def _head(config: GPTConfig) -> list[TensorSpec]:
    norm = _norm("norm", config)
    if config.tie_embeddings:
        return norm
    return [_matrix("weight", (config.vocab, config.hidden), std=0.02), *norm]
