"""The layers of the model. Parameters are created on the meta device; the flat units give them storage."""

import math

import torch
import torch.nn.functional as F
from llmtrain_kernels.activation.op import activate
from llmtrain_kernels.attention.choice import Kernel
from llmtrain_kernels.attention.op import joint_attention
from llmtrain_kernels.cross_entropy.op import linear_cross_entropy
from llmtrain_kernels.matmul import linear
from llmtrain_kernels.norm.op import residual_norm
from llmtrain_kernels.triton_launch import takes_triton
from torch import Tensor, nn

from llmtrain.model.config import GPTConfig, RopeScaling


def empty_parameter(*shape: int) -> nn.Parameter:
    """Return a parameter with a shape and no storage."""
    return nn.Parameter(torch.empty(shape, device="meta"))


class Linear(nn.Module):
    """Affine map with an output-major weight `[out, in]`, whose rows a column-parallel slice takes."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(outputs, inputs)
        self.bias = empty_parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return linear(x, self.weight, self.bias)


class InputMajorLinear(nn.Module):
    """Affine map with an input-major weight `[in, out]`, whose rows a row-parallel slice takes."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(inputs, outputs)
        self.bias = empty_parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return linear(x, self.weight.t(), self.bias)


def leaving_bias(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return `layer(x)`, and the bias whose gradient is left to the next operator: on a GPU its kernel sums the
    gradient while it writes it. The bias is None where the layer computes the gradient itself."""
    if isinstance(layer, Linear) and layer.bias is not None and takes_triton(x):
        return linear(x, layer.weight, layer.bias.detach()), layer.bias
    return layer(x), None


class Norm(nn.Module):
    """LayerNorm (gpt2, neox) or RMSNorm (llama) over the last dimension."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = empty_parameter(config.hidden)
        self.bias = None if config.family == "llama" else empty_parameter(config.hidden)

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the residual sum `x + added` (x without the latter) and its norm, each `[..., hidden]`."""
        return residual_norm(x, added, self.weight, self.bias, self.eps)


def rotary_tables(config: GPTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each fp32 `[positions, 1, rotary_dim / 2]` (RoFormer, section 3.2)."""
    channels = torch.arange(0, config.rotary_dim, 2, device=device, dtype=torch.float32)
    frequencies = _scaled(config.rope_theta ** (-channels / config.rotary_dim), config.rope_scaling)
    positions = torch.arange(config.positions, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).unsqueeze(1)
    return angles.cos(), angles.sin()


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Return frequencies, radians per position, for longer sequences (Llama 3.1; see `RopeScaling`)."""
    if scaling is None:
        return frequencies
    turns = frequencies * (scaling.original_positions / (2 * math.pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Attention(nn.Module):
    """Causal self-attention; Q, K and V come from one product. kernel: what computes it on GPUs."""

    kernel: Kernel = "torch"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.dropout = config.dropout
        bias = config.family != "llama"
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = Linear(config.hidden, width, bias)
        self.out = InputMajorLinear(config.hidden, config.hidden, bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map `[batch, sequence, hidden]` to the same shape."""
        qkv, bias = leaving_bias(self.qkv, x) if rotary is None else (self.qkv(x), None)
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        mixed = joint_attention(heads, self.heads, rotary, self.dropout if self.training else 0.0, bias, self.kernel)
        return self.out(mixed.flatten(2))


class MLP(nn.Module):
    """Two products with a nonlinearity between: GELU, exact or in its tanh form, or SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        gated, bias = config.activation == "swiglu", config.family != "llama"
        self.up = Linear(config.hidden, config.ffn * (2 if gated else 1), bias)
        self.down = InputMajorLinear(config.ffn, config.hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden]` to the same shape."""
        up, bias = leaving_bias(self.up, x)
        return self.down(activate(up, self.activation, bias))


class Block(nn.Module):
    """One transformer block; neox adds attention and MLP in parallel, the others one after the other."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.parallel = config.family == "neox"
        self.norm1, self.attention = Norm(config), Attention(config)
        self.norm2, self.mlp = Norm(config), MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map `[batch, sequence, hidden]` to the same shape."""
        x, normal = self.norm1(x)
        attended = self.dropout(self.attention(normal, rotary))
        if self.parallel:
            x, normal = self.norm2(x)
            return x + attended + self.dropout(self.mlp(normal))
        x, normal = self.norm2(x, attended)
        return x + self.dropout(self.mlp(normal))


class Embedding(nn.Module):
    """Token embedding, with learned positions in gpt2."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = empty_parameter(config.vocab, config.hidden)
        self.positions = empty_parameter(config.positions, config.hidden) if config.family == "gpt2" else None
        self.dropout = nn.Dropout(0.0 if config.family == "llama" else config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, sequence]` to `[batch, sequence, hidden]`."""
        x = F.embedding(tokens, self.tokens)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        return self.dropout(x)


class Head(nn.Module):
    """Final norm and, unless it is tied to the embedding, the output matrix `[vocab, hidden]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.weight = None if config.tie_embeddings else empty_parameter(config.vocab, config.hidden)

    def forward(self, x: Tensor, embedding: Tensor | None, targets: Tensor | None) -> Tensor:
        """Map `[batch, sequence, hidden]` to logits, or to the mean loss of `targets`. embedding: the tied matrix."""
        (_, x), weight = self.norm(x), embedding if self.weight is None else self.weight
        assert weight is not None
        if targets is None:
            return linear(x, weight)
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
