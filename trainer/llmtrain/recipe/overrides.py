"""Overrides of a recipe's keys: `key=value` arguments of the command line. Every error is one sentence."""

import re
from collections.abc import Sequence
from dataclasses import is_dataclass

from omegaconf import DictConfig, OmegaConf

from llmtrain.cluster.load import cluster_data
from llmtrain.errors import BadInputError
from llmtrain.recipe.explain import unknown_key
from llmtrain.recipe.keys import type_of
from llmtrain.yaml.expected import item_of, section_hints
from llmtrain.yaml.file import YAML_ERRORS, check_size, yaml_problem
from llmtrain.yaml.shown import shown

# A place in a list, in a key.
_PLACE = re.compile(r"\[|\.[0-9]+(?=\.|$)")
_OVERRIDE = re.compile(r"[^=\s]+=.*", re.DOTALL)


def merge_overrides(content: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a recipe's keys with `key=value` overrides; later values win. Raises BadInputError."""
    for override in overrides:
        if override.startswith("cluster."):
            # Its keys change a description that the recipe names; they would replace the name.
            content = _with_described_cluster(content)
        content = merge(content, _parse_override(override), override)
    return content


def _with_described_cluster(content: DictConfig) -> DictConfig:
    """Return a recipe's keys with the content of the cluster's file in place of its name."""
    source = OmegaConf.to_container(content, resolve=False).get("cluster")  # type: ignore[union-attr]
    if not isinstance(source, str) or source == "auto" or "${" in source:
        return content
    return merge(content, OmegaConf.create({"cluster": cluster_data(source)}), source)


def _parse_override(override: str) -> DictConfig:
    if not _OVERRIDE.fullmatch(override):
        raise BadInputError(f"{shown(override)!r} is not an override; expected key=value, such as train.steps=100")
    key, _, value = override.partition("=")
    _refuse_part_of_list(key)
    if type_of(key) is None:
        raise BadInputError(unknown_key(key, of_keys=value.startswith("{")))
    try:
        check_size(value)
        return OmegaConf.from_dotlist([override])
    except YAML_ERRORS as error:
        raise BadInputError(f"{shown(override)!r} cannot be read as key=value: {yaml_problem(error)}") from error


def _refuse_part_of_list(key: str) -> None:
    """Raise BadInputError for a key with an index, such as `optimizer.betas[0]` or `optimizer.betas.0`."""
    whole = _PLACE.split(key, maxsplit=1)[0]
    item = None if whole == key else item_of(type_of(whole))
    if item is not None:
        example = (
            f"{{{next(iter(section_hints(item)))}: ...}}" if isinstance(item, type) and is_dataclass(item) else "..."
        )
        raise BadInputError(f"{shown(key)} is a part of a list, which is set as a whole: {whole}=[{example}]")


def merge(base: DictConfig, over: DictConfig, source: str) -> DictConfig:
    """Return the keys of `base`, replaced by those of `over`. source: of `over`, for errors. Raises BadInputError."""
    try:
        merged = OmegaConf.merge(base, over)
    except YAML_ERRORS as error:
        raise BadInputError(f"{shown(source)} cannot be merged: {yaml_problem(error)}") from error
    assert isinstance(merged, DictConfig)
    return merged
