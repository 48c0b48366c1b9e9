"""`python -m tools.key_pages` writes the tables of docs/keys.md and docs/other-programs.md: from the recipe's schema,
and from the words of other programs that errors translate."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from llmtrain.recipe.document import recipe_schema
from llmtrain.recipe.keys import recipe_keys
from llmtrain.recipe.other_words import KEYS, UNSUPPORTED, VALUES
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.expected import expected, options, section_hints

from tools.bench.table import write_section

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Bounds of numbers that no run comes near.
_FAR = re.compile(r"(?: to| and up to| and below) (?:\d{1,3}(?:,\d{3})+|1e\+30)")


def write_pages(folder: Path) -> None:
    """Write the generated part of both pages in `folder`."""
    write_section(folder / "keys.md", "keys", "\n\n".join(_sections()))
    write_section(folder / "other-programs.md", "words", _other_words())


def _sections() -> Iterator[str]:
    """Yield a heading, a description and a table for each section of a recipe."""
    schema = recipe_schema()
    for section, names in _names().items():
        about = schema if section is Recipe else schema["$defs"][section.__name__]
        rows = list(_rows(section, f"{names[0]}." if names[0] else "", about))
        text = "" if section is Recipe else " ".join(about["description"].split())
        head = [f"## {', '.join(f'`{name}`' for name in names)}" if names[0] else "## Outside of sections", text]
        yield "\n\n".join(filter(None, [*head, _table(("key", "default", "values", "effect"), rows)]))


def _names() -> dict[type, list[str]]:
    """Return each section with the keys that hold it."""
    found: dict[type, list[str]] = {Recipe: [""]}
    for name, hint in recipe_keys().items():
        for option in options(hint):
            if isinstance(option, type) and is_dataclass(option):
                found.setdefault(option, []).append(name)
    return found


def _rows(section: type, prefix: str, about: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield key, default, values and effect of the keys of a section that take more than a section. about: its
    schema."""
    needed = {entry.name for entry in fields(section) if entry.default is entry.default_factory is MISSING}
    for name, hint in section_hints(section).items():
        if all(is_dataclass(option) or option is NoneType for option in options(hint)):
            continue
        key = about["properties"][name]
        # The file's name gives that of a run.
        default = "required" if name in needed and section is not Recipe else _default(key)
        yield f"`{prefix}{name}`", default, _FAR.sub("", expected(hint)), key.get("description", "")


def _default(key: Mapping[str, Any]) -> str:
    """Return a default as YAML has it; nothing for a key whose description gives it."""
    if "default" not in key:
        return ""
    value = key["default"]
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _other_words() -> str:
    """Return the keys by their names in other programs, values by theirs, and features that are not here."""
    by_key, by_value = dict[str, list[str]](), dict[str, list[str]]()
    for word, key in KEYS.items():
        by_key.setdefault(key, []).append(f"`{word}`")
    for (key, word), value in VALUES.items():
        if not key.startswith("-"):
            by_value.setdefault(f"{key}: {value}", []).append(f"`{word}`")
    return "\n\n".join(
        [
            "## Keys",
            _table(("here", "elsewhere"), [(_here(key), ", ".join(words)) for key, words in by_key.items()]),
            "## Values",
            _table(("here", "elsewhere"), [(_here(key), ", ".join(words)) for key, words in by_value.items()]),
            "## What is not here",
            "\n".join(f"- {why[0].upper()}{why[1:]}." for why in UNSUPPORTED.values()),
        ]
    )


def _here(keys: str) -> str:
    return " or ".join(f"`{key}`" for key in keys.split(" or "))


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *(tuple(cell.replace("|", r"\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    write_pages(DOCS)
