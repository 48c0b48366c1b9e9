"""The tables of docs/memory.md are what the planner says."""

from pathlib import Path

from tools.bench.recipes_memory import text

DOCUMENT = Path(__file__).parents[2] / "docs" / "memory.md"


def test_the_document_has_the_plans_of_shipped_recipes() -> None:
    """Otherwise, run `python -m tools.bench.recipes_memory --write docs/memory.md`."""
    assert text() in DOCUMENT.read_text(encoding="utf-8")
