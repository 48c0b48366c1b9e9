"""Stands for kernels that are not torch's: what they read and write, and another kernel that computes the same."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from llmtrain.checkpoint.safetensors_file import bytes_of
from llmtrain.offload import gradient_store
from llmtrain.sharding import gradient_reduction, gradient_sums, optimizer_shard
from llmtrain.training import replica_check
from llmtrain_kernels import triton_launch
from llmtrain_kernels.accumulate.op import accumulate
from llmtrain_kernels.attention import op as attention
from llmtrain_kernels.cross_entropy import op as cross_entropy
from llmtrain_kernels.direct_io.queue import DirectQueue
from llmtrain_kernels.quantize import op as quantize
from llmtrain_kernels.quantize.format import QuantizeBackend
from llmtrain_kernels.quantize.reference import REFERENCE
from torch import Tensor
from torch._C import _DisableTorchDispatch

from tests.cuda.machine import Machine


def stand_ins(machine: Machine) -> list[Any]:
    """Return the changes to the project's kernels."""
    native = optimizer_shard.adamw, gradient_store.squared_blocks, cross_entropy._plain_losses

    def one(what: str, reads: list[Tensor], writes: list[Tensor], compute: Callable[[], Any]) -> Any:
        machine.compute(what, reads, writes)
        with _DisableTorchDispatch():
            return compute()

    def quantizes(x: Tensor, bits: int, block: int, out: Tensor, key: int | None) -> None:
        one("quantize", [x], [out], lambda: REFERENCE.quantize(x, bits, block, out, key))

    def dequantizes(packed: Tensor, bits: int, block: int, out: Tensor) -> None:
        one("dequantize", [packed], [out], lambda: REFERENCE.dequantize(packed, bits, block, out))

    def dequantizes_sum(packed: Tensor, bits: int, block: int, out: Tensor, accumulate: bool) -> None:
        reads = [packed, *([out] if accumulate else [])]
        one("dequantize_sum", reads, [out], lambda: REFERENCE.dequantize_sum(packed, bits, block, out, accumulate))

    def adamw(
        backend: str, master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, numbers: Any,
        weight: Tensor | None = None, into: Any = None, threads: int | None = None, **others: Any,
    ) -> None:  # fmt: skip
        written = [*(into or (master, m, v)), *([] if weight is None else [weight])]
        backend = "torch" if master.is_cuda else backend
        compute = partial(native[0], backend, master, m, v, gradient, numbers, weight, into, threads, **others)
        one("adamw", [master, m, v, gradient], written, compute)

    def squared_sum(x: Tensor, offset: int) -> Tensor:
        with _DisableTorchDispatch():
            found = torch.linalg.vector_norm(x, dtype=torch.float64).square()
        machine.compute("squared_sum", [x], [found])
        return found

    def squared_blocks(x: Tensor, offset: int) -> Any:
        return one("squared_blocks", [x], [], lambda: native[1](x, offset))

    def losses(logits: Tensor, targets: Tensor, needs_grad: bool) -> Any:
        machine.compute("cross_entropy", [logits, targets], [logits] if needs_grad else [])
        with _DisableTorchDispatch():
            # A CPU has no softmax of fp16.
            wide = logits.float()
            found = native[2](wide, targets, needs_grad)
            if needs_grad:
                logits.copy_(wide)
        return found

    packing = QuantizeBackend(quantizes, dequantizes, dequantizes_sum)
    return [
        mock.patch.object(quantize, "_backend", return_value=packing),
        *_transfers(machine),
        mock.patch.object(optimizer_shard, "adamw", adamw),
        _checksums(machine),
        mock.patch.object(gradient_reduction, "squared_sum", squared_sum),
        *_sums(machine),
        mock.patch.object(gradient_store, "squared_blocks", squared_blocks),
        mock.patch.object(cross_entropy, "_losses", losses),
        mock.patch.object(triton_launch, "triton_installed", return_value=False),
        mock.patch.object(attention, "causal_attention", _attend),
    ]


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, kernel: str = "torch") -> Tensor:
    """Attention in one operator, as flash-attn has it."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    # The CPU has none with dropout.
    mixed: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True)[0]
    return mixed.transpose(1, 2)


def _checksums(machine: Machine) -> Any:
    """Return the change to the host's reads of values that replicas compare."""

    def checked(values: Tensor) -> memoryview:
        machine.compute("a checksum", [values], [])
        return bytes_of(values)

    return mock.patch.object(replica_check, "bytes_of", checked)


def _sums(machine: Machine) -> list[Any]:
    """Return the changes to the sums of gradients, which wait for the unit's last one as on a GPU."""

    def accumulates(flat: Tensor, starts: Any, found: Any, overwrite: bool) -> None:
        machine.compute("accumulate", [*found, *([] if overwrite else [flat])], [flat])
        with _DisableTorchDispatch():
            accumulate(flat, starts, found, overwrite)

    return [
        mock.patch.object(gradient_sums, "takes_triton", lambda x: x.is_cuda),
        mock.patch.object(gradient_sums, "accumulate", accumulates),
    ]


def _transfers(machine: Machine) -> list[Any]:
    """Return the changes to transfers of files: memory is used from their start to their end."""
    start, finish = DirectQueue._start, DirectQueue.finish
    kinds = dict[tuple[DirectQueue, int], str]()

    def used(kind: str, memory: Tensor) -> None:
        machine.compute(f"a {kind} of a file", *([memory], []) if kind == "write" else ([], [memory]))

    def starting(self: DirectQueue, file: int, offset: int, memory: Tensor, kind: Any) -> int:
        used(kind, memory)
        number = start(self, file, offset, memory, kind)
        kinds[self, number] = kind
        return number

    def finishing(self: DirectQueue, transfer: int) -> None:
        used(kinds.pop((self, transfer)), self._pending[transfer])
        finish(self, transfer)

    return [mock.patch.object(DirectQueue, "_start", starting), mock.patch.object(DirectQueue, "finish", finishing)]
