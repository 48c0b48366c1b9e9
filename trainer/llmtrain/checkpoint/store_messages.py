"""Short messages between the ranks through their key-value store, beside the process groups.

A background thread must not take part in collectives, and must not hold the main thread's store connection
while it waits; so it gets a connection of its own.
"""

import time
import zlib

import torch.distributed as dist

from llmtrain.comm.ranks import Ranks

# A rank may be this much slower than another one at writing its part, in seconds.
_PATIENCE = 3600.0
# Longest time between two looks for a message, in seconds.
_LOOK = 0.5


class StoreMessages:
    """A numbered series of conversations.

    Every rank makes the same ones in the same order, so that no key is used twice.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._store = dist.HashStore() if ranks.store is None else ranks.store.clone()  # type: ignore[attr-defined]
        self._activity = ranks.activity
        self._name = f"{name}/{self._store.add(f'{name}/{ranks.rank}', 1)}"
        self._turn = 0

    def next(self) -> None:
        """Begin the next conversation."""
        self._turn += 1

    def tell(self, topic: str, text: str) -> None:
        """Publish `text` under `topic`. Compressed, because a store takes messages of a few MiB only."""
        self._store.set(self._key(topic), zlib.compress(text.encode(), 1))  # type: ignore[arg-type]

    def hear(self, topic: str) -> str:
        """Return what was published under `topic`, waiting for it. Raises RuntimeError if it never comes."""
        key, begin = self._key(topic), time.monotonic()
        # A wait of the store's own would go on when the other rank has died.
        while not self._store.check([key]):
            waited = time.monotonic() - begin
            if self._activity.over or waited > _PATIENCE:
                raise RuntimeError("contact with another rank was lost")
            time.sleep(min(_LOOK, 0.001 + waited / 10))
        return zlib.decompress(self._store.get(key)).decode()

    def forget(self, topic: str) -> None:
        """Free the store's memory of a message that everyone has heard."""
        self._store.delete_key(self._key(topic))

    def _key(self, topic: str) -> str:
        return f"{self._name}/{self._turn}/{topic}"
