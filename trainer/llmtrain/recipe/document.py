"""The recipe's JSON schema, for editors that complete and check YAML."""

import re
from typing import Any

from llmtrain.recipe.load import recipe_adapter


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file; what a section's docstring says of a key describes that key."""
    schema: dict[str, Any] = recipe_adapter().json_schema(by_alias=True)
    schema["required"].remove("name")
    schema["properties"]["extends"] = {"type": "string"}
    schema["description"] += "\n\nname: of the run and its folder; the file's name by default.\n"
    schema["description"] += "extends: another recipe, by file or name, whose keys this one takes and changes."
    for definition in (schema, *schema["$defs"].values()):
        _describe_keys(definition)
    return schema


def _describe_keys(definition: dict[str, Any]) -> None:
    """Move the `key: text` parts of a section's description to its keys."""
    properties, text = definition["properties"], definition["description"]
    names = "|".join(map(re.escape, properties))
    starts = list(re.finditer(rf"(?:^|(?<=\s))((?:{names})(?:, (?:{names}))*): ", text))
    if not starts:
        return
    ends = [start.start() for start in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=True):
        for key in start[1].split(", "):
            properties[key]["description"] = " ".join(text[start.end() : end].split())
    definition["description"] = text[: starts[0].start()].strip()
