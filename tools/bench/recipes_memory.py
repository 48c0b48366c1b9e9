"""What `llmtrain plan` says of the shipped recipes that offload, on the machines that they name.

    python -m tools.bench.recipes_memory [--write docs/memory.md]

It plans and trains nothing.
"""

import argparse
from pathlib import Path
from typing import Any

from llmtrain.plan.views.view import view_recipe
from llmtrain.plan.views.view_tables import LABELS
from llmtrain.yaml.shipped import find_recipe, shipped_names, summary

from tools.bench.planned import GIB
from tools.bench.table import table, write_section

KEYS = ("data.path=corpus", "data.tokenizer=null")


def recipe_text(name: str) -> str:
    """Return the table of a recipe."""
    plan = view_recipe(name, KEYS, None).as_data()
    memory, auto = plan["memory"], [line for line in plan["auto"] if line.startswith("offload.share")]
    role = max(memory["roles"], key=lambda role: role["total"])
    shown = ", ".join((f"{plan['parameters'] / 1e9:.1f}B parameters on {plan['accelerator'] or 'a card'}", *auto))
    return f"`llmtrain plan {name}`: {summary(find_recipe(name))} {shown}.\n\n" + table(
        ("GiB", "card", "host", "NVMe"), _rows(memory, role)
    )


def _rows(memory: dict[str, Any], role: dict[str, Any]) -> list[list[str]]:
    def cells(*values: float | None) -> list[str]:
        return ["" if value is None else f"{value / GIB:.1f}" for value in values]

    rows = [[LABELS[key], *cells(size, None, None)] for key, size in role["device"].items() if size]
    rows += [[LABELS[key], *cells(None, size, None)] for key, size in role["host"].items() if size]
    if role["files"]:
        rows.append(["offloaded, in files", *cells(None, None, role["files"])])
    host = sum(role["host"].values())
    return [
        *rows,
        ["**sum**", *cells(role["total"], host, role["files"])],
        ["the machine has", *cells(memory["limit"], memory["host_limit"], None)],
    ]


def text() -> str:
    """Return the section."""
    names = [name for name in shipped_names() if name.startswith("offload-")]
    head = "`python -m tools.bench.recipes_memory`, from `llmtrain plan --json`."
    return "\n\n".join(("## Recipes that offload", head, *map(recipe_text, names)))


def main() -> None:
    """Plan, and print or write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="document whose section to replace")
    given = parser.parse_args()
    section = text()
    print(section)
    if given.write:
        write_section(given.write, "recipes", section)


if __name__ == "__main__":
    main()
