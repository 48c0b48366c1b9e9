"""The manifest of a checkpoint: the place of every range of every tensor, and checksums of every byte (see
`checksums`).

A manifest is untrusted: it must not name a path outside the folder, and no memory is allocated by sizes that only it
states.
"""

import json
import os
import re
from collections import defaultdict
from dataclasses import asdict
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Literal

from llmtrain_data.bounds import Count
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from llmtrain.checkpoint.checksums import Digest, sidecar
from llmtrain.checkpoint.plain_file import DamagedError, open_plain, read_into
from llmtrain.errors import BadInputError
from llmtrain.model.config import GPTConfig, may_differ
from llmtrain.model.tensors import model_units
from llmtrain.plan.collection import without_collection
from llmtrain.plan.memory.checkpoint_copies import SHARD_FILE_BLOCK

MANIFEST, SIDECAR = "manifest.json", "manifest.json.xxh3"
ITEM = 4
# Enough for a model of 80 layers whose optimizer states are sharded over 37,000 ranks.
_LARGEST_MANIFEST = 1024**3
# The format's own limit.
_LARGEST_HEADER = 100_000_008
_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")
STEP_FOLDER = re.compile(r"step-(\d{8,})")
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoredRange:
    """The elements `[start, end)` of one state of one tensor, fp32, at byte `offset` of a file.

    xxh3: one XXH3-64 digest for each block of `Manifest.block` bytes, the last one shorter.
    """

    start: Count
    end: Count
    file: str
    offset: Count
    xxh3: list[Digest]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return (self.end - self.start) * ITEM


@dataclass(frozen=True, config=_STRICT)
class FileEntry:
    """One safetensors file. header: its bytes before the data, xxh3: their digest."""

    bytes: Count
    header: Annotated[int, Field(ge=8, le=_LARGEST_HEADER)]
    xxh3: Digest


