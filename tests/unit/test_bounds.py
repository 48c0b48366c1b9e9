"""Every number of a recipe, a cluster description and a site's profile has bounds, and the errors name them."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from llmtrain.errors import BadInputError
from llmtrain.launch.slurm.config import Site
from llmtrain.model.config import GPTConfig
from llmtrain.recipe.keys import recipe_keys
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe
from pydantic import TypeAdapter, ValidationError

# The command line sets these.
NEEDED = ("data.path=x", "data.tokenizer=x")
HUGE = {int: (2**63, -(2**63)), float: (1e308, -1e308)}


def numbers(hint: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield each number in a type, with its dotted key."""
    if get_origin(hint) is Annotated and get_args(hint)[0] in (int, float):
        yield key, hint
    elif is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint, include_extras=True)
        for entry in fields(hint):
            yield from numbers(hints[entry.name], f"{key}.{entry.name}")
    elif hint in (int, float):
        yield key, hint
    else:
        for part in get_args(hint):
            yield from numbers(part, key)


NUMBERS = [found for section in (Recipe, Site, GPTConfig) for found in numbers(section, section.__name__)]


@pytest.mark.parametrize(("key", "hint"), NUMBERS, ids=[key for key, _ in NUMBERS])
def test_every_number_has_bounds(key: str, hint: Any) -> None:
    for value in HUGE[get_args(hint)[0] if get_args(hint) else hint]:
        with pytest.raises(ValidationError, match="than"):
            TypeAdapter(hint).validate_json(repr(value), strict=True)


@pytest.mark.parametrize(
    "key",
    [key for key, hint in recipe_keys().items() if list(numbers(hint, key)) == [(key, hint)] and "[]" not in key],
)
def test_a_recipe_says_which_numbers_it_takes(key: str) -> None:
    with pytest.raises(
        BadInputError, match=rf"^{key} is -9.*; expected a (whole )?number (from|above) .* (to|below) .*"
    ):
        load_recipe("gpt2-124m", [*NEEDED, f"{key}=-9e17"])


def test_the_ends_of_a_range_are_in_it() -> None:
    for text in (
        "train.timeout=1",
        "train.timeout=1000000",
        "optimizer.decay=0",
        "optimizer.decay=1",
        "model.dropout=0",
    ):
        load_recipe("gpt2-124m", [*NEEDED, text])
    for text in (
        "train.timeout=0.9",
        "train.timeout=1000001",
        "optimizer.decay=1.1",
        "model.dropout=1",
        "model.norm_eps=0",
    ):
        with pytest.raises(BadInputError, match="expected a number"):
            load_recipe("gpt2-124m", [*NEEDED, text])
