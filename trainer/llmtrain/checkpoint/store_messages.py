"""Short messages between the ranks through their key-value store, without the process groups.

A background thread must not take part in collectives, and must not block the main thread's store connection while it
waits, so it gets its own connection.
"""

import time
import zlib

import torch.distributed as dist

from llmtrain.comm.ranks import Ranks

# Seconds to wait for a message: a rank may take this much longer than another to write its shard file.
_TIMEOUT = 3600.0
# Longest time between two polls for a message, in seconds.
_POLL = 0.5


class StoreMessages:
    """Messages of numbered operations, such as saves.

    The keys of an operation contain its number, so that no key is used twice. Every rank begins the same operations in
    the same order, so that their numbers agree.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._store = dist.HashStore() if ranks.store is None else ranks.store.clone()  # type: ignore[attr-defined]
        self._activity = ranks.activity
        self._name = f"{name}/{self._store.add(f'{name}/{ranks.rank}', 1)}"
        self._operation = 0

    def begin(self) -> None:
        """Begin the next operation."""
        self._operation += 1

    def publish(self, topic: str, text: str) -> None:
        """Publish `text` under `topic`, compressed, because a store takes only messages of a few MiB."""
        self._store.set(self._key(topic), zlib.compress(text.encode(), 1))  # type: ignore[arg-type]

    def wait_for(self, topic: str) -> str:
        """Wait for the text under `topic` and return it. Raises RuntimeError if another rank is lost."""
        key, begin = self._key(topic), time.monotonic()
        # The store's own `wait` would continue after the other rank has died.
        while not self._store.check([key]):
            waited = time.monotonic() - begin
            if self._activity.over or waited > _TIMEOUT:
                raise RuntimeError("contact with another rank was lost")
            time.sleep(min(_POLL, 0.001 + waited / 10))
        return zlib.decompress(self._store.get(key)).decode()

    def delete(self, topic: str) -> None:
        """Delete a message that every rank has read from the store."""
        self._store.delete_key(self._key(topic))

    def _key(self, topic: str) -> str:
        return f"{self._name}/{self._operation}/{topic}"
