"""Tests on a Slurm of this machine: skipped, with the reason, where none can be made."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llmtrain_data.indexed import IndexedWriter

# At the end, so that no folder of the repository hides a package of the same name.
sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from desk import Desk

from tools.slurmlab.files import Spec
from tools.slurmlab.lab import Lab, why_not


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Two nodes that claim 8 processors each."""
    if reason := why_not():
        pytest.skip(reason)
    with Lab(Spec(nodes=2)) as made:
        yield made


@pytest.fixture(scope="session")
def desk(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A folder with a small set whose tokens follow each other in a pattern that a model can learn."""
    folder = tmp_path_factory.mktemp("desk")
    writer = IndexedWriter(folder / "set", np.dtype(np.uint16))
    steps = np.random.default_rng(0).integers(1, 4, size=(100, 100))
    for document in np.cumsum(steps, axis=1) % 64:
        writer.add(document, np.array([100]))
    writer.commit()
    return Desk(folder, lab)
