"""Python's garbage collector in a run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def thawed() -> Iterator[None]:
    """Let the collector have what `freeze` kept from it, at the end."""
    try:
        yield
    finally:
        gc.unfreeze()


def freeze() -> None:
    """Keep all objects that there are from the collector.

    A full collection visits every object: some 0.1 s of the host with torch imported, in which a GPU soon has nothing
    to do. Most objects live as long as the run.
    """
    gc.collect()
    gc.freeze()
