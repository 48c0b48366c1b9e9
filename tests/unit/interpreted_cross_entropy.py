"""The Triton kernels of cross-entropy in Triton's interpreter, on a CPU.

test_kernels_cross_entropy_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at
import.
"""

import pytest
import torch
from llmtrain_kernels.cross_entropy import op, triton_backend
from llmtrain_kernels.cross_entropy.partial import ReferenceLosses, TritonLosses
from torch import Tensor

from tests.triton_lab import counted, rounded

# Of fp16 and bf16 half an ulp and, for another exponential, a little more.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
# Within a tile, at its border, across several tiles, and GPT-2's.
vocabularies = pytest.mark.parametrize("vocab", [1, 2, 61, 8192, 8193, 50257])


def given(vocab: int, dtype: torch.dtype, gap: int) -> tuple[Tensor, Tensor]:
    """Return logits whose rows have a gap of NaN between them, and targets at both ends and within."""
    torch.manual_seed(vocab)
    spread = torch.tensor([0.1, 1.0, 8.0])[:, None]
    logits = torch.full((3, vocab + gap), torch.nan, dtype=dtype)[:, :vocab]
    return logits.copy_(torch.randn(3, vocab) * spread), torch.tensor([0, vocab // 2, vocab - 1])


@dtypes
@vocabularies
@pytest.mark.parametrize("gap", [0, 5, 64])
def test_equals_reference(gap: int, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, targets = given(vocab, dtype, gap)
    theirs, before = ours.clone(), ours.clone()
    with rounded(monkeypatch):
        losses = triton_backend.losses(ours, targets, False)
        assert torch.equal(ours, before)
        torch.testing.assert_close(triton_backend.losses(ours, targets, True), losses, rtol=0, atol=0)
    # fp32 rounds the normalizer, which for 50257 ids is about 11.
    torch.testing.assert_close(losses, op._plain_losses(theirs, targets, True), rtol=2e-6, atol=2e-6)
    # A probability near 1 loses digits in the difference to 1.
    torch.testing.assert_close(ours, theirs, rtol=1.02 * TOLERANCE[dtype], atol=2.0**-22)


@pytest.mark.parametrize("vocab", [61, 8193])
def test_a_gap_of_zeros_stays(vocab: int) -> None:
    """Products take it with the rows. All logits are far below 0, so that the exponential of 0 would be infinite."""
    logits = torch.zeros(3, vocab + 64)
    logits[:, :vocab] = torch.randn(3, vocab) - 1000
    triton_backend.losses(logits[:, :vocab], torch.tensor([0, 1, vocab - 1]), True)
    assert not logits[:, vocab:].any()


@dtypes
@pytest.mark.parametrize("vocab", [61, 8193])
def test_shares_of_a_vocabulary(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with uneven shares, one with logits far above the other's, against torch's operations."""
    whole, targets = given(vocab, dtype, 0)
    whole[1, vocab // 3 :] += 30
    cuts, results = [(0, vocab // 3), (vocab // 3, vocab)], []
    for kind in (TritonLosses, ReferenceLosses):
        # With room behind each row, and without.
        parts = [torch.full((3, end - start + 16), torch.nan, dtype=dtype)[:, :-16] for start, end in cuts]
        for part, (start, end) in zip(parts, cuts, strict=True):
            part.copy_(whole[:, start:end])
        with rounded(monkeypatch):
            own = [kind(part, targets - start) for part, (start, _) in zip(parts, cuts, strict=True)]
            tops, sums, wanted = torch.stack([one.statistics for one in own]).unbind(1)
            highest = tops.amax(0)
            normalizer = (sums * (tops - highest).exp()).sum(0)
            for one in own:
                one.write_gradient(highest, normalizer)
        results.append((torch.cat(parts, 1), highest + normalizer.log() - wanted.sum(0)))
    (ours, losses), (theirs, expected) = results
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(ours, theirs, rtol=1.02 * TOLERANCE[dtype], atol=2.0**-22)
    whole_losses = op._plain_losses(whole, targets, True)
    torch.testing.assert_close(losses, whole_losses, rtol=2e-6, atol=2e-6)


def test_numbers_that_are_not_finite() -> None:
    logits = torch.randn(5, 61)
    logits[0, 3], logits[1, 3], logits[2, 3] = torch.nan, torch.inf, -torch.inf
    losses = triton_backend.losses(logits, torch.tensor([0, 0, 0, 61, -1]), True)
    assert losses.isfinite().tolist() == [False, False, True, False, False]
    assert logits[0].isnan().all()
    assert logits[2, 3] == 0


def test_no_rows() -> None:
    assert triton_backend.losses(torch.empty(0, 7), torch.empty(0, dtype=torch.int64), True).shape == (0,)


def test_rows_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="expected stride 1"):
        triton_backend.losses(torch.empty(7, 3).t(), torch.zeros(3, dtype=torch.int64), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_moved(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot keep a row reads it twice and writes it once: nothing above 1.1 of that."""
    logits, targets = given(50257, dtype, 47)
    least = logits.numel() * dtype.itemsize
    for needs_grad, loads, stores in ((False, 1, 0), (True, 2, 1)):
        with counted(monkeypatch) as moved:
            triton_backend.losses(logits, targets, needs_grad)
        assert loads * least <= moved.loaded <= 1.001 * loads * least
        assert stores * least <= moved.stored <= 1.001 * stores * least + 64
    with counted(monkeypatch) as moved:
        TritonLosses(logits, targets).write_gradient(torch.zeros(3), torch.ones(3))
    assert moved.loaded <= 1.001 * 2 * least
    assert moved.stored <= 1.001 * least + 64
