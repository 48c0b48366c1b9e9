"""Which receives ranks have posted, told through the store that all ranks share."""

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist

from llmtrain.comm.messages import Channel


class PostedReceives:
    """Tells the other ends of this rank's channels about the first receives that it posts, and waits for theirs."""

    def __init__(
        self, store: dist.Store, rank: int, peers: Mapping[Channel, int], announced: int, patience: timedelta
    ) -> None:
        """peers: the rank at the other end of each channel. announced: the number of first messages of each channel
        whose receives are told. patience: how long to wait for one; the watchdog ends a run whose rank is lost
        before."""
        self._store, self._rank, self._peers, self._announced, self._patience = store, rank, peers, announced, patience
        # Of the channels that this rank sends on. A call that waits would block other users of a connection.
        self._connections: dict[Channel, dist.Store] = {}
        self._received, self._sent = Counter[Channel](), Counter[Channel]()

    def tell(self, channel: Channel) -> None:
        """Tell the sender that this rank has posted its next receive of a channel."""
        number = self._received[channel]
        self._received[channel] += 1
        if number < self._announced:
            self._store.set(_key(channel, self._rank, number), "")

    def next(self, channel: Channel) -> Callable[[], None] | None:
        """Return what waits until the receiver has posted the receive of the next message, for a thread of the channel;
        None for a message whose receive is not told. Raises RuntimeError if the receiver does not in time."""
        number = self._sent[channel]
        self._sent[channel] += 1
        if number >= self._announced:
            return None
        if channel not in self._connections:
            self._connections[channel] = self._store.clone()  # type: ignore[attr-defined]
        store = self._connections[channel]
        key = _key(channel, self._peers[channel], number)

        def wait() -> None:
            store.wait([key], self._patience)
            store.delete_key(key)

        return wait


def _key(channel: Channel, receiver: int, number: int) -> str:
    return f"received by rank {receiver}: {channel.source} to {channel.target}, {number}"
