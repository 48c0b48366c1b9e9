"""The JSON schema of a recipe: every key has its own description, and what a recipe's file may lack is not required."""

import re

import pytest
from llmtrain.recipe.document import describe_keys, recipe_schema
from llmtrain.recipe.keys import recipe_keys


def test_every_key_of_the_schema_is_known() -> None:
    schema = recipe_schema()
    assert set(schema["properties"]) == {key for key in recipe_keys() if "." not in key} | {"extends"}
    for section in (schema, *schema["$defs"].values()):
        for key, about in section["properties"].items():
            assert len(about.get("description", "").split()) > 1, f"{section['title']}.{key} has no description"
        # The description of a key is with the key, not with its section.
        assert not re.search(rf"(^|\s)({'|'.join(section['properties'])}):\s", section["description"])
    checkpoint = schema["$defs"]["CheckpointConfig"]["properties"]
    assert checkpoint["async"]["description"].startswith("write in the background")


def test_a_key_has_the_text_that_is_about_it() -> None:
    precision = recipe_schema()["$defs"]["PrecisionConfig"]["properties"]
    assert precision["gradients"]["description"].startswith("dtype of the sums of gradients over microbatches: fp32")
    assert precision["reduce"]["description"].startswith("dtype of the sums that ranks send each other: compute, or")


def test_a_key_with_two_texts_is_refused() -> None:
    text = "A section.\n\nfirst: a number. second: another number of first: none."
    with pytest.raises(ValueError, match="Section describes first twice"):
        describe_keys({"title": "Section", "description": text, "properties": {"first": {}, "second": {}}})


def test_no_key_is_required_as_another_recipe_or_the_command_line_may_give_it() -> None:
    schema = recipe_schema()
    assert [one for one in (schema, *schema["$defs"].values()) if "required" in one] == []