@dataclass(frozen=True, config=_STRICT)
class TensorEntry:
    """One canonical tensor. states: by name, the stored ranges that make up the tensor, in order."""

    shape: list[Annotated[int, Field(ge=1)]]
    states: dict[str, list[StoredRange]]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Manifest:
    """The content of a checkpoint.

    block: bytes that one checksum covers. progress: the training loop's state, to resume from here. recipe: the
    resolved recipe. model: GPTConfig as a mapping.
    """

    step: Count
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    progress: dict[str, JsonValue]
    recipe: dict[str, JsonValue]
    model: dict[str, JsonValue]
    block: Annotated[int, Field(ge=4096, le=64 * 1024**2, multiple_of=ITEM)] = SHARD_FILE_BLOCK
    format: Literal["llmtrain-checkpoint"] = "llmtrain-checkpoint"
    version: Literal[1] = 1

    @cached_property
    def states(self) -> set[str]:
        """Names of the states, the same for every tensor."""
        return set().union(*(entry.states for entry in self.tensors.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files."""
        return sum(entry.bytes for entry in self.files.values())


def model_of(manifest: Manifest) -> GPTConfig:
    """Return the checkpoint's model. Raises DamagedError if the tensors are not those of the model."""
    try:
        config = GPTConfig.of(manifest.model)
        if config.layers > len(manifest.tensors):
            raise ValueError(f"{config.layers} layers but {len(manifest.tensors)} tensors")
        wanted = {t.name: list(t.shape) for unit in model_units(config) for t in unit.tensors}
    except ValueError as error:
        raise DamagedError(f"{MANIFEST} describes no model: {error}") from error
    if wanted != {name: entry.shape for name, entry in manifest.tensors.items()}:
        raise DamagedError(f"{MANIFEST} lists tensors that are not those of the model it describes")
    return config


def check_model(folder: Path, manifest: Manifest, model: GPTConfig, weights_alone: bool = False) -> list[str]:
    """Raise BadInputError unless `model` is that of the checkpoint in `folder`, except for keys that `may_differ`;
    DamagedError as `model_of` does.

    Return a sentence for each key that differs, for a run that takes the weights alone: its recipe may just leave the
    key out, and weights that were trained with other frequencies of RoPE are worth less.
    """
    saved, wanted = asdict(model_of(manifest)), asdict(model)
    free = may_differ(model.family, weights_alone)
    differing = [key for key in wanted if saved[key] != wanted[key]]
    for key in differing:
        if key not in free:
            raise BadInputError(
                f"model.{key} is {wanted[key]} in the recipe but {saved[key]} in the checkpoint "
                f"{folder}; make the recipe's model the same"
            )
    return [
        f"model.{key} is {json.dumps(wanted[key])}, and {json.dumps(saved[key])} in {folder}; set it to that unless "
        "the run is to change it"
        for key in differing
        if weights_alone
    ]


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def encode(manifest: Manifest) -> tuple[bytes, bytes]:
    """Return the contents of the manifest and of its sidecar. Raises DamagedError if no load would read so much."""
    # json's encoder takes 20 times as long, in which the training thread gets no turn.
    text = _adapter().dump_json(manifest)
    if len(text) > _LARGEST_MANIFEST:
        raise DamagedError(
            f"{MANIFEST} would be {len(text)} bytes long, but a load reads at most {_LARGEST_MANIFEST}; shard the "
            "optimizer states over fewer ranks (zero.partition.optimizer)"
        )
    return text, sidecar(MANIFEST, text)


def read_manifest(folder: Path) -> Manifest:
    """Read, verify and check the manifest of the checkpoint in `folder`. Raises DamagedError."""
    text, sealed = _read(folder / MANIFEST), _read(folder / SIDECAR)
    if sealed != sidecar(MANIFEST, text):
        raise DamagedError(f"{MANIFEST} does not match its checksum in {SIDECAR}")
    try:
        with without_collection():
            manifest = _adapter().validate_json(text)
            check(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        raise DamagedError(f"{MANIFEST} is not a checkpoint's manifest: {location}: {first['msg']}") from error
    named = STEP_FOLDER.fullmatch(folder.resolve().name)
    if named is not None and int(named[1]) != manifest.step:
        raise DamagedError(f"{MANIFEST} is of step {manifest.step}, but its folder is named {named[0]}; rename it back")
    return manifest


def _read(path: Path) -> bytearray:
    fd, size = open_plain(path)
    try:
        if size > _LARGEST_MANIFEST:
            raise DamagedError(f"{path.name} is {size} bytes long, too large for a manifest")
        content = bytearray(size)
        if not read_into(fd, memoryview(content), 0):
            raise DamagedError(f"{path.name} cannot be read")
        return content
    finally:
        os.close(fd)


def check(manifest: Manifest) -> None:
    """Raise DamagedError unless the stored ranges tile every tensor and every file, inside the folder."""
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise DamagedError(f"{MANIFEST} names the file {name!r}, which no checkpoint has")
    placed = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        if set(tensor.states) != manifest.states:
            raise DamagedError(f"{MANIFEST} lists only the states {sorted(tensor.states)} of {name}")
        for state, ranges in tensor.states.items():
            _check_tiling(f"{name} ({state})", [(r.start, r.end) for r in ranges], 0, prod(tensor.shape))
            for stored in ranges:
                if len(stored.xxh3) != -(-stored.nbytes // manifest.block):
                    raise DamagedError(f"{MANIFEST} has {len(stored.xxh3)} checksums for a range of {name}")
                placed[stored.file].append((stored.offset, stored.offset + stored.nbytes))
    if not placed.keys() <= manifest.files.keys():
        raise DamagedError(f"{MANIFEST} places tensors in files that it does not list")
    for name, entry in manifest.files.items():
        _check_tiling(name, sorted(placed[name]), entry.header, entry.bytes)


def _check_tiling(what: str, ranges: list[tuple[int, int]], start: int, end: int) -> None:
    for first, last in ranges:
        if first != start or last < first:
            break
        start = last
    if start != end:
        raise DamagedError(f"{MANIFEST} leaves gaps or overlaps in {what}")
