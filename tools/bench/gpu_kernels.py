"""Rates of the kernels on one GPU: those that move memory against a copy, products and attention against a large
product.

    python -m tools.bench.gpu_kernels [--elements N] [--write docs/benchmarks.md]

Bytes are the least that a kernel has to read and write. On a machine without a GPU it rehearses with the CPU's kernels.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from llmtrain.comm.device import device_name, device_of, is_cpu, synchronize
from llmtrain_kernels.accumulate.op import accumulate
from llmtrain_kernels.activation.op import activate
from llmtrain_kernels.adamw.op import adamw
from llmtrain_kernels.adamw.step import AdamWStep
from llmtrain_kernels.attention.op import causal_attention, take_kernel
from llmtrain_kernels.cross_entropy.op import add_product, linear_cross_entropy
from llmtrain_kernels.norm.op import residual_norm
from llmtrain_kernels.quantize.op import dequantize, quantize
from llmtrain_kernels.quantize.packed_size import packed_bytes
from llmtrain_kernels.rotary.op import rotated
from llmtrain_kernels.squared_sum.op import squared_sum
from torch import Tensor

from tools.bench.table import machine, table, write_section

WARM_UP, REPEATS, SAMPLES = 3, 5, 5
WIDTH, HEADS, CHANNELS, SEQUENCE, VOCAB, BLOCK = 2048, 16, 128, 2048, 50304, 256
DTYPE = torch.bfloat16
HEADER = ("kernel", "ms", "noise", "TB/s", "of a copy", "TFLOP/s", "of a product")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel to time. nbytes: the least that it moves. flops: of its products. Only one of both counts."""

    name: str
    call: Callable[[], object]
    nbytes: float = 0.0
    flops: float = 0.0


