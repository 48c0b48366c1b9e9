"""Gigatoken's batches as the two arrays they are, without awkward around them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Rows of unlike lengths, one after another: all ids (uint32), and how many each row has (int64)."""

    ids: np.ndarray
    lengths: np.ndarray


@contextmanager
def ragged_batches() -> Iterator[None]:
    """While open, gigatoken's `encode_batch` returns a `Ragged` in place of an awkward array.

    Gigatoken gives its two arrays to `awkward.unflatten`, which it looks up anew for every batch. Importing awkward
    takes 0.1 s, and its array around a batch 0.3 ms with Python's lock held, for which all threads wait.
    """
    before = sys.modules.get("awkward")
    sys.modules["awkward"] = _stand_in()
    try:
        yield
    finally:
        if before is None:
            del sys.modules["awkward"]
        else:
            sys.modules["awkward"] = before


def _stand_in() -> ModuleType:
    """Return a module with what gigatoken asks awkward for: how to make an array, and the class of one given to it."""
    module = ModuleType("awkward")
    vars(module).update(unflatten=Ragged, Array=Ragged)
    return module
