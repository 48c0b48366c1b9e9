"""Load a trained model from a checkpoint, evaluate it, and sample from it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from llmtrain_data import units as quantities
from llmtrain_data.config import DataConfig
from llmtrain_data.dataset import SamplePart, Samples, Split, open_split
from llmtrain_data.errors import DataError
from llmtrain_data.indexed import bin_path
from llmtrain_data.tokenizer import ids_before_text, known_end_of_text_id, load_tokenizer, tokenizer_identity
from llmtrain_data.waiting import Waiting
from llmtrain_kernels.attention.op import take_kernel
from pydantic import JsonValue, TypeAdapter, ValidationError

from llmtrain.checkpoint.convert.generation import end_tokens
from llmtrain.checkpoint.convert.tokenizer import has_tokenizer, tokenizer_of
from llmtrain.checkpoint.folder import find_checkpoints
from llmtrain.checkpoint.load import load
from llmtrain.checkpoint.manifest import MANIFEST, model_of, read_manifest
from llmtrain.checkpoint.plain_file import DamagedError, UnreachableError, patiently
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.memory import machine_memory
from llmtrain.comm.device import gpu_memory
from llmtrain.comm.ranks import Ranks, connect
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.inference.generate import Sampling, generate
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import model_units
from llmtrain.plan.resolve.folders import found_elsewhere
from llmtrain.sharding.parameters import UnitParameters
from llmtrain.telemetry.metrics import perplexity_of
from llmtrain.telemetry.run_file import read_run_file
from llmtrain.training.evaluate import mean_loss
from llmtrain.training.run_data import document_begin

if TYPE_CHECKING:
    import tokenizers

# Tokens of the prompt that are decoded before the generated ones.
_CONTEXT = 16
# Tokens of the samples that an imported model is evaluated on, unless the user gives another number or the model has
# fewer positions. A Llama 3.1 has 131,072.
_LONGEST = 4096


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A checkpoint's model on this machine's device.

    folder: the checkpoint's. data: the section of the recipe in the checkpoint; None for an imported one, which has no
    recipe. progress: the training loop's state. tokenizer: None if there is none. notice: called after every check,
    before the computation begins: it says what the user should know of that.
    """

    folder: Path
    model: GPT
    data: JsonValue
    progress: Mapping[str, JsonValue]
    step: int
    tokenizer: Path | None
    ranks: Ranks
    notice: Callable[[], None] = lambda: None


def open_model(
    source: Path, warn: Callable[[str], None], waiting: Waiting | None = None, dtype: str = "auto"
) -> TrainedModel:
    """Load a checkpoint, or a run's newest sound one.

    warn: called with a sentence for each damaged or deleted checkpoint, which is skipped. waiting: shows the
    progress of the load and of later work with the model. dtype: of weights and computation, fp32, bf16 or fp16;
    auto: on a GPU as the run computed, on a CPU fp32. Raises RunFailedError if no checkpoint is sound, BadInputError if
    the weights do not fit the memory, UnreachableError or OSError if a checkpoint cannot be read that may be sound.
    """
    tried: list[Path] = []
    # List again after each: a run that has deleted the one that was read has newer ones.
    while left := [folder for folder in find_checkpoints(source) if folder not in tried]:
        tried.append(left[0])
        try:
            return _open(left[0], waiting, dtype)
        except (DamagedError, RunFailedError) as error:
            if not left[0].is_dir():
                warn(f"skipped the checkpoint {left[0]}: its run has deleted it meanwhile (checkpoint.keep)")
            elif isinstance(error, UnreachableError):
                raise
            else:
                warn(f"skipped the checkpoint {left[0]}: {error}")
    raise RunFailedError(f"none of the checkpoints in {source} is sound, see above; give another run or checkpoint")


