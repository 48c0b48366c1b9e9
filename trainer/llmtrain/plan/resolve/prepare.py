"""From a loaded recipe to a checked plan, before a run starts. No torch in here."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llmtrain_data.checksums import read_checksums
from llmtrain_data.errors import DataError
from llmtrain_data.tokenizer import tokenizer_identity, tokenizer_size

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.load import given_cluster
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.check import check, check_given
from llmtrain.plan.resolve.folders import check_folders
from llmtrain.plan.resolve.hf_shape import hf_shape
from llmtrain.plan.resolve.make import make_plan
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
    BadInputError or DataError. others: see `check_folders`."""
    check_given(recipe)
    check_folders(recipe, others)
    if recipe.data.tokenizer is not None:
        _tokenizer_size(recipe.data.tokenizer)
    _check_prepared_with_tokenizer(recipe)


def named_facts(recipe: Recipe, facts: Facts) -> Facts:
    """Return facts with what a recipe names: the tokenizer's size, the Hugging Face model's shape, and the cluster, or
    the run's machine where the recipe leaves that open. Raises BadInputError."""
    tokenizer = recipe.data.tokenizer
    return replace(
        facts,
        tokenizer=None if tokenizer is None else _tokenizer_size(tokenizer),
        hf=hf_shape(recipe),
        cluster=given_cluster(recipe.cluster) or _machine(facts),
    )


def _machine(facts: Facts) -> Cluster | None:
    """Return the description of the run's machine, with a node of its ranks."""
    machine = facts.machine
    return machine and replace(machine, node=replace(machine.node, ranks=facts.world))


def _tokenizer_size(folder: str) -> int:
    try:
        return tokenizer_size(folder)
    except DataError as error:
        raise BadInputError(f"data.tokenizer is {folder}: {error}") from error


def _check_prepared_with_tokenizer(recipe: Recipe) -> None:
    """Raise BadInputError if a set records that another tokenizer than the run's prepared it."""
    key, folder = "data.tokenizer", recipe.data.tokenizer
    if folder is None:
        key, folder = "model.hf", recipe.model.hf
    known = list(_recorded(recipe))
    if folder is None or not known:
        return
    try:
        own = tokenizer_identity(folder)
    except DataError:
        # A model needs no tokenizer to be trained.
        if key == "model.hf":
            return
        raise
    for path, prefix, recorded in known:
        if recorded != own:
            raise BadInputError(
                f"{key} is {folder}, but the set {prefix} of data.{path} was prepared with another tokenizer; set "
                f"data.tokenizer to the one that prepared it, or prepare its texts again with {folder}"
            )


def _recorded(recipe: Recipe) -> Iterator[tuple[str, str, int]]:
    """Yield each set that records which tokenizer prepared it, after its key, with that tokenizer's identity."""
    for key, prefix in recipe.data.sets():
        # Opening the data reports damaged checksums.
        with suppress(DataError):
            checksums = read_checksums(prefix)
            if checksums is not None and checksums.encoding is not None:
                yield key, prefix, checksums.encoding.tokenizer
