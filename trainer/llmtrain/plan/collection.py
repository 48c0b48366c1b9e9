"""Python's garbage collector while millions of objects are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Look for no cycles of objects, for code that makes millions of objects and no cycles: the search takes a quarter
    of its time or more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
