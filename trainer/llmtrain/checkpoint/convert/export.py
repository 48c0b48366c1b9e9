"""Export a checkpoint to a Hugging Face folder, tensor by tensor."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from llmtrain_data.progress import progress

from llmtrain.checkpoint.convert.generation import GENERATION
from llmtrain.checkpoint.convert.hf_mapping import HFTensor, hf_layout
from llmtrain.checkpoint.convert.hf_weights import INDEX
from llmtrain.checkpoint.convert.target import new_folder
from llmtrain.checkpoint.convert.tokenizer import copy_tokenizer, name_class, special_tokens, tokenizer_of
from llmtrain.checkpoint.deleted import failure_of
from llmtrain.checkpoint.manifest import model_of
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.checkpoint.read import CheckpointReader
from llmtrain.checkpoint.safetensors_file import (
    ITEM_BYTES,
    DurableFile,
    FileTensor,
    bytes_of,
    safetensors_header,
)
from llmtrain.errors import BadInputError
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.hf_config import CONFIG, WEIGHTS, to_hf_config

HF_NAMES = {"fp32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16")}
"""The names of dtypes in safetensors files and in configurations."""


def export_hf(checkpoint: Path, target: Path, dtype: str, shard_bytes: int, tokenizer: Path | None) -> None:
    """Write the fp32 masters of a checkpoint as the Hugging Face folder `target`.

    dtype: fp32, bf16 or fp16. shard_bytes: largest size of a file, unless one tensor is larger. tokenizer: folder to
    copy the tokenizer from; None: the run's. Raises BadInputError, and RunFailedError if the checkpoint is damaged or
    deleted meanwhile, or the target cannot be written.
    """
    if dtype not in HF_NAMES:
        raise BadInputError(f"--dtype is {dtype!r}; expected one of {', '.join(HF_NAMES)}")
    try:
        with CheckpointReader(checkpoint) as reader:
            config = model_of(reader.manifest)
            tokenizer = tokenizer_of(checkpoint, reader.manifest.recipe) if tokenizer is None else tokenizer
            special = special_tokens(tokenizer)
            contents = to_hf_config(config, HF_NAMES[dtype][1], special)
            with new_folder(target) as folder:
                _write_weights(reader, hf_layout(config), folder, dtype, shard_bytes)
                _write_json(folder / CONFIG, contents)
                _write_json(folder / GENERATION, {"_from_model_config": True, **special})
                # Copy the tokenizer last: its own generation_config.json, if any, replaces ours.
                if tokenizer is not None:
                    copy_tokenizer(tokenizer, folder)
                    name_class(folder)
    except DamagedError as error:
        raise failure_of(checkpoint, error) from error


def _write_weights(
    reader: CheckpointReader, layout: Sequence[HFTensor], folder: Path, dtype: str, shard_bytes: int
) -> None:
    name, _ = HF_NAMES[dtype]
    shards = _shards(layout, ITEM_BYTES[name], shard_bytes)
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [WEIGHTS]
    total = sum(tensor.numel for tensor in layout) * ITEM_BYTES[name]
    with progress("export", total, "bytes") as report:
        for file, shard in zip(files, shards, strict=True):
            with DurableFile(folder / file) as out:
                tensors = [FileTensor(tensor.name, name, tensor.shape) for tensor in shard]
                out.write(safetensors_header(tensors, {"format": "pt"}))
                for tensor in shard:
                    out.write(bytes_of(_converted(reader, tensor, dtype)))
                    report(tensor.numel * ITEM_BYTES[name])
    if len(shards) > 1:
        placed = {t.name: file for file, shard in zip(files, shards, strict=True) for t in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _shards(layout: Sequence[HFTensor], item: int, shard_bytes: int) -> list[list[HFTensor]]:
    shards: list[list[HFTensor]] = [[]]
    size = 0
    for tensor in layout:
        if shards[-1] and size + tensor.numel * item > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.numel * item
    return shards


def _converted(reader: CheckpointReader, tensor: HFTensor, dtype: str) -> torch.Tensor:
    joined = tensor.join([reader.full_tensor(part.name, "master") for part in tensor.parts])
    result = joined.to(DTYPES[dtype])
    if dtype == "fp16" and bool((result.isinf() & joined.isfinite()).any()):
        raise BadInputError(f"--dtype is fp16, which cannot hold the values of {tensor.name}; use bf16")
    return result


def _write_json(path: Path, content: dict[str, object]) -> None:
    with DurableFile(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
