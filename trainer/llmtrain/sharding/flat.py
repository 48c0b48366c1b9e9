"""A unit's model states in memory: one flat buffer each, with the module's parameters as views into it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmtrain.model.init import initialize
from llmtrain.model.tensors import UnitSpec


@dataclass(frozen=True)
class FlatUnit:
    """The states of one unit, each one-dimensional over the range `[0, spec.numel)`.

    weight: what the model computes with, in the compute dtype. master: the fp32 weight that the optimizer steps; the
    same memory as `weight` when that is fp32. gradient: fp32 sum over microbatches. m, v: AdamW's moments, fp32.
    parameters, gradient_views: the module's parameters, views into `weight`, and the same views into `gradient`.
    """

    spec: UnitSpec
    weight: Tensor
    master: Tensor
    gradient: Tensor
    m: Tensor
    v: Tensor
    parameters: tuple[nn.Parameter, ...]
    gradient_views: tuple[Tensor, ...]

    def publish(self) -> None:
        """Bring `weight` up to date with `master`."""
        if self.weight.data_ptr() != self.master.data_ptr():
            self.weight.copy_(self.master)

    @property
    def nbytes(self) -> int:
        """Bytes of all states together."""
        shared = self.weight.data_ptr() == self.master.data_ptr()
        states = (
            (self.master, self.gradient, self.m, self.v)
            if shared
            else (self.weight, self.master, self.gradient, self.m, self.v)
        )
        return sum(state.nbytes for state in states)


def materialize(spec: UnitSpec, module: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> FlatUnit:
    """Give the meta parameters of `module` their storage in one flat buffer, initialised from `seed`."""
    master = torch.empty(spec.numel, dtype=torch.float32, device=device)
    initialize(spec, 0, spec.numel, seed, master)
    weight = master if dtype == torch.float32 else master.to(dtype)
    gradient, m, v = (torch.zeros_like(master) for _ in range(3))
    parameters = attach(spec, module, weight)
    views = tuple(
        gradient[start:end].view(parameter.shape)
        for parameter, (_, start, end) in zip(parameters, parameter_ranges(spec), strict=True)
    )
    return FlatUnit(spec, weight, master, gradient, m, v, parameters, views)


def attach(spec: UnitSpec, module: nn.Module, weight: Tensor) -> tuple[nn.Parameter, ...]:
    """Make the parameters of `module` views into the unit's flat `weight`, and return them in its order."""
    parameters = []
    for name, start, end in parameter_ranges(spec):
        shape = module.get_parameter(name).shape
        owner, _, leaf = name.rpartition(".")
        parameters.append(nn.Parameter(weight[start:end].view(shape)))
        setattr(module.get_submodule(owner), leaf, parameters[-1])
    return tuple(parameters)


def parameter_ranges(spec: UnitSpec) -> list[tuple[str, int, int]]:
    """Return (module parameter, start, end) for the unit's flat buffer; stacked tensors make one parameter."""
    ranges: list[tuple[str, int, int]] = []
    for tensor, start, end in zip(spec.tensors, spec.offsets, spec.offsets[1:], strict=False):
        if ranges and ranges[-1][0] == tensor.parameter:
            ranges[-1] = (tensor.parameter, ranges[-1][1], end)
        else:
            ranges.append((tensor.parameter, start, end))
    return ranges
