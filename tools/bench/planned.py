"""What `llmtrain plan` says of a recipe's text, for documents."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llmtrain.plan.views.view import view_recipe

GB, GIB = 10**9, 2**30


def planned(recipe: str, keys: Sequence[str], ranks: int) -> dict[str, Any]:
    """Return what `llmtrain plan --json` prints of a recipe's text. A run saves while it waits, without copies."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(recipe)
        return view_recipe(str(path), [*keys, "checkpoint.async=false"], ranks).as_data()
