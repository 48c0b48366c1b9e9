"""Gradients of many parameters, added to a flat sum."""

from collections.abc import Sequence

from torch import Tensor

from llmtrain_kernels.triton_launch import takes_triton


def accumulate(flat: Tensor, starts: Sequence[int], gradients: Sequence[Tensor], overwrite: bool) -> None:
    """Add each gradient to the elements of `flat` from its start on, or replace them.

    flat: fp32, bf16 or fp16 `[n]`, contiguous. starts: ascending. gradients: of any shapes and any of these dtypes; no
    two reach the same elements. On GPUs one kernel serves all of them.
    """
    if takes_triton(flat) and all(map(takes_triton, gradients)):
        from llmtrain_kernels.accumulate import triton_backend

        triton_backend.accumulate(flat, [*starts], [one.contiguous() for one in gradients], overwrite)
        return
    for start, gradient in zip(starts, gradients, strict=True):
        view = flat[start : start + gradient.numel()].view(gradient.shape)
        if overwrite:
            view.copy_(gradient)
        else:
            view.add_(gradient)