class Given:
    """Makes inputs of about `elements` elements on a device."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.device, self.rows = device, max(SEQUENCE, elements // WIDTH // SEQUENCE * SEQUENCE)
        self.elements = self.rows * WIDTH

    def normal(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        """Return random numbers."""
        return torch.randn(shape, device=self.device).to(dtype)


def kernels(given: Given) -> Iterator[Kernel]:
    """Yield the kernels. The first one is the copy, and the second one the product, that others are compared with."""
    x, n = given.normal(given.rows, WIDTH), given.elements
    to = torch.empty_like(x)
    yield Kernel(name="copy, bf16", call=lambda: to.copy_(x), nbytes=4 * n)
    a = given.normal(WIDTH, WIDTH)
    yield Kernel(name="product", call=lambda: x @ a, flops=2 * n * WIDTH)
    yield from _of_blocks(given, x)
    yield from _of_steps(given, x)
    yield from _of_products(given, x)


def _of_blocks(given: Given, x: Tensor) -> Iterator[Kernel]:
    """Yield kernels of the blocks, each with its backward pass."""
    n, weight, bias = given.elements, torch.ones(WIDTH, dtype=DTYPE, device=given.device), given.normal(WIDTH)
    added, grad = given.normal(*x.shape), given.normal(*x.shape)
    for name, shift in (("RMSNorm", []), ("LayerNorm", [bias])):
        inputs = [one.detach().requires_grad_() for one in (x, added, weight, *shift)]
        forward = partial(_norm, inputs)
        yield Kernel(name=f"{name} with the residual", call=forward, nbytes=8 * n)
        # It reads the sum and two gradients, and writes one.
        backward = partial(torch.autograd.grad, forward(), inputs, (grad, grad), retain_graph=True)
        yield Kernel(name=f"{name}, backward", call=backward, nbytes=8 * n)
    yield Kernel(name="GELU", call=lambda: activate(x, "gelu"), nbytes=4 * n)
    wide = given.normal(given.rows // 2, 2 * WIDTH).requires_grad_()
    yield Kernel(name="SwiGLU", call=lambda: activate(wide, "swiglu"), nbytes=3 * n)
    out = activate(wide, "swiglu")
    half = grad[: len(out)]
    yield Kernel(
        name="SwiGLU, backward",
        call=lambda: torch.autograd.grad(out, wide, half, retain_graph=True),
        nbytes=2 * (1 + 2 + 2) * n / 2,
    )
    batch = given.rows // SEQUENCE
    positions = given.normal(SEQUENCE, 1, CHANNELS // 2, dtype=torch.float32)
    qkv = given.normal(batch, SEQUENCE, 3 * HEADS, CHANNELS)
    yield Kernel(
        name="rotary embedding, in place",
        call=lambda: rotated(qkv, HEADS, positions, positions),
        nbytes=4 * qkv.numel() * 2 / 3,
    )


def _norm(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    x, added, weight, *bias = inputs
    return residual_norm(x, added, weight, bias[0] if bias else None, 1e-5)


def _of_steps(given: Given, x: Tensor) -> Iterator[Kernel]:
    """Yield kernels of gradients and optimizer steps."""
    n, wide = given.elements, torch.float32
    flat, gradient = given.normal(n, dtype=wide), x.view(-1)
    yield Kernel(
        name="gradients bf16 added to fp32", call=lambda: accumulate(flat, [0], [gradient], False), nbytes=10 * n
    )
    yield Kernel(name="sum of squares, fp32", call=lambda: squared_sum(flat, 0), nbytes=4 * n)
    backend = "cpu" if is_cpu(given.device) else "triton"
    master, m, v = (torch.zeros(n, device=given.device) for _ in range(3))
    numbers = AdamWStep(step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    weight = torch.empty(n, dtype=DTYPE, device=given.device)
    yield Kernel(
        name="AdamW with bf16 weights out",
        call=lambda: adamw(backend, master, m, v, flat, numbers, weight),
        nbytes=(4 * 4 + 3 * 4 + 2) * n,
    )
    for bits in (8, 4):
        row = gradient.view(1, -1)
        packed = torch.empty(1, packed_bytes(n, bits, BLOCK), dtype=torch.uint8, device=given.device)
        unpacked, nbytes = torch.empty_like(row), 2 * n + packed.nbytes
        pack, unpack = partial(quantize, row, bits, BLOCK, packed), partial(dequantize, packed, bits, BLOCK, unpacked)
        yield Kernel(name=f"pack to INT{bits}", call=pack, nbytes=nbytes)
        yield Kernel(name=f"unpack INT{bits}", call=unpack, nbytes=nbytes)


def _of_products(given: Given, x: Tensor) -> Iterator[Kernel]:
    """Yield attention, the head with its loss, and the weight gradient that a product sums in fp32."""
    batch, shape = given.rows // SEQUENCE, (SEQUENCE, HEADS, CHANNELS)
    q, k, v, grad = (given.normal(batch, *shape) for _ in range(4))
    for one in (q, k, v):
        one.requires_grad_()
    # Two products, half of each under the mask; the backward pass has five.
    pair = 2 * batch * HEADS * SEQUENCE**2 * CHANNELS
    yield Kernel(name="attention", call=lambda: causal_attention(q, k, v, 0.0, "torch"), flops=pair)
    out = causal_attention(q, k, v, 0.0, "torch")
    yield Kernel(
        name="attention, backward",
        call=lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        flops=2.5 * pair,
    )
    few, tokens = given.rows // 8, x[: given.rows // 8].detach().requires_grad_()
    head = given.normal(VOCAB, WIDTH).requires_grad_()
    targets = torch.randint(0, VOCAB, (few,), device=given.device)
    yield Kernel(
        name="head, loss and both gradients",
        call=lambda: torch.autograd.grad(linear_cross_entropy(tokens, head, targets), (tokens, head)),
        flops=3 * 2 * few * WIDTH * VOCAB,
    )
    total = torch.zeros(WIDTH, WIDTH, device=given.device)
    yield Kernel(
        name="weight gradient, summed in fp32",
        call=lambda: add_product(total, x, x, False),
        flops=2 * given.elements * WIDTH,
    )


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the median of some samples of a call's seconds, and their range as a share of it."""
    samples = list[float]()
    for _ in range(WARM_UP):
        call()
    for _ in range(SAMPLES):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(REPEATS):
            call()
        synchronize(device)
        samples.append((time.perf_counter() - begin) / REPEATS)
    median = statistics.median(samples)
    return median, (max(samples) - min(samples)) / median


def rows(given: Given) -> Iterator[list[str]]:
    """Time all kernels; yield rows of the table."""
    bounds = dict[str, float]()
    for kernel in kernels(given):
        seconds, noise = timed(kernel.call, given.device)
        unit, amount = ("bytes", kernel.nbytes) if kernel.nbytes else ("flops", kernel.flops)
        rate = amount / seconds
        shown = f"{rate / 1e12:.2f}", f"{rate / bounds.setdefault(unit, rate):.2f}"
        cells = (*shown, "", "") if kernel.nbytes else ("", "", *shown)
        yield [kernel.name, f"{seconds * 1e3:.3f}", f"{noise:.2f}", *cells]


def main() -> None:
    """Time, and print or write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 27, help="elements of the inputs")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    device = device_of(0)
    # Else torch may take cuDNN's.
    take_kernel("torch")
    given, found = Given(arguments.elements, device), list[list[str]]()
    for one in rows(given):
        found.append(one)
        print(json.dumps(one), flush=True)
    text = f"""## Kernels on one GPU

`python -m tools.bench.gpu_kernels`: {device_name(device)}, {machine(["torch", "triton"])}. Inputs of {given.elements:,}
elements, bf16 but for states. Medians of {SAMPLES} samples of {REPEATS} calls, and their range as a share. TB/s: the
least bytes that a kernel has to move; `of a copy`: against the copy of the first line. TFLOP/s: of products; `of a
product`: against that of the second line.

{table(HEADER, found)}"""
    print(text)
    if arguments.write:
        write_section(arguments.write, "gpu kernels", text)


if __name__ == "__main__":
    main()
