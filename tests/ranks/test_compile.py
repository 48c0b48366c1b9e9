"""torch.compile makes one graph of a model's blocks, and leaves the engine's hooks out of it."""

from pathlib import Path

import pytest

from tests.ranks.forks import answers
from tools.ports import free_ports


def test_one_graph_for_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every family, without and with sharded weights, without and with recomputation. Evaluations, which keep
    nothing for a backward pass, have one more."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    for found in answers("compile_ranks.py", 2, tmp_path):
        assert len(found) == 20
        assert dict(found) == {case: 1 + ("eval_every" in case) for case, _ in found}
