"""AdamW on a GPU, as one Triton kernel, whose results equal those of `reference.py` bit for bit.

A program steps one tile of the flat range. It reads each state and the gradient once, and writes each state and the
weight once: 30 bytes per element with an fp32 gradient and a 16-bit weight.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from llmtrain_kernels.adamw.step import AdamWStep, factors
from llmtrain_kernels.operators import fake, operator
from llmtrain_kernels.triton_launch import ceil_div, launch

TILE = 1024
# No fused multiply-add: products and sums round separately, as in the reference.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
# Triton compiles a kernel again for another number of places, and for integers of another width or with another
# divisibility by 16. So places are padded to a multiple of PLACES, and each is passed as FIRST + 16 * offset, which is
# always a 64-bit multiple of 16.
PLACES, FIRST = 4, 1 << 40


def step(
    before: Sequence[Tensor], after: Sequence[Tensor], gradient: Tensor, numbers: AdamWStep,
    weight: Tensor | None, changes: Sequence[int],
) -> None:  # fmt: skip
    """Write the new `master`, `m` and `v`, each fp32 `[n]`, to `after`, which may be the old ones in `before`.

    gradient: fp32, bf16 or fp16 `[n]`, read only. weight: of any of these dtypes, `[n]`, which receives the new
    masters. changes: the elements, ascending, at which weight decay switches on or off.
    """
    given = numbers.decided_on(gradient.device)
    # One of the host is an argument of the launch. Division by 1 changes no bit.
    divisor = 1.0 if given is not None or numbers.gradient_divisor is None else float(numbers.gradient_divisor)
    _step([*before], [*after], gradient, weight, given, [divisor, *factors(numbers)], [*changes])


@operator("adamw", writes=("after", "weight"))
def _step(
    before: list[Tensor], after: list[Tensor], gradient: Tensor, weight: Tensor | None, given: Tensor | None,
    shares: list[float], changes: list[int],
) -> None:  # fmt: skip
    numel = gradient.numel()
    if not numel:
        return
    places = tuple(FIRST + 16 * offset for offset in (*changes, *[numel] * (-len(changes) % PLACES)))
    launch(
        _adamw, (ceil_div(numel, TILE),), *before, *after, gradient, weight, given, *shares, numel, places, first=FIRST,
        tile=TILE, **OPTIONS,
    )  # fmt: skip


@fake("adamw")
def _(
    before: list[Tensor], after: list[Tensor], gradient: Tensor, weight: Tensor | None, given: Tensor | None,
    shares: list[float], changes: list[int],
) -> None:  # fmt: skip
    return None


@triton.jit
def _kept(
    start: tl.tensor, kept: tl.tensor, places: tl.tuple, first: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return what weight decay leaves of each weight of a tile."""
    lanes, decays = tl.arange(0, tile), tl.zeros([tile], tl.int1)
    for one in tl.static_range(len(places)):
        within = (places[one] - first) // 16 - start
        decays = decays ^ (lanes >= tl.minimum(tl.maximum(within, 0), tile).to(tl.int32))
    return tl.where(decays, kept, 1.0)


@triton.jit
def _tile(
    master: tl.tensor, m: tl.tensor, v: tl.tensor, new_master: tl.tensor, new_m: tl.tensor, new_v: tl.tensor,
    gradient: tl.tensor, weight: tl.tensor, divisor: tl.tensor, m_share: tl.tensor, v_share: tl.tensor,
    v_kept: tl.tensor, eps: tl.tensor, rate: tl.tensor, kept: tl.tensor, mask: tl.tensor, at: tl.tensor,
) -> None:  # fmt: skip
    g = tl.div_rn(tl.load(gradient + at, mask, eviction_policy="evict_first").to(tl.float32), divisor)
    old = tl.load(m + at, mask, eviction_policy="evict_first")
    moment = old + (g - old) * m_share
    square = tl.load(v + at, mask, eviction_policy="evict_first") * v_kept + g * v_share * g
    update = tl.div_rn(moment, tl.sqrt_rn(square) + eps) * rate
    value = tl.load(master + at, mask, eviction_policy="evict_first") * kept - update
    tl.store(new_m + at, moment, mask)
    tl.store(new_v + at, square, mask)
    tl.store(new_master + at, value, mask)
    if weight is not None:
        tl.store(weight + at, value.to(weight.dtype.element_ty), mask)


@triton.jit
def _keep(
    master: tl.tensor, m: tl.tensor, v: tl.tensor, new_master: tl.tensor, new_m: tl.tensor, new_v: tl.tensor,
    weight: tl.tensor, mask: tl.tensor, at: tl.tensor,
) -> None:  # fmt: skip
    value = tl.load(master + at, mask)
    tl.store(new_m + at, tl.load(m + at, mask), mask)
    tl.store(new_v + at, tl.load(v + at, mask), mask)
    tl.store(new_master + at, value, mask)
    if weight is not None:
        tl.store(weight + at, value.to(weight.dtype.element_ty), mask)


@triton.jit
def _adamw(
    master: tl.tensor, m: tl.tensor, v: tl.tensor, new_master: tl.tensor, new_m: tl.tensor, new_v: tl.tensor,
    gradient: tl.tensor, weight: tl.tensor, given: tl.tensor, divisor: tl.tensor, m_share: tl.tensor,
    v_share: tl.tensor, v_kept: tl.tensor, eps: tl.tensor, rate: tl.tensor, kept: tl.tensor, numel: tl.tensor,
    places: tl.tuple, first: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * tile
    # All accesses take four elements, so that 16-bit weights need no exchange between threads.
    at, share = start + tl.max_contiguous(tl.arange(0, tile), 4), _kept(start, kept, places, first, tile)
    if given is not None:
        divisor = tl.load(given)
    # A step that is skipped has no divisor.
    if divisor != divisor:
        _keep(master, m, v, new_master, new_m, new_v, weight, at < numel, at)
    # Without a mask, accesses take whole vectors, with any number of elements.
    elif start + tile <= numel:
        _tile(
            master, m, v, new_master, new_m, new_v, gradient, weight, divisor, m_share, v_share, v_kept, eps, rate,
            share, None, at,
        )  # fmt: skip
    else:
        _tile(
            master, m, v, new_master, new_m, new_v, gradient, weight, divisor, m_share, v_share, v_kept, eps, rate,
            share, at < numel, at,
        )  # fmt: skip
