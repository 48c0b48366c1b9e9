"""AdamW on the CPU: bits equal the reference's, wherever a range is cut, with any threads and any instruction set."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from llmtrain_kernels.adamw import cpu, reference
from llmtrain_kernels.adamw.op import adamw
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.native import native_reason
from llmtrain_kernels.squared_sum.op import SQUARES_BLOCK, squared_sum
from torch import Tensor

from tests.adamw_states import CLIPPED, PLAIN, assert_same_bits, clones, cut, states

WEIGHTS = (None, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("numbers", [CLIPPED, PLAIN, replace(CLIPPED, weight_decay=0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lanes", cpu.LANES)
def test_equals_reference(lanes: int, dtype: torch.dtype, numbers: AdamWStep) -> None:
    assert native_reason(("adamw",)) is None
    for numel in (0, 1, 7, 16, 33, SQUARES_BLOCK, 70_001):
        for number, weight_dtype in enumerate(WEIGHTS):
            ours, gradient = states(numel)
            gradient, theirs = gradient.to(dtype), clones(ours)
            weight = None if weight_dtype is None else torch.full((numel,), 77, dtype=weight_dtype)
            squares, before = torch.zeros((), dtype=torch.float64), gradient.clone()
            cpu.step(*ours, gradient, numbers, weight, offset=37 * number, squares=squares, lanes=lanes)
            reference.step(*theirs, gradient.float(), numbers)
            assert_same_bits(ours, theirs)
            assert torch.equal(gradient, before)
            assert torch.equal(squares, squared_sum(gradient.float(), 37 * number))
            if weight is not None:
                assert torch.equal(weight, theirs[0].to(weight_dtype))


@pytest.mark.parametrize("lanes", cpu.LANES)
def test_cuts_and_threads_do_not_change_a_bit(lanes: int) -> None:
    numel = 200_003
    start, gradient = states(numel)
    places = [0, *sorted(random.Random(lanes).sample(range(1, numel), 1000)), numel]
    pieces = [slice(*ends) for ends in pairwise(places)]
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for ranges in ([slice(0, numel)], [slice(0, places[500]), slice(places[500], numel)], pieces):
            ours, weight = clones(start), torch.zeros(numel, dtype=torch.bfloat16)
            for one in ranges:
                cpu.step(*cut(ours, one), gradient[one], CLIPPED, weight[one], lanes=lanes)
            results.append([*ours, weight])
    for result in results[1:]:
        assert_same_bits(result, results[0])
    reference.step(*start, gradient, CLIPPED)
    assert_same_bits(results[0], [*start, start[0].bfloat16()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lanes", cpu.LANES)
def test_large_ranges(lanes: int, dtype: torch.dtype) -> None:
    """Their weights are written past the caches, except before the first aligned block and after the last whole one."""
    start, gradient = states((1 << 20) + 3 * SQUARES_BLOCK + 37)
    first = 32 * 7
    for threads in (1, 3):
        torch.set_num_threads(threads)
        ours, weight = clones(start), torch.zeros(len(gradient), dtype=dtype)
        own = slice(first, None)
        cpu.step(*cut(ours, own), gradient[own], CLIPPED, weight[first:], offset=first, lanes=lanes)
        theirs = clones(start)
        reference.step(*cut(theirs, own), gradient[own], CLIPPED)
        assert_same_bits(ours, theirs)
        assert torch.equal(weight[first:], theirs[0][first:].to(dtype))
        assert not weight[:first].any()


@pytest.mark.parametrize("lanes", cpu.LANES)
def test_squares_do_not_depend_on_threads(lanes: int) -> None:
    ours, gradient = states(200_003)
    expected = squared_sum(gradient, 96)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        squares = torch.zeros((), dtype=torch.float64)
        cpu.step(*ours, gradient, CLIPPED, offset=96, squares=squares, lanes=lanes)
        assert torch.equal(squares, expected)


def ulp(x: Tensor) -> Tensor:
    """Return the distance to the next larger fp32 number."""
    x = x.abs().float()
    return (torch.nextafter(x, torch.full_like(x, torch.inf)) - x).double()


@pytest.mark.parametrize("numbers", [CLIPPED, PLAIN, replace(PLAIN, step=1, lr=0.1, weight_decay=0.3)])
def test_near_fp64(numbers: AdamWStep) -> None:
    """Results are within 2 ulp of the largest operand. Masters are 30 times their updates, as in training."""
    (master, m, v), gradient = states(200_003)
    master = 30 * numbers.lr * (master + master.sign())
    old, old_m, old_v, g = (each.double() for each in (master, m, v, gradient))
    g = g / (1.0 if numbers.gradient_divisor is None else float(numbers.gradient_divisor))
    new_m = numbers.beta1 * old_m + (1 - numbers.beta1) * g
    new_v = numbers.beta2 * old_v + (1 - numbers.beta2) * g.square()
    root = (new_v / (1 - numbers.beta2**numbers.step)).sqrt()
    update = numbers.lr * new_m / (1 - numbers.beta1**numbers.step) / (root + numbers.eps)
    new = old * (1 - numbers.lr * numbers.weight_decay) - update
    cpu.step(master, m, v, gradient, numbers)
    assert ((master - new).abs() <= 2 * ulp(old)).all()
    assert ((m - new_m).abs() <= 2 * ulp(torch.maximum(old_m.abs(), g.abs()))).all()
    assert ((v - new_v).abs() <= 2 * ulp(torch.maximum(old_v, g.square()))).all()


@pytest.mark.parametrize("lanes", cpu.LANES)
def test_weights_round_to_nearest_even(lanes: int) -> None:
    """Every bf16 number, and fp32 numbers at and beside the middle between it and the next one."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    master = torch.cat([(upper + low).view(torch.float32) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    weight, zeros = torch.zeros(len(master), dtype=torch.bfloat16), torch.zeros(len(master))
    cpu.step(master.clone(), zeros, zeros.clone(), zeros.clone(), replace(PLAIN, lr=0.0), weight, lanes=lanes)
    torch.testing.assert_close(weight, master.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lanes", cpu.LANES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1e38])
def test_gradients_that_are_not_finite(bad: float, lanes: int) -> None:
    """They change their own element alone, and as in the reference. The square of 1e38 overflows."""
    ours, gradient = states(1000)
    theirs = clones(ours)
    gradient[[0, 15, 500, 999]] = bad
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    for numbers in (CLIPPED, replace(CLIPPED, step=4)):
        cpu.step(*ours, gradient, numbers, weight, lanes=lanes)
        reference.step(*theirs, gradient, numbers)
        for one, other in zip([*ours, weight], [*theirs, theirs[0].bfloat16()], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert int((~ours[2].isfinite()).sum()) == 4


@pytest.mark.parametrize("lanes", cpu.LANES)
def test_padding_stays_zero(lanes: int) -> None:
    ours, weight = (torch.zeros(100), torch.zeros(100), torch.zeros(100)), torch.ones(100, dtype=torch.bfloat16)
    for step in (1, 2, 100_000):
        cpu.step(*ours, torch.zeros(100), replace(CLIPPED, step=step), weight, lanes=lanes)
    assert not any(each.any() for each in (*ours, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_without_a_compiler(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for kernel in (cpu._kernel, lambda: None):
        monkeypatch.setattr(cpu, "_kernel", kernel)
        ours, gradient = states(1000)
        weight, squares = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros((), dtype=torch.float64)
        cpu.step(*ours, gradient.to(dtype), CLIPPED, weight, offset=5, squares=squares)
        results.append([*ours, weight, squares.view(1)])
    assert_same_bits(*results)


def test_torch_skips_a_step_without_a_divisor() -> None:
    """The divisor is on the device of the states, here a CPU."""
    ours, gradient = states(1000)
    before, gradient[::7] = clones(ours), torch.nan
    weight = torch.full((1000,), 7, dtype=torch.bfloat16)
    adamw("torch", *ours, gradient, replace(CLIPPED, gradient_divisor=torch.tensor(torch.nan)), weight)
    assert_same_bits([*ours, weight], [*before, before[0].bfloat16()])


@pytest.mark.parametrize("weight_dtype", WEIGHTS[1:])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_backends_write_weights(backend: str, weight_dtype: torch.dtype) -> None:
    ours, gradient = states(100)
    before, weight = ours[0].clone(), torch.zeros(100, dtype=weight_dtype)
    adamw(backend, *ours, gradient, CLIPPED, weight)
    assert not torch.equal(ours[0], before)
    assert torch.equal(weight, ours[0].to(weight_dtype))


# What more than 2**20 elements write elsewhere goes past the caches.
@pytest.mark.parametrize("numel", [100, 70_001, 2**20 + 77])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_states_go_elsewhere(backend: str, numel: int) -> None:
    """The old states stay, and the new ones have the bits that a step in place gives."""
    start, gradient = states(numel)
    inside, before = clones(start), clones(start)
    weights = torch.zeros(2, numel, dtype=torch.bfloat16)
    adamw(backend, *inside, gradient.clone(), CLIPPED, weights[0])
    after = clones(start)
    for each in after:
        each.fill_(7)
    adamw(backend, *start, gradient.clone(), CLIPPED, weights[1], into=after, threads=1)
    assert_same_bits(start, before)
    assert_same_bits(after, inside)
    assert torch.equal(*weights)
