"""AdamW's Triton kernel in Triton's interpreter, on a CPU: bits equal the reference's, wherever a range is cut.

test_kernels_adamw_triton.py runs this file in a separate process, because TRITON_INTERPRET takes effect at import.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, pairwise

import pytest
import torch
from llmtrain_kernels.adamw import reference
from llmtrain_kernels.adamw.op import Decay, adamw
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.adamw.triton_backend import TILE

from tests.adamw_states import CLIPPED, PLAIN, assert_same_bits, clones, cut, states
from tests.triton_lab import counted, rounded

# Within a tile, at its border, and several tiles with a rest.
SIZES = (0, 1, 7, 33, TILE - 1, TILE, TILE + 1, 3 * TILE + 37)
WEIGHTS = (None, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with rounded(monkeypatch):
        yield


@pytest.fixture(params=["device", "host"])
def decided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the divisor is. The kernel takes one of the host as a number."""
    if request.param == "host":
        monkeypatch.setattr(AdamWStep, "decided_on", lambda self, device: None)


@pytest.mark.usefixtures("decided")
@pytest.mark.parametrize("numbers", [CLIPPED, PLAIN, replace(CLIPPED, weight_decay=0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_reference(dtype: torch.dtype, numbers: AdamWStep) -> None:
    for numel, weight_dtype in zip(SIZES + SIZES[-3:], cycle(WEIGHTS), strict=False):
        ours, gradient = states(numel)
        gradient, theirs = gradient.clamp(-6e4, 6e4).to(dtype), clones(ours)
        weight = None if weight_dtype is None else torch.full((numel,), 77, dtype=weight_dtype)
        before = gradient.clone()
        adamw("triton", *ours, gradient, numbers, weight)
        reference.step(*theirs, gradient.float(), numbers)
        assert_same_bits(ours, theirs)
        assert torch.equal(gradient, before)
        if weight is not None:
            assert torch.equal(weight, theirs[0].to(weight_dtype))


def random_decay(numel: int, parts: int, seed: int) -> list[Decay]:
    draw = random.Random(seed)
    places = [0, *sorted(draw.sample(range(1, numel), parts - 1)), numel]
    return [(start, end, draw.random() < 0.5) for start, end in pairwise(places)]


@pytest.mark.parametrize("parts", [1, 2, 5, 9, 40])
def test_ranges_without_decay(parts: int) -> None:
    """One launch gives the bits of a step of each range."""
    numel = 3 * TILE + 37
    for seed in range(2):
        ours, gradient = states(numel)
        decay = random_decay(numel, parts, seed)
        theirs, weights = clones(ours), torch.zeros(2, numel, dtype=torch.bfloat16)
        adamw("triton", *ours, gradient, CLIPPED, weights[0], decay=decay)
        adamw("reference", *theirs, gradient, CLIPPED, weights[1], decay=decay)
        assert_same_bits(ours, theirs)
        assert torch.equal(*weights)


def test_cuts_do_not_change_a_bit() -> None:
    numel = 6 * TILE + 5
    start, gradient = states(numel)
    results = []
    for cuts in ([], [TILE], [1, 2, 3, 777, 3 * TILE + 1, numel - 1]):
        ours, weight = clones(start), torch.zeros(numel, dtype=torch.bfloat16)
        for first, last in pairwise([0, *cuts, numel]):
            own = slice(first, last)
            adamw("triton", *cut(ours, own), gradient[own], CLIPPED, weight[own])
        results.append([*ours, weight])
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_states_go_elsewhere() -> None:
    """The old states stay, and the new ones have the bits that a step in place gives."""
    start, gradient = states(2 * TILE + 9)
    inside, before = clones(start), clones(start)
    adamw("triton", *inside, gradient, CLIPPED)
    after = clones(start)
    for each in after:
        each.fill_(7)
    adamw("triton", *start, gradient, CLIPPED, into=after)
    assert_same_bits(start, before)
    assert_same_bits(after, inside)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e38])
def test_gradients_that_are_not_finite(bad: float) -> None:
    """They change their own element alone, and as in the reference. The square of 1e38 overflows."""
    ours, gradient = states(1500)
    theirs = clones(ours)
    gradient[[0, 15, 500, 1499]] = bad
    weight = torch.zeros(1500, dtype=torch.bfloat16)
    for numbers in (CLIPPED, replace(CLIPPED, step=4)):
        adamw("triton", *ours, gradient, numbers, weight)
        reference.step(*theirs, gradient, numbers)
        for one, other in zip([*ours, weight], [*theirs, theirs[0].bfloat16()], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert int((~ours[2].isfinite()).sum()) == 4


def test_a_step_without_a_divisor_is_skipped() -> None:
    """States stay, whatever the gradients are, and weights are what they are masters of."""
    ours, gradient = states(2 * TILE + 9)
    before, gradient[::7] = clones(ours), torch.nan
    weight = torch.full((len(gradient),), 7, dtype=torch.bfloat16)
    adamw("triton", *ours, gradient, replace(CLIPPED, gradient_divisor=torch.tensor(torch.nan)), weight)
    assert_same_bits([*ours, weight], [*before, before[0].bfloat16()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_moved(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three states and the gradient are read, three states and the weight written: 28 bytes and the weight's. Each
    program reads the divisor."""
    numel = 8 * TILE + 3
    ours, gradient = states(numel)
    with counted(monkeypatch) as moved:
        adamw("triton", *ours, gradient, CLIPPED, torch.zeros(numel, dtype=dtype), decay=random_decay(numel, 7, 0))
    assert moved.stored == numel * (12 + dtype.itemsize)
    assert moved.loaded == numel * 16 + 4 * 9