def _open(folder: Path, waiting: Waiting | None, dtype: str) -> TrainedModel:
    ranks = connect(Layout({Axis.DATA: 1}))
    ranks.activity.begin(f"loading the checkpoint {folder.name}")
    if waiting is not None:
        waiting.doing = ranks.activity.doing
    manifest = patiently(folder / MANIFEST, lambda: read_manifest(folder))
    config, memory = model_of(manifest), gpu_memory(ranks.device)
    computed, units = _dtype(dtype, manifest.recipe, memory is not None), model_units(config)
    _check_memory(sum(unit.numel for unit in units) * computed.itemsize, memory)
    # By itself torch may take cuDNN's, which builds a graph for each length, and with which the run has not trained.
    take_kernel("torch")
    model = GPT(config, ranks.device)
    weights = [(unit, torch.empty(unit.numel, dtype=computed, device=ranks.device)) for unit in units]
    load(folder, [StateShard(unit, 0, unit.numel, {"master": weight}) for unit, weight in weights], ranks)
    for unit, weight in weights:
        UnitParameters(unit, model.unit(unit.name), weight, gathered=True)
    # Other sections of the recipe do not matter, and may be of another version.
    data, tokenizer = manifest.recipe.get("data"), tokenizer_of(folder, manifest.recipe)
    return TrainedModel(
        folder=folder.resolve(),
        model=model.eval(),
        data=data,
        progress=manifest.progress,
        step=manifest.step,
        tokenizer=tokenizer if tokenizer is not None and has_tokenizer(tokenizer) else None,
        ranks=ranks,
    )


def _dtype(asked: str, recipe: Mapping[str, JsonValue], on_gpu: bool) -> torch.dtype:
    if asked == "auto":
        precision = recipe.get("precision")
        trained = precision.get("compute") if isinstance(precision, dict) else None
        asked = str(trained) if on_gpu and trained in ("bf16", "fp16") else "fp32"
    return DTYPES[asked]


def _check_memory(needed: int, gpu: int | None) -> None:
    """Raise BadInputError if weights of `needed` bytes do not fit the memory. gpu: that of the GPU, None without
    one."""
    # A model that needs the swap space is slow, but computes.
    memory = machine_memory(swap=True) if gpu is None else gpu
    if needed > memory:
        what = "machine" if gpu is None else "GPU"
        more = "" if gpu is None else ", and with CUDA_VISIBLE_DEVICES= the processors compute"
        raise BadInputError(
            f"the model's weights take {quantities.size(needed)}, and this {what} has {quantities.size(memory)}; "
            f"--dtype bf16 takes half of fp32{more}"
        )


def evaluate_on(
    trained: TrainedModel,
    split: Split | None,
    prefix: str | None,
    count: int,
    microbatch: int,
    sequence_length: int | None = None,
) -> dict[str, Any]:
    """Return loss (nats per token) and perplexity over `count` samples of a split, with facts about them.

    split: None for all documents of `prefix`, or for the validation documents of the recipe's data. prefix: a prepared
    set in place of the recipe's. count: the first so many samples of the order; 0 for all, each once. Of all samples of
    a blend, `sources` has the loss of each source, and the loss is their mean, weighted by the blend's weights.
    sequence_length: tokens per sample; None for the recipe's, or the positions of an imported model. Raises
    BadInputError.
    """
    data = _data(trained, prefix)
    if sequence_length is not None:
        if sequence_length > (most := trained.model.config.positions):
            raise BadInputError(
                f"--sequence-length is {sequence_length}; expected at most the model's positions, {most}"
            )
        data = replace(data, sequence_length=sequence_length)
    everything = prefix is not None and split is None
    name = "all" if everything else split or "valid"
    if name == "valid" and data.validation is not None:
        everything, data = True, data.all_of(data.validation)
    elif everything:
        data = data.all_of(data.path)
    for _, path in data.blend():
        if not bin_path(path).exists() and (found := found_elsewhere(path, ".bin", _folders_of(trained))):
            raise BadInputError(f"there is no file {path}.bin; {found} with --data")
    samples = open_split(data, "train" if everything else split or "valid", trained.model.config.vocab)
    if prefix is not None:
        _check_prepared_with_tokenizer(trained, samples)
    samples.check_ids()
    trained.notice()

    def losses_of(batches: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        yield from ((1, [trained.model(rows[:, :-1], rows[:, 1:])]) for rows in batches)

    parts = [SamplePart(samples, min(count, len(samples)), 1.0)] if count else samples.whole()
    losses = [
        mean_loss(trained.model, losses_of, part.samples, part.count, microbatch, trained.ranks) for part in parts
    ]
    loss = sum(part.share * each for part, each in zip(parts, losses, strict=True))
    return {
        "split": name,
        "loss": loss,
        "perplexity": perplexity_of(loss),
        "step": trained.step,
        "samples": sum(part.count for part in parts),
        "shares": None if everything else list(data.shares),
        "sets": [path for _, path in data.blend()],
        "sequence_length": data.sequence_length,
        "unigram_entropy": samples.unigram_entropy(),
        **({"sources": list(map(_source, parts, losses))} if len(parts) > 1 else {}),
    }


def _check_prepared_with_tokenizer(trained: TrainedModel, samples: Samples) -> None:
    """Raise BadInputError if a set records that another tokenizer than the model's prepared it."""
    recorded = {
        source.data.prefix: source.data.checksums.encoding.tokenizer
        for source in samples.sources
        if source.data.checksums is not None and source.data.checksums.encoding is not None
    }
    if trained.tokenizer is None or not recorded:
        return
    try:
        own = tokenizer_identity(trained.tokenizer)
    except DataError:
        # An imported model may have one that nothing here reads.
        return
    for prefix, identity in recorded.items():
        if identity != own:
            raise BadInputError(
                f"the set {prefix} was prepared with another tokenizer than the model's, {trained.tokenizer}; prepare "
                "its texts again with that one"
            )


def _source(part: SamplePart, loss: float) -> dict[str, JsonValue]:
    prefix = part.samples.sources[0].data.prefix
    return {
        "source": prefix,
        "weight": part.share,
        "samples": part.count,
        "loss": loss,
        "perplexity": perplexity_of(loss),
    }


def _folders_of(trained: TrainedModel) -> list[Path]:
    """Return the folders that a run's relative paths may refer to."""
    run = trained.folder.parent.parent
    started = read_run_file(run).get("cwd")
    return [*([Path(started)] if started else []), *run.parents]


def _data(trained: TrainedModel, prefix: str | None) -> DataConfig:
    if trained.data is not None:
        try:
            data = TypeAdapter(DataConfig).validate_json(json.dumps(trained.data))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, ("data", *first["loc"])))
            raise BadInputError(
                f"{trained.folder} has a recipe that this version cannot read, {key}: {first['msg']}; evaluate the "
                "checkpoint with the version that wrote it"
            ) from error
        return data if prefix is None else replace(data, path=prefix, validation=None)
    if prefix is None:
        raise BadInputError("this checkpoint was imported and names no data; name a prepared set with --data")
    return DataConfig(path=prefix, sequence_length=min(trained.model.config.positions, _LONGEST))


