"""What to do about a path that is no prefix of a prepared set."""

from difflib import get_close_matches
from pathlib import Path


def prefix_advice(path: Path) -> str:
    """Return the end of an error about `path`: the prefix that may be meant, or how to get one."""
    if path.suffix in (".bin", ".idx") and path.is_file():
        return f"give {path.with_suffix('')}"
    if not path.exists():
        near = get_close_matches(str(path), [str(one.with_suffix("")) for one in path.parent.glob("*.idx")], n=1)
        return f"did you mean {near[0]}?" if near else "expected the prefix that `llmtrain data prepare` wrote"
    if sets := sorted(path.glob("*.idx")):
        return f"did you mean {sets[0].with_suffix('')}?"
    return (
        f"{path} itself is there: if it is text, prepare it with `llmtrain data prepare {path} --tokenizer DIR "
        "--output PREFIX`, and give PREFIX"
    )
