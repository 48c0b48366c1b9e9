"""From arguments of the command line to a cluster and the grid of ranks on it. No torch in here."""

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from math import lcm
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.load import given_cluster, shipped_clusters
from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.cluster.rank_topology import RankTopology
from llmtrain.errors import BadInputError
from llmtrain.recipe.load import load_recipe, parse_recipe
from llmtrain.recipe.overrides import merge_overrides
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.file import read_yaml
from llmtrain.yaml.shipped import shipped_names


def topology_of(source: str | None, overrides: Sequence[str], ranks: int | None) -> RankTopology:
    """Return where the ranks of a run are, on the cluster of a recipe or a description.

    source: name or file of a recipe or a description; None for an empty recipe. ranks: number of ranks; None for all
    ranks that are described. Raises BadInputError.
    """
    if source is not None and "=" in source and not Path(source).exists():
        # Without a recipe, the first argument is an override.
        overrides, source = [source, *overrides], None
    return ranks_of(_recipe(source, overrides), ranks)


def ranks_of(recipe: Recipe, ranks: int | None) -> RankTopology:
    """Return what `topology_of` does, for a loaded recipe. It needs no plan: model and batch need not fit."""
    cluster = given_cluster(recipe.cluster)
    world = ranks or _described(cluster, recipe.parallel)
    per_node = cluster.node.ranks if cluster else world
    return RankTopology.of(cluster, recipe.parallel, world, per_node)


def _recipe(source: str | None, overrides: Sequence[str]) -> Recipe:
    if source is not None and not _is_description(source):
        return load_recipe(source, overrides, complete=False)
    given = OmegaConf.to_container(merge_overrides(OmegaConf.create(), overrides))
    assert isinstance(given, dict)
    if source is not None and "cluster" in given:
        raise BadInputError(f"the overrides have keys of cluster, which is {source} here; change that, or a copy of it")
    # The keys that every recipe must have; they do not affect where ranks are.
    rest: dict[str, Any] = {"name": "none", "model": {}, "data": {"path": "none"}, "cluster": source or "auto"}
    whole: dict[str, Any] = {**rest, **{str(key): value for key, value in given.items()}}
    if isinstance(whole["data"], dict):
        whole["data"] = {**rest["data"], **whole["data"]}
    return parse_recipe(whole)


def _is_description(source: str) -> bool:
    """Whether a name or a file is the description of a cluster: it has keys of one, and no keys of a recipe."""
    if source in shipped_names():
        return False
    path = Path(source)
    if not path.is_file():
        # For a name that is neither, the error suggests the nearest one.
        names = [*shipped_names(), *shipped_clusters()]
        near = get_close_matches(path.stem, names, n=1)
        if not near and not path.exists():
            raise BadInputError(
                f"there is no recipe and no cluster's description {source}; expected a YAML file, or one of "
                f"{', '.join(names)}"
            )
        return bool(near) and near[0] in shipped_clusters()
    try:
        given = read_yaml(path, "is no description")
    except BadInputError:
        # Reading it as a recipe reports the error.
        return False
    keys = set(given) if isinstance(given, DictConfig) else set()
    of_cluster, of_recipe = ({field.name for field in fields(form)} for form in (Cluster, Recipe))
    return bool(keys & (of_cluster - of_recipe)) and not keys & (of_recipe - of_cluster)


def _described(cluster: Cluster | None, parallel: ParallelConfig) -> int:
    """Return the default number of ranks: all that are described, or else the fewest that fill whole nodes."""
    wanted = parallel.tensor * parallel.pipeline * (1 if parallel.data == "auto" else parallel.data)
    if cluster is None:
        return wanted
    nodes = [group.nodes for group in cluster.clusters]
    if not nodes or None in nodes:
        return lcm(wanted, cluster.node.ranks)
    return sum(count or 0 for count in nodes) * cluster.node.ranks
