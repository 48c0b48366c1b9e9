"""From a YAML file and overrides to a typed recipe. Every error is one sentence."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from pydantic import TypeAdapter, ValidationError

from llmtrain.errors import BadInputError
from llmtrain.recipe.explain import explain, unknown_key
from llmtrain.recipe.keys import type_of
from llmtrain.recipe.overrides import merge, merge_overrides
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.file import LARGEST_BYTES, YAML_ERRORS, one_line, read_yaml
from llmtrain.yaml.references import lost_reference, resolved_size
from llmtrain.yaml.shipped import find_recipe
from llmtrain.yaml.shown import shown
from llmtrain.yaml.yaml11 import as_meant

# The name of a resolver comes before a colon, and may itself contain references.
_RESOLVER = re.compile(r"\$\{[^}]*(?::|\$\{)")
_LARGEST = 2**63 - 1


@cache
def recipe_adapter() -> TypeAdapter[Recipe]:
    """Return pydantic's adapter, which reads and writes recipes and has their schema."""
    return TypeAdapter(Recipe)


def load_recipe(name_or_path: str, overrides: Sequence[str] = (), *, complete: bool = True) -> Recipe:
    """Read a recipe: the recipes that it extends, then the file, then `key=value` overrides; later values win.

    name_or_path: name of a shipped recipe, or a YAML file. `name` defaults to the file's stem. complete: refuse a
    recipe that leaves values (`???`) to the command line. Raises BadInputError.
    """
    container = read_recipe(name_or_path, overrides, complete=complete)
    return parse_recipe(container, recipe_files(name_or_path))


def read_recipe(name_or_path: str, overrides: Sequence[str] = (), *, complete: bool = True) -> dict[str, Any]:
    """Return the plain data that `load_recipe` checks: the given keys and the name, without other defaults."""
    path = find_recipe(name_or_path)
    merged = merge_overrides(read_recipe_file(path), overrides)
    container = _resolved_container(merged, path, complete)
    return container if container.get("name") is not None else {**container, "name": path.stem}


def as_data(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data for JSON and YAML; `parse_recipe` reads it back."""
    data: dict[str, Any] = recipe_adapter().dump_python(recipe, by_alias=True, mode="json")
    return data


def parse_recipe(container: dict[str, Any], files: Sequence[Path] = ()) -> Recipe:
    """Return the recipe that plain data from YAML or JSON holds. files: those that it was read from, for errors. Raises
    BadInputError."""
    container = as_meant(container, Recipe)
    for key, value in _leaves(container):
        _refuse_unwritable(key, value)
    try:
        return recipe_adapter().validate_json(json.dumps(container))
    except ValidationError as error:
        raise BadInputError(explain(error, " or ".join(map(str, files)) or "the recipe")) from error


def read_recipe_file(path: Path) -> DictConfig:
    """Return a file's keys merged over the keys of the recipes that it extends. `name` is not inherited."""
    (path, merged), *children = reversed(_chain(path))
    for path, content in children:
        _take(merged, "name")
        merged = merge(merged, content, str(path))
    return merged


def recipe_files(name_or_path: str) -> list[Path]:
    """Return the file of a recipe and the files of the recipes that it extends. Raises BadInputError."""
    return [path for path, _ in _chain(find_recipe(name_or_path))]


def _chain(path: Path) -> list[tuple[Path, DictConfig]]:
    """Return each file and its keys: the file itself, the recipe that it extends, and so on."""
    found: list[tuple[Path, DictConfig]] = []
    seen: list[Path] = []
    while True:
        seen.append(path.resolve())
        if path.resolve() in seen[:-1]:
            circle = " -> ".join(link.name for link in seen)
            raise BadInputError(f"{path} extends itself: {circle}; cut the circle")
        content = read_yaml(path, "is not a recipe")
        if not content:
            raise BadInputError(f"{path} has no keys; a recipe needs at least a model and data.path, or `extends`")
        parent = _take(content, "extends")
        found.append((path, content))
        if parent is None:
            return found
        if not isinstance(parent, str):
            raise BadInputError(f"extends in {path} is {shown(parent)}; expected another recipe's file or name")
        child, path = path, _extended(path, parent)
        if path.suffix not in (".yaml", ".yml"):
            # Errors quote values of a recipe. A file of another kind may be private, so it is not read.
            raise BadInputError(f"extends in {child} is {parent}; expected another recipe's name, or a .yaml file")


def _extended(path: Path, parent: str) -> Path:
    """Return the file of the recipe that the one in `path` extends. Raises BadInputError."""
    try:
        return find_recipe(parent, beside=path.parent)
    except BadInputError as error:
        raise BadInputError(f"extends in {path} is {shown(parent)}: {error}") from error


def _take(content: DictConfig, key: str) -> Any:
    """Remove a key and return its value as written. `pop` would return the value that a reference refers to."""
    values = OmegaConf.to_container(content, resolve=False)
    assert isinstance(values, dict)
    if key in values:
        del content[key]
    return values.get(key)


def _resolved_container(merged: DictConfig, path: Path, complete: bool) -> dict[str, Any]:
    unresolved = OmegaConf.to_container(merged, resolve=False)
    for key, value in _leaves(unresolved):
        # A resolver such as oc.env would write a secret of the environment into the saved recipe.
        if isinstance(value, str) and _RESOLVER.search(value):
            raise BadInputError(
                f"{shown(key)} is {shown(value)}; a recipe may only refer to its own keys, as ${{train.steps}}"
            )
    try:
        if (size := resolved_size(unresolved)) > LARGEST_BYTES:
            raise BadInputError(
                f"{path} has {shown(size)} characters with its references followed; expected at most {LARGEST_BYTES}"
            )
        container = OmegaConf.to_container(merged, resolve=True, throw_on_missing=complete)
    except MissingMandatoryValue as error:
        missing = error.full_key
        raise BadInputError(
            f"{missing} is missing; {path} leaves it to you: add {missing}=... to the command line"
        ) from error
    except YAML_ERRORS as error:
        raise BadInputError(_lost(unresolved, getattr(error, "full_key", None) or str(path))) from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _lost(content: Any, where: str) -> str:
    """Return a sentence about a reference that cannot be followed. where: the key that has it, or the recipe."""
    found = lost_reference(content)
    key, target = ("", "") if found is None else (".".join(map(str, names)) for names in found)
    if not target:
        return f"{shown(where)} has a reference that leads in a circle or cannot be read; write the value out"
    why = unknown_key(target) if type_of(target) is None else f"nothing sets {target}; set it in the recipe too"
    return f"{shown(key)} has ${{{shown(target)}}}, but {why}"


def _refuse_unwritable(key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        wrong = "a finite number, or quotes around it if it is text"
    elif isinstance(value, int) and abs(value) > _LARGEST:
        wrong = "a number below 2^63"
    elif isinstance(value, str) and ("${" in value or not value.isprintable()):
        wrong = "text of printable characters, without ${"
    elif not isinstance(value, str | int | float | None):
        wrong = "plain YAML: text, a number, true, false, null or a list"
    else:
        return
    written = shown(value) if isinstance(value, int) else one_line(repr(value))
    raise BadInputError(f"{shown(key)} is {written}; expected {wrong}")


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value that is neither a mapping nor a list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise BadInputError(f"{key or 'the recipe'} has the key {shown(name)}; expected keys that are words")
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value
