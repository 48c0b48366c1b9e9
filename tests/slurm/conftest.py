"""Tests on a Slurm of this machine; skipped, with the reason, on machines that cannot run one."""

from collections.abc import Iterator

import pytest

from tests.slurm.desk import Desk
from tests.tiny import write_corpus
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
    """A folder with a small set whose tokens follow a pattern that a model can learn."""
    folder = tmp_path_factory.mktemp("desk")
    write_corpus(folder / "set", 100)
    return Desk(folder, lab)
