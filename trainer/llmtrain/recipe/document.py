"""The JSON schema of a recipe, for editors that complete and check YAML."""

import re
from typing import Any

from llmtrain.recipe.load import recipe_adapter


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file. The descriptions of keys come from the docstrings of their sections."""
    schema: dict[str, Any] = recipe_adapter().json_schema(by_alias=True)
    schema["required"].remove("name")
    schema["properties"]["extends"] = {"type": "string"}
    schema["description"] += "\n\nname: name of the run and of its folder; the file's name by default.\n"
    schema["description"] += "extends: another recipe, by file or name, whose keys this one takes and changes."
    for definition in (schema, *schema["$defs"].values()):
        _describe_keys(definition)
    for definition in (schema, *schema["$defs"].values()):
        _describe_sections(definition, schema["$defs"])
    return schema


def _describe_keys(definition: dict[str, Any]) -> None:
    """Move each `key: text` part of a section's description to that key."""
    properties, text = definition["properties"], definition["description"]
    names = "|".join(map(re.escape, properties))
    starts = list(re.finditer(rf"(?:^|(?<=\s))((?:{names})(?:,\s(?:{names}))*):\s", text))
    if not starts:
        return
    ends = [start.start() for start in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=True):
        for key in re.split(r",\s", start[1]):
            properties[key]["description"] = " ".join(text[start.end() : end].split()).rstrip(";")
    definition["description"] = text[: starts[0].start()].strip()


def _describe_sections(definition: dict[str, Any], sections: dict[str, Any]) -> None:
    """Describe a key that has no text of its own by the section that it holds."""
    for key in definition["properties"].values():
        named = re.search(r"#/\$defs/(\w+)", str(key))
        if "description" not in key and named:
            key["description"] = " ".join(sections[named[1]]["description"].split())
