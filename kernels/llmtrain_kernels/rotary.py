"""Rotary position embedding (RoFormer, Su et al., 2021, section 3.2)."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` channels of x (`[batch, sequence, heads, head_dim]`); return x's dtype.

    Channel i forms a pair with channel i + rotary_dim / 2. cos, sin: `[sequence, 1, rotary_dim / 2]`, fp32.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
