"""Read the weights of a Hugging Face folder, one tensor or a part of it at a time."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from llmtrain_data.untrusted import FETCH, LFS, UnreadableError, read_json, reason, regular
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmtrain.checkpoint.convert.hf_mapping import HFTensor, hf_layout
from llmtrain.checkpoint.safetensors_file import ITEM_BYTES
from llmtrain.errors import BadInputError
from llmtrain.model.config import GPTConfig
from llmtrain.model.hf_config import WEIGHTS
from llmtrain.yaml.shown import shown

INDEX = f"{WEIGHTS}.index.json"
# A model with a head has its base model under this name; files that were saved from the base model lack the prefix.
_BASE = re.compile(r"^(transformer|model|gpt_neox)\.")
# Older versions saved these masks and frequencies, which follow from the config.
_DERIVED = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
_HEADS = ("lm_head.weight", "embed_out.weight")
# Rows of a tied head that are compared with the embedding: about as many all over it, and at its end, where added
# tokens are.
_COMPARED = 64
# Most bytes of a file's header, enough for a hundred thousand tensors: the library reads all of it into memory.
_LARGEST_HEADER = 16 << 20


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is. dtype: safetensors' name for it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def hf_tensors(folder: Path, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, fp32 tensor of its canonical shape) of the Hugging Face model in `folder`.

    Yields every canonical tensor once. See `hf_ranges` for the rest.
    """
    specs = {part.name: part for tensor in hf_layout(config) for part in tensor.parts}
    for name, values in hf_ranges(folder, config, {name: (0, spec.numel) for name, spec in specs.items()}):
        yield name, values.view(specs[name].shape)


def hf_ranges(folder: Path, config: GPTConfig, wanted: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, elements) of each wanted range of the Hugging Face model in `folder`, by tensor.

    wanted: by canonical name, the `[first, last)` of the tensor's elements, not empty. elements: fp32 `[last - first]`,
    contiguous. Reads only the rows of the range (of a matrix that the files hold transposed: the columns), and holds at
    most one tensor in memory. config: from `read_hf_config` of the folder. Raises BadInputError if a tensor, wanted or
    not, is missing, has another shape or is not part of our model.
    """
    stored = _stored(folder, config)
    for tensor in hf_layout(config):
        wanted_parts = [(index, part) for index, part in enumerate(tensor.parts) if part.name in wanted]
        if not wanted_parts:
            continue
        source = stored[tensor.name]
        # Open the file for each tensor: the pages of a file that stays mapped would all be in memory in the end.
        with _reading(source.path), safe_open(source.path, framework="pt") as file:
            values = file.get_slice(source.name)
            for index, part in wanted_parts:
                first, last = wanted[part.name]
                row = prod(part.shape[1:])
                start = first // row
                rows = tensor.rows(index, start, -(-last // row), values)
                yield part.name, rows.float().flatten()[first - start * row : last - start * row]


def _stored(folder: Path, config: GPTConfig) -> dict[str, _Stored]:
    """Return where each tensor of the layout is stored, by its name there, after checking all of them."""
    in_files = _in_files(folder)
    layout = hf_layout(config)
    found = {tensor.name: _find(tensor.name, in_files, folder) for tensor in layout}
    known = {name for name in in_files if _DERIVED.search(name)} | {one.name for one in found.values()}
    if config.tie_embeddings:
        known |= set(_HEADS)
    if unknown := sorted(in_files.keys() - known):
        raise BadInputError(
            f"{folder} holds {unknown[0]}, which our {config.family} model does not have; convert only plain "
            f"{config.family} models"
        )
    for tensor in layout:
        _check(found[tensor.name], tensor)
    if config.tie_embeddings:
        for head in filter(None, map(in_files.get, _HEADS)):
            _check_tied(found[layout[0].name], head)
    return found


def _check_tied(embedding: _Stored, head: _Stored) -> None:
    """Raise BadInputError if rows of a stored head are not those of the embedding: transformers would then not tie
    them."""
    count = head.shape[0] if head.shape else 0
    rows = sorted({*range(0, count, max(1, count // _COMPARED)), *range(max(0, count - _COMPARED), count)})
    same = head.shape == embedding.shape and torch.equal(_rows(embedding, rows), _rows(head, rows))
    if not same:
        raise BadInputError(
            f"{head.name} in {head.path} is not {embedding.name}, but config.json ties them; set tie_word_embeddings "
            "to false there to keep the head"
        )


def _rows(stored: _Stored, rows: Sequence[int]) -> Tensor:
    with _reading(stored.path), safe_open(stored.path, framework="pt") as file:
        values = file.get_slice(stored.name)
        return torch.cat([values[row : row + 1].float() for row in rows])


def _in_files(folder: Path) -> dict[str, _Stored]:
    """Return where each tensor is stored, by its name in the files."""
    found = {}
    for path in _files(folder):
        with _reading(path):
            with open(path, "rb", opener=regular) as raw:
                begin = raw.read(len(LFS))
            if begin == LFS:
                raise BadInputError(f"{path} holds no weights: {FETCH}")
            if (header := int.from_bytes(begin[:8], "little")) > _LARGEST_HEADER:
                raise BadInputError(f"{path} has a header of {header} bytes; expected at most {_LARGEST_HEADER}")
            with safe_open(path, framework="pt") as file:
                for name in list(file.keys()):
                    values = file.get_slice(name)
                    found[name] = _Stored(path, name, tuple(values.get_shape()), values.get_dtype())
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
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
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise BadInputError(f"{wrong}: it has no weight_map with a file for each tensor; save the model anew")
    names = sorted(set(weight_map.values()))
    if strays := [name for name in names if Path(name).name != name or not name.isprintable()]:
        raise BadInputError(f"{folder / INDEX} names {shown(strays[0])}; expected files of the same folder")
    return [folder / name for name in names]


def _find(name: str, in_files: dict[str, _Stored], folder: Path) -> _Stored:
    """Return where the tensor is stored. Raises BadInputError if the folder lacks the tensor."""
    candidates = [name, _BASE.sub("", name), *(_HEADS if name in _HEADS else ())]
    for candidate in candidates:
        if candidate in in_files:
            return in_files[candidate]
    raise BadInputError(f"{folder} lacks the tensor {name}; its weights are not those of its config.json")


def _check(stored: _Stored, expected: HFTensor) -> None:
    where = f"{stored.name} in {stored.path}"
    if stored.shape != expected.shape:
        raise BadInputError(f"{where} has shape {list(stored.shape)}; its config.json says {list(expected.shape)}")
    if stored.dtype not in ITEM_BYTES:
        raise BadInputError(f"{where} is of type {stored.dtype}; expected fp32, bf16 or fp16")
