"""Links between pipeline stages: tensors go to other ranks through a transport, and stay in memory within a rank."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from llmtrain.comm.activity import Activity
from llmtrain.comm.messages import Channel
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.plan.pipeline.actions import Schedule

ShapeOf = Callable[[int, int], torch.Size]
"""Maps a microbatch's numbers of sequences and tokens per sequence to the shape of the activations between stages."""

CountSent = Callable[[Channel, int], None]
"""Takes the channel and the bytes of each message that is sent to another rank."""


class StageLinks:
    """One rank's links to the stages before and after its own."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        shape_of: ShapeOf,
        count: CountSent,
        activity: Activity,
    ) -> None:
        """rank: along the pipeline axis. activity: records the time spent waiting for messages."""
        self._schedule, self._rank, self._transport = schedule, rank, transport
        self._shape_of, self._count, self.activity = shape_of, count, activity
        # Tensors between two stages of this rank.
        self._local: dict[Channel, deque[Tensor]] = {}

    def is_local(self, stage: int) -> bool:
        """Return whether this rank holds `stage`."""
        return self._schedule.rank_and_chunk(stage)[0] == self._rank

    def expect(self, stage: int, rows: Sequence[Tensor], backward: bool) -> None:
        """Announce the messages that `stage` will receive for microbatches `rows`, int64 `[sequences, tokens + 1]`
        each. backward: gradients as well."""
        shapes = [self._shape_of(len(one), one.shape[1] - 1) for one in rows]
        before, after = stage > 0, backward and stage < self._schedule.stages - 1
        for source in ([stage - 1] if before else []) + ([stage + 1] if after else []):
            if not self.is_local(source):
                self._transport.expect(Channel(source, stage), shapes)

    def receive(self, channel: Channel) -> Tensor:
        """Wait for the next tensor of a channel, `[batch, sequence, hidden]` of the compute dtype, and return it."""
        if self.is_local(channel.source):
            return self._local[channel].popleft()
        return self.activity.wait(partial(self._transport.receive, channel))

    def send(self, channel: Channel, values: Tensor) -> None:
        """Start sending a tensor, `[batch, sequence, hidden]` of the compute dtype. It must not change before `flush`
        returns."""
        if self.is_local(channel.target):
            self._local.setdefault(channel, deque()).append(values)
        else:
            self._count(channel, values.nbytes)
            self._transport.send(channel, values)

    def arrived(self, channel: Channel) -> bool:
        """Return whether the next message of a channel has arrived."""
        return self._transport.arrived(channel)

    def wait_any(self, channels: Sequence[Channel]) -> None:
        """Wait until the next message of any of `channels` has arrived."""
        self.activity.wait(partial(self._transport.wait_any, channels))

    def progress(self) -> None:
        """Let the transport work on pending sends. Call it between long computations."""
        self._transport.progress()

    def flush(self) -> None:
        """Wait until every sent tensor may be reused."""
        self.activity.wait(self._transport.flush)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that messages go through."""
        return self._transport.nbytes

    @property
    def posted_bytes(self) -> int:
        """Most bytes so far of receives that were posted and not taken."""
        return self._transport.posted_bytes

    def close(self) -> None:
        """Stop the transport."""
        self._transport.close()


def channels(schedule: Schedule) -> Iterable[Channel]:
    """Yield every channel between stages on different ranks."""
    for stage in range(schedule.stages - 1):
        if schedule.rank_and_chunk(stage)[0] != schedule.rank_and_chunk(stage + 1)[0]:
            yield from (Channel(stage, stage + 1), Channel(stage + 1, stage))
