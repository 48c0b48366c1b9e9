"""The tables of docs/keys.md and docs/other-programs.md are those of the schema and of other programs' words."""

from pathlib import Path
from shutil import copy

from llmtrain.recipe.keys import recipe_keys, type_of
from llmtrain.recipe.other_words import KEYS

from tools.key_pages import DOCS, write_pages

PAGES = ("keys.md", "other-programs.md")


def test_pages_are_as_written(tmp_path: Path) -> None:
    """Otherwise, run `python -m tools.key_pages`."""
    for name in PAGES:
        copy(DOCS / name, tmp_path)
    write_pages(tmp_path)
    for name in PAGES:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), f"{name} is old; python -m tools.key_pages"


def test_every_key_is_there_once() -> None:
    rows = [line.split("`")[1] for line in (DOCS / "keys.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows))
    assert {row for row in rows if type_of(row) is None} == set()
    # A section is a table of its own, and cards of a network have the same keys wherever they are.
    absent = {key for key in recipe_keys() if key not in rows and not key.startswith("cluster.")}
    assert {key for key in absent if key not in {row.rpartition(".")[0] for row in rows}} == set()


def test_every_word_of_other_programs_is_there() -> None:
    text = (DOCS / "other-programs.md").read_text()
    assert [word for word in KEYS if f"`{word}`" not in text] == []
