"""The JSON schema of a recipe, for editors that complete and check YAML."""

import re
from typing import Any

from llmtrain.recipe.load import recipe_adapter


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file. The descriptions of keys come from the docstrings of their sections."""
    schema: dict[str, Any] = recipe_adapter().json_schema(by_alias=True)
    schema["properties"]["extends"] = {"type": "string"}
    schema["description"] += "\n\nname: name of the run and of its folder; the file's name by default.\n"
    schema["description"] += "extends: another recipe, by file or name, whose keys this one takes and changes."
    for definition in (schema, *schema["$defs"].values()):
        # `extends` or the command line may give a key that the file lacks.
        definition.pop("required", None)
        describe_keys(definition)
    for definition in (schema, *schema["$defs"].values()):
        _describe_sections(definition, schema["$defs"])
    return schema


def describe_keys(definition: dict[str, Any]) -> None:
    """Move each `key: text` part of a section's description to that key. Raises ValueError for a key with two."""
    properties, text = definition["properties"], definition["description"]
    names = "|".join(map(re.escape, properties))
    starts = list(re.finditer(rf"(?:^|(?<=\s))((?:{names})(?:,\s(?:{names}))*):\s", text))
    if not starts:
        return
    texts = dict[str, str]()
    ends = [start.start() for start in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=True):
        for key in re.split(r",\s", start[1]):
            if key in texts:
                raise ValueError(f"{definition['title']} describes {key} twice; reword the text where it is not meant")
            texts[key] = " ".join(text[start.end() : end].split()).rstrip(";")
    for key, described in texts.items():
        properties[key]["description"] = described
    definition["description"] = text[: starts[0].start()].strip()


def _describe_sections(definition: dict[str, Any], sections: dict[str, Any]) -> None:
    """Describe a key that has no text of its own by the section that it holds."""
    for key in definition["properties"].values():
        named = re.search(r"#/\$defs/(\w+)", str(key))
        if "description" not in key and named:
            key["description"] = " ".join(sections[named[1]]["description"].split())
