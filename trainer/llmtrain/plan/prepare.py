"""From a loaded recipe to a checked plan, before a run starts. No torch in here."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmtrain_data.errors import DataError
from llmtrain_data.tokenizer import tokenizer_size

from llmtrain.cluster.load import given_cluster
from llmtrain.errors import BadInputError
from llmtrain.model.hf_config import read_hf_config
from llmtrain.plan.check import check, check_folders, check_given
from llmtrain.plan.facts import Facts
from llmtrain.plan.make import make_plan
from llmtrain.plan.plan import Plan
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.shipped import find_recipe


def folders_above(name_or_path: str) -> list[Path]:
    """Return the recipe's own folder and those above it. Its paths may be relative to one of them by mistake."""
    return list(find_recipe(name_or_path).resolve().parents)


def check_and_plan(recipe: Recipe, facts: Facts, others: Sequence[Path] = ()) -> Plan:
    """Check a loaded recipe, plan it and check the plan. Raises BadInputError or DataError; writes nothing.

    facts: the ranks and the device; `named_facts` adds the rest. others: see `check_folders`.
    """
    check_recipe(recipe, others)
    facts = named_facts(recipe, facts)
    plan = make_plan(recipe, facts)
    check(plan, facts)
    return plan


def check_recipe(recipe: Recipe, others: Sequence[Path] = ()) -> None:
    """Check what can be checked without a plan: keys that contradict each other, and files and folders. Raises
    BadInputError. others: see `check_folders`."""
    check_given(recipe)
    check_folders(recipe, others)
    if recipe.data.tokenizer is not None:
        _tokenizer_size(recipe.data.tokenizer)


def named_facts(recipe: Recipe, facts: Facts) -> Facts:
    """Return facts with what a recipe names: the tokenizer's size, the Hugging Face model's shape and the cluster.
    Raises BadInputError."""
    tokenizer, folder = recipe.data.tokenizer, recipe.model.hf
    return replace(
        facts,
        tokenizer=None if tokenizer is None else _tokenizer_size(tokenizer),
        hf=None if folder is None else read_hf_config(Path(folder)),
        cluster=given_cluster(recipe.cluster),
    )


def _tokenizer_size(folder: str) -> int:
    try:
        return tokenizer_size(folder)
    except DataError as error:
        raise BadInputError(f"data.tokenizer is {folder}: {error}") from error
