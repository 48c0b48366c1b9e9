"""Read and write `run.json`, the facts of a run that its metrics and its report need. No torch in here."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from llmtrain_data import units
from llmtrain_data.bounds import Count, Number
from llmtrain_data.replace import replace_file
from llmtrain_data.untrusted import UnreadableError, read_bytes
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from llmtrain.telemetry.planned import in_words

_LARGEST = 2**20


class _Model(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    family: str
    layers: Count
    hidden: Count
    heads: Count
    vocab: Count


class _Run(TypedDict, total=False):
    """The keys that readers rely on if present; versions may differ in the rest."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    name: str
    cwd: str
    model: _Model
    parameters: Count
    steps: Count
    tokens_per_step: Count
    total_tokens: Count
    flops_per_token: Number
    world: Count
    device: str
    precision: str
    datasheet_peak: Number | None
    measured_peak: Number | None
    unigram_entropy: Number | None
    decisions: list[str]


def write_run_file(run_dir: Path, run: dict[str, Any]) -> None:
    """Write `run.json`; an existing file is replaced atomically."""
    replace_file(run_dir / "run.json", (json.dumps(run, indent=2) + "\n").encode())


def read_run_file(run_dir: Path) -> dict[str, Any]:
    """Return the content of `run.json`, empty if it is missing or cannot be read; any key may be missing."""
    try:
        return checked_run_file(run_dir)
    except UnreadableError:
        return {}


def checked_run_file(run_dir: Path) -> dict[str, Any]:
    """Return the content of `run.json`, empty if it is missing; any key may be missing.

    Raises UnreadableError if the file cannot be read or a value has the wrong type.
    """
    path = run_dir / "run.json"
    if not path.exists():
        return {}
    try:
        return dict(_adapter().validate_json(read_bytes(path, _LARGEST)))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise UnreadableError(f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()) from error


def facts(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) pairs that describe the run for people, from the content of `run.json`."""
    model = run["model"]
    shape = f"{model['family']}, {model['layers']} layers, hidden {model['hidden']}, {model['heads']} heads"
    ranks = f"{run['world']} x {run['device']}" if run["world"] > 1 else str(run["device"])
    found = [
        ("model", f"{shape}, vocabulary {model['vocab']}"),
        ("parameters", units.number(run["parameters"])),
        ("tokens", f"{units.number(run['total_tokens'])} ({units.number(run['tokens_per_step'])} per step)"),
        ("steps", str(run["steps"])),
        ("ranks", ranks),
        ("precision", str(run["precision"])),
        ("peak per rank", _peaks(run)),
    ]
    if planned := in_words(run.get("planned")):
        found.append(("planned", f"{planned}, on the main rank"))
    if run["unigram_entropy"] is not None:
        found.append(("unigram entropy", f"{run['unigram_entropy']:.4f} nats (validation tokens)"))
    return found


def _peaks(run: dict[str, Any]) -> str:
    peaks = (("datasheet_peak", "by data sheet"), ("measured_peak", "measured"))
    return ", ".join(f"{units.flops(run[key])} {how}" for key, how in peaks if run[key] is not None) or "unknown"


@cache
def _adapter() -> TypeAdapter[_Run]:
    return TypeAdapter(_Run)
