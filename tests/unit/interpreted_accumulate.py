"""The kernel that adds gradients to a flat sum in Triton's interpreter, on a CPU.

test_kernels_accumulate_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at
import.
"""

import pytest
import torch
from llmtrain_kernels.accumulate.op import accumulate as reference
from llmtrain_kernels.accumulate.triton_backend import TILE, accumulate
from torch import Tensor

from tests.triton_lab import counted, rounded

# Within a tile, over a border of tiles, a whole tile, and several; some are empty.
SHAPES = [(3,), (0,), (TILE - 5, 1), (7, 9), (TILE,), (2, TILE + 1), (1,)]


def given(dtype: torch.dtype, first: int, gap: int) -> tuple[list[int], list[Tensor], Tensor]:
    """Return starts, gradients, and a flat sum with a gap after each parameter and something behind the last."""
    torch.manual_seed(0)
    starts, place = [], first
    for shape in SHAPES:
        starts.append(place)
        place += torch.Size(shape).numel() + gap
    return starts, [torch.randn(shape).to(dtype) for shape in SHAPES], torch.randn(place + 3)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("first", "gap"), [(0, 0), (16, 16), (3 * TILE + 1, 5)])
def test_equals_reference(
    first: int, gap: int, dtype: torch.dtype, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, gradients, flat = given(dtype, first, gap)
    for wide in (flat, flat.to(dtype)):
        ours, theirs = wide.clone(), wide.clone()
        with rounded(monkeypatch):
            accumulate(ours, starts, gradients, overwrite)
        reference(theirs, starts, gradients, overwrite)
        assert torch.equal(ours, theirs)


def test_nothing_to_add() -> None:
    flat = torch.ones(5)
    accumulate(flat, [], [], True)
    accumulate(flat, [2], [torch.empty(0)], True)
    assert flat.tolist() == [1.0] * 5


def test_bytes_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, gradients, flat = given(torch.bfloat16, 0, 0)
    numel = sum(one.numel() for one in gradients)
    for overwrite, read in ((True, 2), (False, 6)):
        with counted(monkeypatch) as moved:
            accumulate(flat, starts, gradients, overwrite)
        assert (moved.loaded, moved.stored) == (read * numel, 4 * numel)
