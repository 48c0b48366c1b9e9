"""Reading YAML that may come from a stranger: a regular file of moderate size, which aliases do not blow up.

What is wrong is told by its place in the file, as the file may hold what nobody is to see.
"""

from collections.abc import Callable
from pathlib import Path

import yaml
from llmtrain_data.untrusted import UnreadableError, read_text
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmtrain.errors import BadInputError

LARGEST_BYTES, LARGEST_VALUES, DEEPEST = 2**19, 10_000, 50
_LONGEST_REASON = 100
# What yaml and OmegaConf raise for text that they do not take.
YAML_ERRORS = (
    yaml.YAMLError,
    OmegaConfBaseException,
    ValueError,
    RecursionError,
    AttributeError,
    TypeError,
    OverflowError,
)


def read_yaml(path: Path, wrong: str, mend: Callable[[str], str] = str) -> DictConfig:
    """Return what OmegaConf makes of a file of keys and values. wrong: what is said of one that is not as it should be,
    such as `is not a recipe`. mend: changes its text first. Raises BadInputError."""
    try:
        text = mend(read_text(path, LARGEST_BYTES))
        root = check_size(text)
        if root is not None and root.tag != "tag:yaml.org,2002:map":
            held = {yaml.SequenceNode: "a list", yaml.ScalarNode: "plain text"}.get(type(root), "a set or the like")
            raise BadInputError(f"{path} {wrong}: it holds {held}, expected sections with keys")
        content = OmegaConf.create(text)
        assert isinstance(content, DictConfig)
        return content
    except UnreadableError as error:
        raise BadInputError(f"{path} cannot be read: {error}") from error
    except YAML_ERRORS as error:
        raise BadInputError(f"{path} {wrong}: {yaml_problem(error)}") from error


def check_size(text: str) -> yaml.Node | None:
    """Return the root of a YAML text. Raises ValueError if it has too many bytes, values or levels, and what yaml
    raises."""
    if len(text.encode(errors="replace")) > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
    # Looked at one by one first, as the tree of a long list or of many levels takes minutes.
    levels = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if number > 2 * LARGEST_VALUES:
            raise ValueError(f"it has more than {LARGEST_VALUES} values")
        if levels > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    # Nodes are shared where OmegaConf would copy what an alias stands for.
    if _nodes(root, {}) > LARGEST_VALUES:
        raise ValueError(f"it has more than {LARGEST_VALUES} values, or characters of texts with references (${{...}})")
    return root


def yaml_problem(error: Exception) -> str:
    """Return what yaml or OmegaConf finds wrong, and where, in one short line without the text around it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, error.problem
        return f"line {mark.line + 1}, column {mark.column + 1}: {one_line(problem or 'this is no YAML')}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)


def one_line(said: object) -> str:
    """Return what a library says is wrong, on one short line."""
    text = " ".join(str(said).split())
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def _nodes(node: yaml.Node | None, counted: dict[int, int]) -> int:
    """Return how many values a node holds, those of its aliases each time. A text with references counts as many as it
    has characters, as OmegaConf takes long to read them."""
    if not isinstance(node, yaml.CollectionNode):
        return len(node.value) if isinstance(node, yaml.ScalarNode) and "${" in node.value else 1
    if id(node) not in counted:
        # One that holds itself is counted once here, and refused later.
        counted[id(node)] = 1
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_nodes(part, counted) for part in parts)
    return counted[id(node)]
