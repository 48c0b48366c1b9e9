"""Reading the description of a cluster. Whatever is wrong becomes one sentence. No torch in here."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from llmtrain.cluster.config import Cluster
from llmtrain.errors import BadInputError
from llmtrain.recipe.explain import shown
from llmtrain.recipe.shipped import shipped_folder


def load_cluster(source: str | Path | Mapping[str, Any], key: str = "") -> Cluster:
    """Return the cluster that a YAML file, a shipped description's name (`frontier`) or plain data describes.

    key: where plain data stands in a recipe, for messages. Raises BadInputError with one sentence for what is wrong.
    """
    if isinstance(source, Mapping):
        return _parse(source, f"{key}." if key else "")
    path = _find(str(source))
    return _parse({"name": path.stem, **_read(path)}, f"{path}: ")


def shipped_clusters() -> list[str]:
    """Return the names of the descriptions that come with llmtrain."""
    return sorted(path.stem for path in (shipped_folder() / "clusters").glob("*.yaml"))


@cache
def _adapter() -> TypeAdapter[Cluster]:
    return TypeAdapter(Cluster)


def _parse(data: Mapping[str, Any], where: str) -> Cluster:
    try:
        return _adapter().validate_json(json.dumps(data))
    except TypeError as error:
        raise BadInputError(f"{where.rstrip('.: ')} holds what is not plain YAML: {error}") from error
    except ValidationError as error:
        raise BadInputError(where + _explain(error)) from error


def _find(name_or_path: str) -> Path:
    if name_or_path in shipped_clusters():
        return shipped_folder() / "clusters" / f"{name_or_path}.yaml"
    # A recipe says clusters/frontier.yaml for the shipped one wherever it lies itself.
    for path in (Path(name_or_path), shipped_folder() / name_or_path):
        if path.is_file():
            return path
    near = get_close_matches(Path(name_or_path).stem, shipped_clusters(), n=1)
    advice = f"did you mean {near[0]}?" if near else f"expected a YAML file, or one of {', '.join(shipped_clusters())}"
    raise BadInputError(f"there is no description of a cluster {name_or_path}; {advice}")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError, AttributeError, TypeError) as error:
        raise BadInputError(f"{path} does not describe a cluster: {' '.join(str(error).split())[:240]}") from error
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise BadInputError(f"{path} does not describe a cluster: it holds a list, expected sections with keys")
    return {str(name): value for name, value in content.items()}


def _explain(error: ValidationError) -> str:
    """Name the key, the value and what was expected, for the first thing that is wrong; an unknown key goes first."""
    unknown = "unexpected_keyword_argument"
    details = min(error.errors(include_url=False), key=lambda found: found["type"] != unknown)
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"]).lstrip(".")
    if details["type"] == unknown:
        near = _nearest([str(part) for part in details["loc"] if isinstance(part, str)])
        return f"{key} is no key of a cluster; " + (f"did you mean {near}?" if near else f"expected {_top_keys()}")
    if details["type"] == "value_error":
        return ".".join(filter(None, (key, str(details["ctx"]["error"]))))
    if details["type"].startswith("missing"):
        return f"{key} is missing; every cluster's description needs it"
    return f"{key} is {shown(details['input'])}; expected {details['msg'].removeprefix('Input should be ')}"


def _nearest(parts: list[str]) -> str | None:
    """Return the key that `parts` was most likely meant to be: misspelt, or put into the wrong section."""
    known = dict.fromkeys(_walk(Cluster, ""))
    section, leaf = "".join(f"{part}." for part in parts[:-1]), parts[-1]
    siblings = [key for key in known if key.startswith(section) and "." not in key.removeprefix(section)]
    leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = get_close_matches(section + leaf, siblings, n=1, cutoff=0.75)
    near = near or [leaves[name] for name in get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    return near[0] if near else None


def _walk(section: type, prefix: str) -> Iterator[str]:
    """Yield every key by its dotted name; those of a list's sections without a place in the list."""
    for name, hint in get_type_hints(section).items():
        if name not in {entry.name for entry in fields(section)}:
            continue
        yield prefix + name
        for option in (hint, *get_args(hint)):
            if is_dataclass(option) and isinstance(option, type):
                yield from _walk(option, f"{prefix}{name}.")


def _top_keys() -> str:
    return ", ".join(entry.name for entry in fields(Cluster))