def complete(
    trained: TrainedModel, prompt: str, count: int, sampling: Sampling, tokenizer_folder: Path | None
) -> Iterator[str]:
    """Yield the prompt, and then the text that the model generates, in chunks. Raises BadInputError."""
    # Python keeps bytes of the command line that are not UTF-8 as lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise BadInputError("--prompt is not UTF-8 text; iconv converts other encodings")
    folder = tokenizer_folder or trained.tokenizer
    if folder is None:
        raise BadInputError(f"there is no tokenizer beside {trained.folder}; name its folder with --tokenizer")
    if not folder.is_dir():
        raise BadInputError(f"the tokenizer folder {folder} does not exist; name it with --tokenizer")
    # That of `llmtrain data prepare`: transformers builds some classes anew, with other splits than tokenizer.json.
    tokenizer = load_tokenizer(folder)
    end = known_end_of_text_id(folder, tokenizer)
    start = _prompt_ids(trained, tokenizer, prompt) or [end or 0]
    vocab = trained.model.config.vocab
    wrong = next((token for token in start if not 0 <= token < vocab), None)
    if wrong is not None:
        raise BadInputError(
            f"the tokenizer in {folder} makes token {wrong} of the prompt, but the model's vocabulary is {vocab}; "
            "name the model's own with --tokenizer"
        )
    trained.notice()
    yield prompt
    # Decoded alone, the first new token may lose the space before its word.
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids[-_CONTEXT:]
    shown = text = tokenizer.decode(tokens, skip_special_tokens=False)
    stop_at = end_tokens(folder) | (set() if end is None else {end})
    for token in generate(trained.model, start, count, sampling, stop_at):
        tokens.append(token)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        # A character may take several tokens; yield it when it is complete.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    if text != shown:
        yield text[len(shown) :]


def _prompt_ids(trained: TrainedModel, tokenizer: "tokenizers.Tokenizer", prompt: str) -> list[int]:
    """Return the ids that a document of the model's data begins with where its text begins with the prompt.

    The data of an imported checkpoint is unknown, so the tokenizer's template says how it begins. Raises BadInputError.
    """
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if trained.data is None:
        # Without what the template puts after a text, such as the end-of-text id.
        return ids_before_text(tokenizer) + ids
    try:
        begin = document_begin(trained.progress)
    except ValidationError as error:
        raise BadInputError(
            f"{trained.folder} has fingerprints of the data that cannot be read: {error.errors()[0]['msg']}; give "
            "another checkpoint"
        ) from error
    return ids if begin is None else [begin, *ids]
