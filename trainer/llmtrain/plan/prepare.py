"""From a recipe's name to one that is checked and resolved: all that happens before a run starts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llmtrain_data.errors import DataError
from llmtrain_data.tokenizer import tokenizer_size

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.load import load_cluster
from llmtrain.errors import BadInputError
from llmtrain.model.config import GPTConfig
from llmtrain.plan.check import check, check_folders, check_given
from llmtrain.plan.resolve import Facts, resolve
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.shipped import find_recipe


def prepared(
    name_or_path: str,
    overrides: Sequence[str],
    facts: Facts,
    read_hf: Callable[[Path], GPTConfig],
) -> Recipe:
    """Load a recipe, settle it and return it. Raises BadInputError or DataError; writes nothing."""
    return check_and_resolve(load_recipe(name_or_path, overrides), facts, read_hf, folders_above(name_or_path))


def folders_above(name_or_path: str) -> list[Path]:
    """Return the folders that a recipe's paths may be relative to, if not to the one that we are in: its own and those
    above it."""
    return list(find_recipe(name_or_path).resolve().parents)


def check_and_resolve(
    recipe: Recipe, facts: Facts, read_hf: Callable[[Path], GPTConfig], others: Sequence[Path] = ()
) -> Recipe:
    """Check a loaded recipe, resolve it and check the result. Raises BadInputError or DataError; writes nothing.

    facts: the run's ranks and device; the tokenizer's size and the shape of `model.hf` are looked up here.
    read_hf: gives the shape of the model in a Hugging Face folder. others: see `check_folders`.
    """
    check_given(recipe)
    check_folders(recipe, others)
    if recipe.data.tokenizer is not None:
        facts = replace(facts, tokenizer=_tokenizer_size(recipe.data.tokenizer))
    if recipe.model.hf is not None:
        facts = replace(facts, hf=read_hf(Path(recipe.model.hf)))
    if recipe.cluster != "auto":
        facts = replace(facts, cluster=_cluster(recipe.cluster))
    resolved = resolve(recipe, facts)
    check(resolved, facts)
    return resolved


def _cluster(source: str | Cluster) -> Cluster:
    return source if isinstance(source, Cluster) else load_cluster(source)


def _tokenizer_size(folder: str) -> int:
    try:
        return tokenizer_size(folder)
    except DataError as error:
        raise BadInputError(f"data.tokenizer is {folder}: {error}") from error
