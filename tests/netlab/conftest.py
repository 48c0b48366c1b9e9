"""Tests in emulated clusters; skipped, with the reason, on machines that cannot emulate one."""

import os
from collections.abc import Iterator

import pytest

from tools.netlab.lab import Lab
from tools.netlab.network import leftovers, namespaces, why_not
from tools.netlab.spec import plain


@pytest.fixture(scope="session", autouse=True)
def _can_make_labs() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test leaves none of its labs behind, and no lab of another program is touched."""
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab")
    before = present()
    yield
    assert present() <= before


def present() -> set[str]:
    """Return the namespaces of this process's labs, and of labs whose process has ended."""
    return {*namespaces(f"netlab-{os.getpid()}-"), *leftovers()}


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Two nodes of two ranks, with 100 Mbit/s between them."""
    with Lab(plain(nodes=2, ranks_per_node=2, inter="100mbit")) as made:
        yield made
