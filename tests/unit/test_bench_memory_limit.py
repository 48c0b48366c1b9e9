"""The search of the largest model in a limited memory."""

import pytest

from tools.bench import memory_limit


@pytest.mark.parametrize("most", [0, 1, 5, 8])
def test_the_largest_that_trains_is_found(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers beyond `most` are killed; the figure is of the last size that trained, whatever was tried after it."""
    tried: list[int] = []

    def parameters(peer: str, layers: int, limit: int) -> int | None:
        tried.append(layers)
        return 100 * layers if layers <= most else None

    monkeypatch.setattr(memory_limit, "peer_parameters", parameters)
    assert memory_limit.largest("peer", int(1.5 * 2**30)) == (most, 100 * most)
    assert len(tried) <= 4
