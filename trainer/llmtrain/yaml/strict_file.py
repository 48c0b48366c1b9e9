"""Reading a YAML file of known keys into a dataclass. Every error is one sentence."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from llmtrain.errors import BadInputError
from llmtrain.yaml.file import YAML_ERRORS, read_yaml, yaml_problem
from llmtrain.yaml.shown import shown, shown_key
from llmtrain.yaml.yaml11 import as_meant

T = TypeVar("T")

# YAML 1.1 reads the time 24:00:00 as a base-60 number.
_BASE_60 = re.compile(r"(?m)^([ \t]*\w+:\s+)(\d+(?::\d+)+)(?=\s*(?:#.*)?$)")


@dataclass(frozen=True)
class StrictFile(Generic[T]):
    """A kind of file. section: the dataclass of its content. noun: the thing that it describes, such as `a cluster`."""

    section: type[T]
    noun: str

    def read(self, path: Path) -> dict[str, Any]:
        """Return the file's content as plain data. Raises BadInputError."""
        wrong = f"does not describe {self.noun}"
        content = read_yaml(path, wrong, lambda text: _BASE_60.sub(r"\1'\2'", text))
        try:
            plain = OmegaConf.to_container(content)
        except YAML_ERRORS as error:
            raise BadInputError(f"{path} {wrong}: {yaml_problem(error)}") from error
        assert isinstance(plain, dict)
        return {str(name): value for name, value in plain.items()}

    def parse(self, data: Mapping[str, Any], where: str) -> T:
        """Return the section in plain data. where: prefix of error messages. Raises BadInputError."""
        try:
            return TypeAdapter(self.section).validate_json(json.dumps(as_meant(dict(data), self.section)))
        except TypeError as error:
            raise BadInputError(f"{where.rstrip('.: ')} holds what is not plain YAML: {error}") from error
        except ValidationError as error:
            raise BadInputError(where + self._explain(error)) from error

    def _explain(self, error: ValidationError) -> str:
        """Return the key, the value and what was expected, for the first error; unknown keys come first."""
        unknown = "unexpected_keyword_argument"
        details = min(error.errors(include_url=False), key=lambda found: found["type"] != unknown)
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"]).lstrip(".")
        if details["type"] == unknown:
            near = self._nearest([str(part) for part in details["loc"] if isinstance(part, str)])
            known = ", ".join(entry.name for entry in fields(self.section))  # type: ignore[arg-type]
            return f"{shown_key(key)} is no key of {self.noun}; " + (
                f"did you mean {near}?" if near else f"expected {known}"
            )
        if details["type"] == "value_error":
            return ".".join(filter(None, (key, str(details["ctx"]["error"]))))
        if details["type"].startswith("missing"):
            return f"{key} is missing; every description of {self.noun} needs it"
        if details["type"] == "string_type":
            return (
                f"{key} is {shown(details['input'])}; expected a text: in quotes if it is a name, with its unit if it "
                "is a quantity, such as 100Gbit/s or 5us"
            )
        wanted = details["msg"].removeprefix("Input should be ")
        wanted = f"a number {wanted}" if wanted.startswith(("greater than", "less than")) else wanted
        return f"{key} is {shown(details['input'])}; expected {wanted}"

    def _nearest(self, parts: list[str]) -> str | None:
        """Return the key that `parts` most likely stands for, if misspelt or in the wrong section."""
        known = dict.fromkeys(_walk(self.section, ""))
        section, leaf = "".join(f"{part}." for part in parts[:-1]), parts[-1]
        siblings = [key for key in known if key.startswith(section) and "." not in key.removeprefix(section)]
        leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
        near = get_close_matches(section + leaf, siblings, n=1, cutoff=0.75)
        near = near or [leaves[name] for name in get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
        return near[0] if near else None


def _walk(section: type, prefix: str) -> Iterator[str]:
    """Yield every key by its dotted name, without indices for sections in lists."""
    for name, hint in get_type_hints(section).items():
        if name not in {entry.name for entry in fields(section)}:
            continue
        yield prefix + name
        for option in (hint, *get_args(hint)):
            if is_dataclass(option) and isinstance(option, type):
                yield from _walk(option, f"{prefix}{name}.")
