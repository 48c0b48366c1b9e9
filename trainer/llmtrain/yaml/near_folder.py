"""What was meant by a folder that is not there. Every error is one sentence."""

from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from llmtrain.errors import BadInputError

_RUNS = Path("runs")
# Folders that are compared with a name.
_MOST = 1000


def near_folder(path: Path) -> str | None:
    """Return the folder beside `path` whose name is nearest to it; None if no name is near."""
    return next(iter(get_close_matches(str(path), _folders(path.parent), n=1)), None)


def expect_run_folder(path: Path, expected: str) -> None:
    """Check that the folder of a run, or of something in it, is there.

    expected: what to give, where no folder is near. Raises BadInputError.
    """
    if not path.is_dir():
        near = near_run(path)
        raise BadInputError(f"{path} is not a folder; {f'did you mean {near}?' if near else expected}")


def near_run(path: Path) -> str | None:
    """Return the folder that `path` most likely stands for: the run of that name, or what has nearly the same name in
    the same folder or in the folder of runs; None if there is none."""
    if (_RUNS / path).is_dir():
        return str(_RUNS / path)
    return near_folder(path) or near_folder(_RUNS / path)


def _folders(parent: Path) -> list[str]:
    return [str(one) for one in islice(parent.glob("*/"), _MOST) if one.is_dir()]
