"""Count the tensors that are allocated while ranks train: after some steps, buffer pools must allocate none."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llmtrain.comm.stream import Job, ThreadStream
from llmtrain.comm.waits import Ticket
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Smaller tensors are not part of a unit, but numbers such as a norm.
LEAST_BYTES = 256


@dataclass
class Allocations:
    """on_streams: tensors allocated by jobs on streams, of LEAST_BYTES or more. full: flat tensors that the computation
    allocated, with as many elements as one of `sizes`, those of full units."""

    sizes: frozenset[int] = frozenset()
    on_streams: int = 0
    full: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the allocations of this thread, and of every job that it submits to a stream."""
        submit = ThreadStream.submit

        def counted(stream: ThreadStream, job: Job) -> Ticket:
            def watched() -> None:
                with _Mode(self._made_on_stream):
                    job()

            return submit(stream, watched)

        ThreadStream.submit = counted  # type: ignore[method-assign, assignment]
        try:
            with _Mode(self._made):
                yield
        finally:
            ThreadStream.submit = submit  # type: ignore[method-assign]

    def _made_on_stream(self, tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes() >= LEAST_BYTES:
            with self._lock:
                self.on_streams += 1

    def _made(self, tensor: Tensor) -> None:
        if tensor.dim() == 1 and tensor.numel() in self.sizes:
            self.full += 1


class _Mode(TorchDispatchMode):
    """Calls `made` with every tensor that an operation returns in new memory."""

    def __init__(self, made: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _place(leaf) not in given:
                self._made(leaf)
        return result


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
