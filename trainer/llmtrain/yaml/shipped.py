"""Finding recipes: shipped ones by name, the user's own by path."""

from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from llmtrain_data.untrusted import reason

import llmtrain
from llmtrain.errors import BadInputError

# The resolved recipe in a run's folder.
RECORD = "recipe.resolved.yaml"
# Files that a misspelt name is compared with.
_MOST_FILES = 1000


def shipped_folder() -> Path:
    """Return the folder of the recipes that come with llmtrain: inside the wheel, or the repository's own."""
    package = Path(llmtrain.__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def shipped_names() -> list[str]:
    """Return the names of the recipes that come with llmtrain."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def find_recipe(name_or_path: str, beside: Path | None = None) -> Path:
    """Return the file of a shipped recipe by name, or of a path (relative to the folder `beside`, if given).

    Raises BadInputError if there is none.
    """
    if name_or_path in shipped_names():
        return shipped_folder() / f"{name_or_path}.yaml"
    path = Path(beside or "", name_or_path)
    try:
        if path.is_dir():
            raise BadInputError(f"{path} is a folder; {_advice_on_folder(path)}")
        # Reading says what is wrong with one that is no regular file.
        if path.exists():
            return path
    except (OSError, ValueError) as error:
        raise BadInputError(f"{name_or_path[:100]!r} cannot be read as a recipe's path: {reason(error)}") from error
    known = {name: name for name in shipped_names()} | _recipes_beside(path)
    near = get_close_matches(path.stem, known, n=1)
    advice = f"did you mean {known[near[0]]}?" if near else f"expected a YAML file, or one of {_names()}"
    raise BadInputError(f"there is no recipe {path}; {advice}")


def _advice_on_folder(path: Path) -> str:
    record = path / RECORD
    found = f"its run's recipe is {record}" if record.is_file() else None
    return found or f"expected a recipe's YAML file, or one of {_names()}"


def _recipes_beside(path: Path) -> dict[str, str]:
    """Return the YAML files in the folder of `path` by their stems."""
    found = (entry for entry in path.parent.glob("*") if entry.suffix in (".yaml", ".yml") and entry.is_file())
    return {entry.stem: str(entry) for entry in islice(found, _MOST_FILES)}


def _names() -> str:
    return ", ".join(shipped_names())


def summary(path: Path) -> str:
    """Return the first line of a recipe's comment."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ")
