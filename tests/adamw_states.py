"""Steps of AdamW and states before them, for tests that compare kernels bit by bit."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from llmtrain_kernels.adamw import reference
from llmtrain_kernels.adamw.cpu import States
from llmtrain_kernels.adamw.step import AdamWStep
from torch import Tensor

CLIPPED = AdamWStep(
    step=3, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, gradient_divisor=torch.tensor(1.7)
)
PLAIN = AdamWStep(step=1000, lr=3e-4, beta1=0.8, beta2=0.999, eps=1e-5, weight_decay=0.0)


def states(numel: int) -> tuple[States, Tensor]:
    """Return (masters, moments after some steps), and a gradient: of all sizes, with zeros and subnormal numbers."""
    generator = torch.Generator().manual_seed(numel)
    size = torch.exp(8 * torch.randn(numel, generator=generator)).clamp(max=1e15)
    size[::7] = 0
    size[3::11] = 1e-22
    master, m, v = torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)
    for step in range(1, 4):
        gradient = size * torch.randn(numel, generator=generator)
        reference.step(master, m, v, gradient, replace(CLIPPED, step=step, lr=0.0))
    return (master, m, v), size * torch.randn(numel, generator=generator)


def clones(states: States) -> States:
    """Return copies of states."""
    master, m, v = states
    return master.clone(), m.clone(), v.clone()


def cut(states: States, own: slice) -> States:
    """Return a range of states, as views."""
    master, m, v = states
    return master[own], m[own], v[own]


def assert_same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
