"""Streams that copy as late as they may: no GPU is needed.

A stream here is a list of copies; they run when something waits for them, and not before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LateStream:
    """Copies that wait. None of them runs before `run` is called for it."""

    def __init__(self, device: object = None) -> None:
        self.copies: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int | None = None) -> None:
        """Run the copies before the given one, or all."""
        while self.done < (len(self.copies) if until is None else until):
            self.done += 1
            self.copies[self.done - 1]()

    def wait_stream(self, other: "LateStream") -> None:
        """Run what another stream has."""
        other.run()

    def wait_event(self, event: Any) -> None:
        """Run what another stream has before an event, before what comes next here."""
        self.copies.append(event.synchronize)

    def record_event(self, event: Any = None) -> Any:
        """Return an event behind what is queued."""
        event = event or torch.cuda.Event()
        event.stream, event.place = self, len(self.copies)
        return event

    def synchronize(self) -> None:
        """Run all."""
        self.run()


class LateCopies(TorchDispatchMode):
    """Puts the copies of the current stream off."""

    def __init__(self) -> None:
        super().__init__()
        self.main = self.current = LateStream()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default and self.current is not self.main:
            self.current.copies.append(lambda: torch.Tensor.copy_(args[0], args[1]))
            return args[0]
        return op(*args, **(kwargs or {}))


def _unpinned(made: Any, *sizes: Any, pin_memory: bool = False, **given: Any) -> Any:
    return made(*sizes, **given)


def late_copies(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    """Let torch.cuda make such streams, and pinned memory be any memory."""
    mode = LateCopies()

    class Event:
        stream, place = mode.main, 0

        def __init__(self, blocking: bool = False) -> None:
            """See torch."""

        def record(self) -> None:
            self.stream, self.place = mode.current, len(mode.current.copies)

        def wait(self) -> None:
            mode.current.wait_event(self)

        def synchronize(self) -> None:
            self.stream.run(self.place)

        def query(self) -> bool:
            return False

    @contextmanager
    def using(stream: LateStream) -> Iterator[None]:
        before, mode.current = mode.current, stream
        yield
        mode.current = before

    fakes = {"Stream": LateStream, "Event": Event, "current_stream": lambda: mode.main, "stream": using}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for made in (torch.empty, torch.zeros):
        monkeypatch.setattr(torch, made.__name__, partial(_unpinned, made))
    return mode
