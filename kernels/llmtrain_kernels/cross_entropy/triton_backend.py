"""Cross-entropy of rows of logits on a GPU, as Triton kernels. The gradient overwrites the logits.

A program processes one row, in tiles. It reads the row once for the largest logit and the sum of exponentials (online
softmax; Milakov and Gimelshein, 2018, section 3). For the gradient it reads the row again, from its end to its start,
so that what it read last comes first. A logit of `b` bytes moves `b` bytes without the gradient and `3 b` with it;
nothing else is proportional to the vocabulary.

All kernels read rows up to the next multiple of 16 logits if the rows are that far apart, and gradients of that gap are
zeros: then every access takes whole vectors, with any vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.operators import fake, operator
from llmtrain_kernels.triton_launch import ceil_div, launch, power_of_2_from

# Logits that a program processes at once.
TILE = 4096
OPTIONS = {"num_warps": 8}


@operator("cross_entropy_rows", writes=("logits",))
def losses(logits: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
    """Return the cross-entropy of each row, fp32 `[rows]`. If `needs_grad`, overwrite the logits with the gradient.

    logits: `[rows, vocab]`, fp32, bf16 or fp16; zeros are written into the gap between rows. targets: int64 `[rows]`.
    The loss of a target outside the vocabulary is NaN: raising an error would wait for the device.
    """
    found = logits.new_empty(len(logits), dtype=torch.float32)
    _launch(_rows, logits, targets.contiguous(), found, needs_grad=needs_grad)
    return found


@fake("cross_entropy_rows")
def _(logits: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


@operator("cross_entropy_statistics")
def statistics(logits: Tensor, targets: Tensor) -> Tensor:
    """Return fp32 `[3, rows]`: each row's largest logit, the sum of `exp(logit - largest)`, and its target's logit.

    targets: int64 `[rows]`; a target outside of the row has the logit 0.
    """
    found = logits.new_empty(3, len(logits), dtype=torch.float32)
    _launch(_statistics, logits, targets.contiguous(), found)
    return found


@fake("cross_entropy_statistics")
def _(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.new_empty(3, len(logits), dtype=torch.float32)


@operator("cross_entropy_gradient", writes=("logits",))
def write_gradient(logits: Tensor, targets: Tensor, top: Tensor, normalizer: Tensor) -> None:
    """Overwrite the logits `[rows, vocab]` with `exp(logits - top) / normalizer - one_hot(targets)`.

    targets: int64 `[rows]`, which may be outside of the row. top, normalizer: fp32 `[rows]`. Zeros are
    written into the gap between rows.
    """
    _launch(_gradient, logits, targets.contiguous(), top.contiguous(), normalizer.contiguous())


@fake("cross_entropy_gradient")
def _(logits: Tensor, targets: Tensor, top: Tensor, normalizer: Tensor) -> None:
    return None


def _launch(kernel: Any, logits: Tensor, *tensors: Tensor, **constants: bool) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    if logits.stride(1) != 1:
        raise ValueError("the logits of a row are not contiguous: expected stride 1 within rows")
    apart, whole = logits.stride(0), ceil_div(vocab, 16) * 16
    end = whole if apart >= whole else vocab
    tile = min(TILE, power_of_2_from(vocab))
    launch(kernel, (rows,), logits, *tensors, apart, end, vocab, tile=tile, **constants, **OPTIONS)


@triton.jit
def _top_and_sum(row: tl.tensor, end: tl.tensor, vocab: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Return the largest logit of a row and the sum of `exp(logit - largest)`."""
    # Each lane has its own, so that tiles need no exchange. The lowest number, and not infinity: their difference would
    # be NaN.
    tops = tl.full([tile], -3.4028234663852886e38, tl.float32)
    sums = tl.zeros([tile], tl.float32)
    for start in range(0, end, tile):
        columns = start + tl.arange(0, tile)
        logits = tl.load(row + columns, columns < end, float("-inf")).to(tl.float32)
        logits = tl.where(columns < vocab, logits, float("-inf"))
        larger = logits > tops
        # One exponential serves both cases: the smaller number is scaled to the larger one.
        scale = tl.exp(-tl.abs(logits - tops))
        sums = tl.where(larger, sums * scale + 1.0, sums + scale)
        tops = tl.where(larger, logits, tops)
    top = tl.max(tops, 0)
    return top, tl.sum(sums * tl.exp(tops - top), 0)


