"""Messages through shared memory arrive as over gloo, between ranks of one node and beside messages to others."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.ranks.forks import answers

Found = Callable[[int], list[dict[str, object]]]
SHARED, ROUTED, GLOO = "SharedMemoryMessages", "RoutedMessages", "GlooMessages"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("messages")


@pytest.fixture(scope="module")
def found(place: Path) -> Found:
    """Return what each of `world` ranks found."""

    @cache
    def run(world: int) -> list[dict[str, object]]:
        folder = place / str(world)
        folder.mkdir()
        return answers("message_ranks.py", world, folder)

    return run


@pytest.mark.parametrize(
    ("world", "where", "backends"),
    [
        (2, "in one node", [SHARED] * 2),
        (2, "each in its own", [GLOO] * 2),
        (2, "where one forbids it", [GLOO] * 2),
        (3, "in one node", [SHARED] * 3),
        (3, "in two nodes", [ROUTED, ROUTED, GLOO]),
        # Ranks 0 and 2 still share memory.
        (3, "where one forbids it", [ROUTED, GLOO, ROUTED]),
    ],
)
def test_each_channel_has_its_backend(world: int, where: str, backends: list[str], found: Found) -> None:
    assert [rank[where] for rank in found(world)] == [[backend, True] for backend in backends]


def test_no_file_is_left_that_a_killed_rank_could_leave_behind(found: Found) -> None:
    assert [rank["files of memory"] for rank in found(3)] == [[]] * 3


def test_a_rank_that_is_killed(place: Path, found: Found) -> None:
    found(2)
    assert (place / "2" / "lost" / "told").read_text() == "Connection closed by peer"
