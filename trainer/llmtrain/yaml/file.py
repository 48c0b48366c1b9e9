"""Reading untrusted YAML: only a regular file of limited size, also after its aliases are expanded.

Errors name the place in the file and do not quote it, as the file may be private.
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
# Of TOML, whose first line is a list in YAML.
_NO_YAML = "this is no YAML; expected lines such as `train: {steps: 5}`"
# What yaml says of the most frequent slips, and plain words for it.
_PLAIN = {
    "found character '\\t' that cannot start any token": "a tab is here; indent with spaces",
    "mapping values are not allowed here": (
        "this line is indented differently from its section, or a text in it has a colon and no quotes"
    ),
    "expected '<document start>', but found '<scalar>'": _NO_YAML,
    "expected '<document start>', but found '<block mapping start>'": _NO_YAML,
    "'<stream end>'": "the end of the file",
}
# The exceptions of yaml and OmegaConf for invalid text.
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
    """Return the content of a file of keys and values. wrong: the words for an invalid file, such as `is not a recipe`.
    mend: a function that changes the text first. Raises BadInputError."""
    try:
        text = mend(read_text(path, LARGEST_BYTES))
        root = check_size(text)
        if root is not None and root.tag != "tag:yaml.org,2002:map":
            kind = {yaml.SequenceNode: "a list", yaml.ScalarNode: "plain text"}.get(type(root), "a set or the like")
            raise BadInputError(f"{path} {wrong}: it holds {kind}, expected sections with keys")
        content = OmegaConf.create(text)
        assert isinstance(content, DictConfig)
        return content
    except UnreadableError as error:
        raise BadInputError(f"{path} cannot be read: {error}") from error
    except YAML_ERRORS as error:
        raise BadInputError(f"{path} {wrong}: {yaml_problem(error)}") from error


def check_size(text: str) -> yaml.Node | None:
    """Return the root of a YAML text. Raises ValueError for too many bytes, values or levels, and the errors of
    yaml."""
    if len(text.encode(errors="replace")) > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
    # Count the events first: composing the tree of a long list or of many levels takes minutes.
    levels = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if number > 2 * LARGEST_VALUES:
            raise ValueError(f"it has more than {LARGEST_VALUES} values")
        if levels > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    # Aliases share nodes here; OmegaConf would copy them.
    if _nodes(root, {}) > LARGEST_VALUES:
        raise ValueError(f"it has more than {LARGEST_VALUES} values, or characters of texts with references (${{...}})")
    return root


def yaml_problem(error: Exception) -> str:
    """Return the problem and its place in one short line, without quoting the text."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, error.problem or "this is no YAML"
        for jargon, plain in _PLAIN.items():
            problem = problem.replace(jargon, plain)
        return f"line {mark.line + 1}, column {mark.column + 1}: {one_line(problem)}"
    if "set_int_max_str_digits" in str(error):
        return "it has a number of thousands of digits"
    return "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)


def one_line(said: object) -> str:
    """Return a library's error message as one short line."""
    text = " ".join(str(said).split())
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def _nodes(node: yaml.Node | None, counted: dict[int, int]) -> int:
    """Return the number of values in a node, with aliases expanded. A text with references counts its characters,
    because OmegaConf reads those slowly."""
    if not isinstance(node, yaml.CollectionNode):
        return len(node.value) if isinstance(node, yaml.ScalarNode) and "${" in node.value else 1
    if id(node) not in counted:
        # A node that contains itself counts once here, and is refused later.
        counted[id(node)] = 1
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_nodes(part, counted) for part in parts)
    return counted[id(node)]