@triton.jit
def _target_logit(row: tl.tensor, target: tl.tensor, vocab: tl.tensor, outside: tl.constexpr) -> tl.tensor:
    inside = (target >= 0) & (target < vocab)
    return tl.where(inside, tl.load(row + tl.where(inside, target, 0)).to(tl.float32), outside)


@triton.jit
def _write_gradient(
    row: tl.tensor, target: tl.tensor, top: tl.tensor, share: tl.tensor, end: tl.tensor, vocab: tl.tensor,
    tile: tl.constexpr,
) -> None:  # fmt: skip
    """Overwrite a row with `exp(logit - top) * share`, less 1 at the target, and the gap behind it with 0."""
    target = target.to(tl.int32)
    tiles = tl.cdiv(end, tile)
    for one in range(tiles):
        columns = (tiles - 1 - one) * tile + tl.arange(0, tile)
        logits = tl.load(row + columns, columns < end, float("-inf"), eviction_policy="evict_first").to(tl.float32)
        gradient = tl.exp(logits - top) * share
        gradient = tl.where(columns == target, gradient - 1.0, gradient)
        tl.store(row + columns, gradient.to(row.dtype.element_ty), columns < end)
    # Other threads may have written the gap.
    tl.debug_barrier()
    gap = vocab + tl.arange(0, 16)
    tl.store(row + gap, tl.zeros([16], row.dtype.element_ty), gap < end)


@triton.jit
def _rows(
    logits: tl.tensor, targets: tl.tensor, losses: tl.tensor, apart: tl.tensor, end: tl.tensor, vocab: tl.tensor,
    tile: tl.constexpr, needs_grad: tl.constexpr,
) -> None:  # fmt: skip
    one = tl.program_id(0)
    row = logits + one.to(tl.int64) * apart
    target = tl.load(targets + one)
    wanted = _target_logit(row, target, vocab, float("nan"))
    top, total = _top_and_sum(row, end, vocab, tile)
    tl.store(losses + one, top + tl.log(total) - wanted)
    if needs_grad:
        # All threads have read the target's logit before one overwrites it.
        tl.debug_barrier()
        _write_gradient(row, target, top, 1.0 / total, end, vocab, tile)


@triton.jit
def _statistics(
    logits: tl.tensor, targets: tl.tensor, found: tl.tensor, apart: tl.tensor, end: tl.tensor, vocab: tl.tensor,
    tile: tl.constexpr,
) -> None:  # fmt: skip
    one, rows = tl.program_id(0), tl.num_programs(0)
    row = logits + one.to(tl.int64) * apart
    top, total = _top_and_sum(row, end, vocab, tile)
    tl.store(found + one, top)
    tl.store(found + rows + one, total)
    tl.store(found + 2 * rows + one, _target_logit(row, tl.load(targets + one), vocab, 0.0))


@triton.jit
def _gradient(
    logits: tl.tensor, targets: tl.tensor, tops: tl.tensor, normalizers: tl.tensor, apart: tl.tensor, end: tl.tensor,
    vocab: tl.tensor, tile: tl.constexpr,
) -> None:  # fmt: skip
    one = tl.program_id(0)
    row = logits + one.to(tl.int64) * apart
    target = tl.load(targets + one)
    target = tl.where(target < vocab, target, -1)
    share = 1.0 / tl.load(normalizers + one)
    _write_gradient(row, target, tl.load(tops + one), share, end, vocab, tile)
