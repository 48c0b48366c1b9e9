"""Messages between stages over MPI, in ranks that mpirun (or srun --mpi) started."""

import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmtrain.errors import BadInputError
from llmtrain.parallel.pipeline.transport import Channel

# How long to look for a message without a pause, and how long a pause then is, in seconds.
PATIENCE, NAP = 1e-3, 1e-4


@dataclass
class _Message:
    """A posted receive. host: where MPI puts it, `values` itself where the library reaches that."""

    values: Tensor
    host: Tensor
    request: Any
    done: bool = False


@dataclass
class _Inbox:
    shapes: deque[torch.Size] = field(default_factory=deque)
    posted: deque[_Message] = field(default_factory=deque)


class MpiTransport:
    """Isend and Irecv of a communicator of its own; each channel has its own tag (AxoNN, section IV.A).

    peers: by channel, the other side's rank in the run. stages: of the whole pipeline. world: ranks of the run. ahead:
    receives that are posted ahead of need on each channel. Raises BadInputError where MPI does not know as many ranks.
    """

    def __init__(
        self,
        peers: Mapping[Channel, int],
        stages: int,
        world: int,
        device: torch.device,
        dtype: torch.dtype,
        ahead: int,
    ) -> None:
        everyone = _mpi().COMM_WORLD
        if everyone.size != world:
            raise BadInputError(
                f"pipeline.transport is mpi, but MPI knows {everyone.size} of the run's {world} ranks; start them with "
                f"mpirun -n {world} llmtrain run RECIPE, or set pipeline.transport=torch"
            )
        self._world = everyone.Dup()
        self._peers, self._stages, self._device, self._dtype, self._ahead = peers, stages, device, dtype, ahead
        self._direct = device.type == "cpu" or _reaches_cuda()
        self._inboxes: dict[Channel, _Inbox] = {}
        self._sent: deque[tuple[Tensor, Any]] = deque()

    def expect(self, channel: Channel, shapes: Iterable[torch.Size]) -> None:
        """Say which messages come next on a channel."""
        inbox = self._inboxes.setdefault(channel, _Inbox())
        inbox.shapes.extend(shapes)
        self._post(channel, inbox)

    def receive(self, channel: Channel) -> Tensor:
        """Return the next message of a channel, waiting for it."""
        inbox = self._inboxes[channel]
        message = inbox.posted.popleft()
        _until(lambda: message.done or message.request.Test())
        self._post(channel, inbox)
        if message.host is not message.values:
            message.values.copy_(message.host, non_blocking=True)
        return message.values

    def arrived(self, channel: Channel) -> bool:
        """Return whether the next message of a channel is there."""
        inbox = self._inboxes.get(channel)
        if inbox is None or not inbox.posted:
            return False
        head = inbox.posted[0]
        head.done = head.done or bool(head.request.Test())
        return head.done

    def wait_any(self, channels: Sequence[Channel]) -> None:
        """Wait until the next message of any of `channels` is there."""
        _until(lambda: any(self.arrived(channel) for channel in channels))

    def send(self, channel: Channel, values: Tensor) -> None:
        """Start to send a tensor."""
        values = values.contiguous()
        if self._device.type == "cuda":
            values = values if self._direct else values.cpu()
            # MPI reads the memory itself, behind no stream.
            torch.cuda.current_stream().synchronize()
        request = self._world.Isend(_bytes(values), self._peers[channel], self._tag(channel))
        self.progress()
        self._sent.append((values, request))

    def progress(self) -> None:
        """Give MPI, which has no thread of its own, a moment for large messages: it asks first who is to get them."""
        while self._sent and self._sent[0][1].Test():
            self._sent.popleft()

    def flush(self) -> None:
        """Wait until all that was sent is on its way."""
        _until(lambda: all(request.Test() for _, request in self._sent))
        self._sent.clear()

    def close(self) -> None:
        """Leave the communicator. Collective."""
        self._world.Free()

    def _post(self, channel: Channel, inbox: _Inbox) -> None:
        while inbox.shapes and len(inbox.posted) < self._ahead:
            values = torch.empty(inbox.shapes.popleft(), dtype=self._dtype, device=self._device)
            host = values if self._direct else torch.empty_like(values, device="cpu", pin_memory=True)
            if host.is_cuda:
                # MPI writes behind no stream, and this memory may be what a queued kernel still reads.
                torch.cuda.current_stream().synchronize()
            request = self._world.Irecv(_bytes(host), self._peers[channel], self._tag(channel))
            inbox.posted.append(_Message(values, host, request))

    def _tag(self, channel: Channel) -> int:
        return channel.source * self._stages + channel.target


def _until(done: Callable[[], bool]) -> None:
    """Return when `done`. MPI itself would keep the processor from ranks that it shares it with."""
    began = time.perf_counter()
    while not done():
        if time.perf_counter() - began > PATIENCE:
            time.sleep(NAP)


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BadInputError(
            f"pipeline.transport is mpi, which needs mpi4py and an MPI library ({error}); install them (pip "
            "install mpi4py), or set pipeline.transport=torch"
        ) from error
    return MPI


def _bytes(values: Tensor) -> Any:
    """Return what mpi4py takes for the memory of a contiguous tensor, whatever its dtype."""
    raw = values.view(torch.uint8)
    return raw if values.is_cuda else raw.numpy()


def _reaches_cuda() -> bool:
    """Whether this machine's Open MPI was built to read and write CUDA memory."""
    if shutil.which("ompi_info") is None:
        return False
    about = subprocess.run(["ompi_info", "--parsable", "--all"], capture_output=True, text=True, check=False).stdout
    return "mpi_built_with_cuda_support:value:true" in about
