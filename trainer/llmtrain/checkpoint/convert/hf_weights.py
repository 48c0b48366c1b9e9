"""Read the weights of a Hugging Face folder, one tensor at a time."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llmtrain_data.untrusted import UnreadableError, read_json, reason, regular
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmtrain.checkpoint.convert.hf_mapping import HFTensor, hf_layout
from llmtrain.errors import BadInputError
from llmtrain.model.config import GPTConfig
from llmtrain.yaml.shown import shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# A model with a head has its base model under this name; files that were saved from the base model lack the prefix.
_BASE = re.compile(r"^(transformer|model|gpt_neox)\.")
# Older versions saved these masks and frequencies, which follow from the config.
_DERIVED = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
_HEADS = ("lm_head.weight", "embed_out.weight")
# Most bytes of a file's header, enough for a hundred thousand tensors: the library reads all of it into memory.
_LARGEST_HEADER = 16 << 20


def hf_tensors(folder: Path, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, fp32 tensor of its canonical shape) of the Hugging Face model in `folder`.

    Yields every canonical tensor once, and holds at most one tensor of the files in memory. config: from
    `read_hf_config` of the folder. Raises BadInputError if a tensor is missing, has another shape or is not part of
    our model.
    """
    places = _places(folder)
    layout = hf_layout(config)
    found = {tensor.name: _find(tensor.name, places, folder) for tensor in layout}
    known = {name for name in places if _DERIVED.search(name)} | set(found.values())
    if config.tie_embeddings:
        known |= set(_HEADS)
    if unknown := sorted(places.keys() - known):
        raise BadInputError(
            f"{folder} holds {unknown[0]}, which our {config.family} model does not have; convert only plain "
            f"{config.family} models"
        )
    for tensor in layout:
        values = _get(places[found[tensor.name]], found[tensor.name], tensor)
        for part, canonical in zip(tensor.parts, tensor.split(values), strict=True):
            yield part.name, canonical


def _places(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, by tensor name."""
    places = {}
    for path in _files(folder):
        with _opened(path) as file:
            places.update(dict.fromkeys(file.keys(), path))
    return places


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with open(path, "rb", opener=regular) as raw:
            header = int.from_bytes(raw.read(8), "little")
        if header > _LARGEST_HEADER:
            raise BadInputError(f"{path} has a header of {header} bytes; expected at most {_LARGEST_HEADER}")
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"{path} cannot be read as a safetensors file: {reason(error)}") from error


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        pickled = any(folder.glob("pytorch_model*.bin"))
        hint = "; its pytorch_model.bin is a pickle, so save it anew with save_pretrained" if pickled else ""
        raise BadInputError(f"{folder} holds neither {WEIGHTS} nor {INDEX}{hint}")
    wrong = f"{folder / INDEX} cannot be read as an index of weights"
    try:
        index = read_json(folder / INDEX)
    except UnreadableError as error:
        raise BadInputError(f"{wrong}: {error}") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise BadInputError(f"{wrong}: it has no weight_map with a file for each tensor; save the model anew")
    names = sorted(set(places.values()))
    if strays := [name for name in names if Path(name).name != name or not name.isprintable()]:
        raise BadInputError(f"{folder / INDEX} names {shown(strays[0])}; expected files of the same folder")
    return [folder / name for name in names]


def _find(name: str, places: dict[str, Path], folder: Path) -> str:
    """Return the tensor's name in the folder. Raises BadInputError if the folder lacks the tensor."""
    candidates = [name, _BASE.sub("", name), *(_HEADS if name in _HEADS else ())]
    for candidate in candidates:
        if candidate in places:
            return candidate
    raise BadInputError(f"{folder} lacks the tensor {name}; its weights are not those of its config.json")


def _get(path: Path, name: str, expected: HFTensor) -> Tensor:
    # Open the file for each tensor: the pages of a file that stays mapped would all be in memory in the end.
    with _opened(path) as file:
        values: Tensor = file.get_tensor(name)
    if tuple(values.shape) != expected.shape:
        shape = list(values.shape)
        raise BadInputError(f"{name} in {path} has shape {shape}; its config.json says {list(expected.shape)}")
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise BadInputError(f"{name} in {path} is of type {values.dtype}; expected fp32, bf16 or fp16")
    return values.float()
