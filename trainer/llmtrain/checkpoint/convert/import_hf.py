"""Import a Hugging Face folder as a checkpoint of step 0, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from llmtrain_data.progress import progress
from llmtrain_data.sync import sync_folder

from llmtrain.checkpoint.convert.generation import copy_generation
from llmtrain.checkpoint.convert.hf_mapping import hf_layout
from llmtrain.checkpoint.convert.hf_weights import hf_tensors
from llmtrain.checkpoint.convert.target import new_folder
from llmtrain.checkpoint.convert.tokenizer import copy_tokenizer
from llmtrain.checkpoint.folder import commit, step_name
from llmtrain.checkpoint.manifest import ITEM, Manifest
from llmtrain.checkpoint.safetensors_file import bytes_of
from llmtrain.checkpoint.shard_file import Range, merge_shard_files, write_shard_file
from llmtrain.model.hf_config import read_hf_config


def import_hf(source: Path, target: Path) -> None:
    """Make `target` a run's folder with the weights of `source` as its checkpoint of step 0.

    The checkpoint holds only the state `master`, no recipe, and the progress `step: 0`: a run that starts from it has
    new optimizer states. Copies the tokenizer to `target/tokenizer`. Raises BadInputError if the model is of an unknown
    kind, RunFailedError if the target cannot be written.
    """
    config = read_hf_config(source)
    specs = [part for tensor in hf_layout(config) for part in tensor.parts]
    ranges = [Range(spec.name, spec.shape, "master", 0, spec.numel) for spec in specs]
    tensors = hf_tensors(source, config)

    def contents() -> Iterator[memoryview]:
        with progress("import", sum(spec.numel for spec in specs) * ITEM, "bytes") as report:
            for _, tensor in tensors:
                yield bytes_of(tensor)
                report(tensor.numel() * ITEM)

    with new_folder(target) as folder:
        partial = folder / "checkpoints" / f"{step_name(0)}.partial"
        partial.mkdir(parents=True)
        shard_file = write_shard_file(partial / "rank-00000.safetensors", ranges, contents())
        files, entries = merge_shard_files([shard_file])
        manifest = Manifest(step=0, files=files, tensors=entries, progress={"step": 0}, recipe={}, model=asdict(config))
        commit(partial, partial.with_suffix(""), manifest)
        sync_folder(partial.parent)
        copy_tokenizer(source, folder / "tokenizer")
        copy_generation(source, folder / "tokenizer")
