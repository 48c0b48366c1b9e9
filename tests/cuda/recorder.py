"""Reports every operator of torch to a machine: what it reads and writes, what it copies, and when it waits."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.machine import Machine
from tools.tensors import tensors_of

aten = torch.ops.aten

# They allocate, or make another tensor of the same memory.
SILENT = ("device", "empty", "new_empty", "_unsafe_view", "lift_fresh", "set_", "_pin_memory", "is_pinned")
# Their result tells the host something, or has a size that the host must know.
READS_BACK = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default, aten.masked_select.default,
    aten.equal.default, aten.unique_dim.default, aten._unique2.default,
}  # fmt: skip


def _wide_addmm(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **factors: Any) -> Tensor:
    return torch.addmm(total, a.to(out_dtype), b.to(out_dtype), **factors, out=out)


# The CPU has no kernel for them.
ONLY_ON_GPUS = {aten.addmm.dtype_out: _wide_addmm}


class Recorder(TorchDispatchMode):
    """Encloses a run. Memory that is to be pinned is noted, and not pinned."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine, kwargs = self._machine, dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False)
        found = ONLY_ON_GPUS.get(op, op)(*args, **kwargs)
        if pinned:
            machine.pin(found)
        name, views, given = _described(op)
        reads, writes = list[Tensor](), list[Tensor]()
        for (written, _), value in zip(given, _values(given, args, kwargs), strict=True):
            (writes if written else reads).extend(tensors_of(value))
        if not views:
            machine.allocated(tensors_of(found), (*reads, *writes))
        if views or name.startswith(SILENT):
            return found
        known = {id(tensor) for tensor in (*reads, *writes)}
        writes += [tensor for tensor in tensors_of(found) if id(tensor) not in known]
        machine.compute(name, reads, writes)
        if torch.Tag.pointwise in op.tags and name != "copy_" and _rounds_a_number(given, args, kwargs):
            machine.rounded.append(f"{machine.thread}: {machine.where()}")
        if name in ("copy_", "_to_copy"):
            self._copied(found if name == "_to_copy" else args[0], args[-1 if name == "_to_copy" else 1], args, kwargs)
        elif op in READS_BACK and any(tensor.is_cuda for tensor in reads):
            machine.wait(name, machine.clocks.known(machine.stream))
        return found

    def _copied(self, to: Tensor, values: Tensor, args: Any, kwargs: Any) -> None:
        if to.is_cuda == values.is_cuda:
            return
        machine, host = self._machine, values if to.is_cuda else to
        # Samples are integers, and the sums of a step, which it also reads, are in fp64. Files hold bytes.
        if to.dim() and to.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
            machine.linked[to.is_cuda] += to.nbytes
        if not machine.is_pinned(host):
            machine.wait("a pageable copy", machine.clocks.known(machine.stream))
            machine.pageable.append(f"{machine.thread}: {machine.where()}")
        elif not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            machine.wait("a copy", machine.clocks.known(machine.stream))


@cache
def _described(op: Any) -> tuple[str, bool, tuple[tuple[bool, tuple[int, str]], ...]]:
    """Return an operator's name, whether its result is a view, and for each argument whether it is written, its place
    and its name."""
    schema = op._schema
    aliases = [one.alias_info for one in schema.returns]
    views = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    given = tuple(
        (one.alias_info is not None and one.alias_info.is_write, (place, one.name))
        for place, one in enumerate(schema.arguments)
    )
    return schema.name.split("::")[1], views, given


def _rounds_a_number(given: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a GPU computes with 16 bits of a number that has more: a tensor without dimensions does not take
    part in the choice of the dtype, and unlike a CPU, a GPU does not read it as it was."""
    named = zip(given, _values(given, args, kwargs), strict=True)
    inputs = [one for (_, (_, name)), value in named if name != "out" for one in tensors_of(value)]
    numbers = [one for one in inputs if one.is_floating_point()]
    halves = any(one.dim() and one.itemsize == 2 for one in numbers)
    return halves and any(one.is_cuda and not one.dim() and one.itemsize > 2 for one in numbers)


def _values(given: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for _, (place, name) in given:
        yield args[place] if place < len(args) else kwargs.get(name)
