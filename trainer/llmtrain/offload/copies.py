"""Copies of offloaded states between the host and the device that computes, and when they are done."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.comm.device import in_host_memory
from llmtrain.comm.waits import Done, Event
from llmtrain.offload.usage import LinkCount


def recorded(on_gpu: bool) -> Event:
    """Return an event behind what the current stream has so far."""
    return torch.cuda.current_stream().record_event() if on_gpu else Done()


class Copies(Protocol):
    """Copies between the host and a device.

    link: counts what is copied, but for what `publish` copies: another thread may call that.
    """

    link: LinkCount

    def after(self, event: Event) -> AbstractContextManager[None]:
        """Queue what is computed inside behind an event."""

    def publish(self, to: Tensor, values: Tensor, after: Event) -> Event:
        """Copy weights, `[n]` of the compute dtype, after an event. Return the event of their arrival."""

    def count(self, to_host: int, to_device: int) -> None:
        """Count bytes that were copied between the host and a GPU."""

    def wait(self) -> None:
        """Let the host wait for all copies but those of `publish`."""

    def record(self) -> Event:
        """Return an event behind the same copies."""


class ImmediateCopies:
    """Copies within a CPU's memory, which are done when they are made. See Copies."""

    def __init__(self) -> None:
        self.link = LinkCount()

    def after(self, event: Event) -> AbstractContextManager[None]:
        """See Copies."""
        return nullcontext()

    def publish(self, to: Tensor, values: Tensor, after: Event) -> Event:
        """See Copies."""
        to.copy_(values)
        return Done()

    def count(self, to_host: int, to_device: int) -> None:
        """See Copies. Nothing leaves the host."""

    def wait(self) -> None:
        """See Copies."""

    def record(self) -> Event:
        """See Copies."""
        return Done()


class StreamCopies:
    """Copies on CUDA streams of their own. See Copies."""

    def __init__(self, device: torch.device) -> None:
        self.link = LinkCount()
        self._stream = torch.cuda.Stream(device)
        # Published weights have a stream of their own, so that the next gradients do not wait for them.
        self._publishing = torch.cuda.Stream(device)

    @contextmanager
    def after(self, event: Event) -> Iterator[None]:
        """See Copies."""
        with torch.cuda.stream(self._stream):
            event.wait()
            yield

    def publish(self, to: Tensor, values: Tensor, after: Event) -> Event:
        """See Copies."""
        if in_host_memory(to):
            to.copy_(values)
            return Done()
        with torch.cuda.stream(self._publishing):
            after.wait()
            to.copy_(values, non_blocking=True)
        return self._publishing.record_event()

    def count(self, to_host: int, to_device: int) -> None:
        """See Copies."""
        self.link.to_host += to_host
        self.link.to_device += to_device

    def wait(self) -> None:
        """See Copies."""
        # Stepping threads wait here for gradients: one that sleeps leaves its core to the others.
        self._stream.record_event(torch.cuda.Event(blocking=True)).synchronize()

    def record(self) -> Event:
        """See Copies."""
        return self._stream.record_event()


def copies_to(device: torch.device) -> Copies:
    """Return copies between the host and a device."""
    return ImmediateCopies() if device.type == "cpu" else StreamCopies(device)
