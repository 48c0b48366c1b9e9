"""Counts the tensors that come into being while ranks train: the arenas' promise is that after a while none does."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llmtrain.comm.stream import Job, ThreadStream, Ticket
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What is smaller is no part of a unit, but a number such as a norm.
LEAST_BYTES = 256


@dataclass
class Allocations:
    """on_lanes: tensors made by jobs on lanes, of any size worth counting. whole: flat ones that the computation made,
    with as many elements as one of `sizes`, those of whole units."""

    sizes: frozenset[int] = frozenset()
    on_lanes: int = 0
    whole: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread makes, and every job that it hands to a lane."""
        submit = ThreadStream.submit

        def counted(lane: ThreadStream, job: Job) -> Ticket:
            def watched() -> None:
                with _Mode(self._made_on_lane):
                    job()

            return submit(lane, watched)

        ThreadStream.submit = counted  # type: ignore[method-assign]
        try:
            with _Mode(self._made):
                yield
        finally:
            ThreadStream.submit = submit  # type: ignore[method-assign]

    def _made_on_lane(self, tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes() >= LEAST_BYTES:
            with self._lock:
                self.on_lanes += 1

    def _made(self, tensor: Tensor) -> None:
        if tensor.dim() == 1 and tensor.numel() in self.sizes:
            self.whole += 1


class _Mode(TorchDispatchMode):
    """Tells of every tensor that an operation returns in memory that none of its arguments is in."""

    def __init__(self, made: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = made

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _place(leaf) not in given:
                self._tell(leaf)
        return result


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
