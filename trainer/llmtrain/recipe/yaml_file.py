"""Reading YAML that may come from a stranger: a plain file of moderate size, which aliases do not blow up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmtrain.errors import BadInputError

_LARGEST_BYTES, _LARGEST_NODES = 2**20, 100_000


def read_yaml(path: Path, wrong: str, mend: Callable[[str], str] = str) -> Any:
    """Return what OmegaConf makes of a file. wrong: what is said of one that is not as it should be, such as `is not a
    recipe`. mend: changes its text first. Raises BadInputError."""
    try:
        if path.exists() and not path.is_file():
            raise BadInputError(f"{path} {wrong}: it is no plain file")
        if (size := path.stat().st_size) > _LARGEST_BYTES:
            raise BadInputError(f"{path} {wrong}: it is {size} bytes long, expected at most {_LARGEST_BYTES}")
        text = mend(path.read_text(encoding="utf-8"))
        # Nodes are shared where OmegaConf would copy what an alias stands for.
        if _nodes(yaml.compose(text, Loader=yaml.SafeLoader), {}) > _LARGEST_NODES:
            raise BadInputError(f"{path} {wrong}: it has more than {_LARGEST_NODES} values")
        return OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError, AttributeError, TypeError) as error:
        raise BadInputError(f"{path} {wrong}: {one_line(error)}") from error
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from error


def one_line(error: Exception) -> str:
    """Return what a library says is wrong, on one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 240 else f"{text[:237]}..."


def _nodes(node: yaml.Node | None, counted: dict[int, int]) -> int:
    """Return how many values a node holds, those of its aliases each time."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in counted:
        # One that holds itself is counted once here, and refused later.
        counted[id(node)] = 1
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_nodes(part, counted) for part in parts)
    return counted[id(node)]
