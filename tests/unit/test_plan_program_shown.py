"""`llmtrain plan --program RANK`: a rank's program as text, as JSON and drawn."""

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from llmtrain.cli.main import main
from llmtrain.plan.program.in_order import COMPUTE, InOrder
from llmtrain.plan.program.instructions import Gather, Reduce
from llmtrain.plan.program.text import program_lines
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.make import make_plan

RECIPE = """
model: {family: llama, layers: 4, hidden: 64, heads: 8, vocab: 102}
data: {path: set, sequence_length: 32}
train: {global_batch: 16, microbatch: 1}
cluster: {node: {ranks: 4}}
"""
KEYS = ("zero.stage=3", "parallel.pipeline=2")


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)


def ordered(rank: int, *keys: str) -> InOrder:
    recipe, facts = described_run("small.yaml", keys, 16)
    return InOrder.of(make_plan(recipe, facts), rank)


@pytest.mark.parametrize("keys", [KEYS, ("zero.stage=1",), ("zero.preset=zero++", *KEYS[1:]), ("parallel.data=16",)])
def test_each_lane_has_its_instructions_in_order(keys: tuple[str, ...]) -> None:
    for rank in (0, 15):
        found = ordered(rank, *keys)
        bars = found.bars()
        for lane in {bar.lane for bar in bars}:
            own = [bar for bar in bars if bar.lane == lane]
            assert all(one.end <= other.start for one, other in pairwise(own))
        assert [bar.text for bar in bars if bar.lane == COMPUTE] == [str(one.action) for one in found.program.passes]
        # Every instruction but a drop has a place of its own, and so has a pass without one.
        issues = Counter(type(issue) for issue in found.program.issues)
        updates = {bar.start for bar in bars if bar.purpose == "update"}
        empty = sum(not any(point.issues for point in one.points) for one in found.program.passes)
        assert len({bar.start for bar in bars if bar.lane != COMPUTE} - updates) == issues[Gather] + issues[Reduce]
        assert max(bar.end for bar in bars) >= issues[Gather] + issues[Reduce] + len(updates) + empty


def test_lanes_name_their_tier() -> None:
    lanes = {bar.lane for bar in ordered(0, *KEYS).bars()}
    assert lanes == {COMPUTE, *(f"{kind} over {n} ranks, {tier}" for kind in ("gather", "reduce") for n, tier in (
        (4, "node"), (2, "all"),
    ))}  # fmt: skip


def test_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(program_lines(ordered(9, *KEYS).program))
    assert main(["plan", "small.yaml", *KEYS, "--ranks", "16", "--program", "9"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert main(["plan", "small.yaml", *KEYS, "--ranks", "16", "--program", "9", "--json"]) == 0
    # Elements of weights; with units of one size, none beyond the bound.
    gathered = {"gathered": 138240, "least": 138240}
    assert json.loads(capsys.readouterr().out) == {"rank": 9, "program": lines, "gathered": gathered}
    assert main(["plan", "small.yaml", *KEYS, "--ranks", "16", "--program", "16"]) == 2
    assert "--program is 16, but the run has 16 ranks" in capsys.readouterr().err


def test_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "small.yaml", *KEYS, "--ranks", "16", "--program", "9", "--png", "program.png"]) == 0
    assert Path("program.png").read_bytes().startswith(b"\x89PNG")
    assert "order:" in capsys.readouterr().out


def test_only_a_figure_needs_matplotlib() -> None:
    """And neither needs torch."""
    program = "import sys; from llmtrain.cli.main import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    words = ["plan", "small.yaml", "--ranks", "16", "--program", "0"]
    for more, drawn in (([], False), (["--png", "program.png"], True)):
        done = subprocess.run(
            [sys.executable, "-c", program, *words, *more], capture_output=True, text=True, check=True
        )
        assert ("matplotlib" in done.stderr.split(), "torch" in done.stderr.split()) == (drawn, False)
