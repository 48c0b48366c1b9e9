"""What a run is made of, and how its states are saved and brought back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from llmtrain_data.dataset import Samples, open_split

from llmtrain.checkpoint.convert.read import hf_tensors
from llmtrain.checkpoint.convert.tokenizer import copy_tokenizer
from llmtrain.checkpoint.load import load_latest
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.shard import StateShard
from llmtrain.cluster.layout import Axis, even_share
from llmtrain.cluster.ranks import Ranks
from llmtrain.cluster.stop import StopRequest
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import model_units
from llmtrain.optim.scale import LossScale
from llmtrain.recipe.resolve import as_data, shape, to_yaml
from llmtrain.recipe.schema import EveryK, Recipe
from llmtrain.sharding.flat import FlatUnit, materialize
from llmtrain.sharding.replicated import GradientSync
from llmtrain.telemetry.about import RunInfo
from llmtrain.telemetry.logger import RunLogger

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """How far the run is; saved with every checkpoint.

    step: steps done. applied: those of them that were not skipped. skipped_in_row: non-finite steps just before.
    """

    step: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0


@dataclass
class Run:
    """Everything that a step needs."""

    recipe: Recipe
    ranks: Ranks
    folder: Path
    config: GPTConfig
    model: GPT
    units: list[FlatUnit]
    sync: GradientSync
    train_data: Samples
    valid_data: Samples | None
    log: RunLogger
    checkpoints: Checkpointer
    progress: Progress
    scale: LossScale
    stop: StopRequest


@contextmanager
def compose(recipe: Recipe, ranks: Ranks, stop: StopRequest) -> Iterator[Run]:
    """Build the run's parts, in the order in which they need each other, and close them at the end. Collective."""
    config, folder = shape(recipe), Path(recipe.logging.dir) / recipe.name
    # Data first: it is what most often turns out to be missing, and opening it costs nothing.
    train_data, valid_data = _open_data(recipe, config)
    model, units = _build_model(recipe, config, ranks)
    if ranks.is_main:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    about = RunInfo(
        model=config,
        world=ranks.layout.world,
        device=ranks.device,
        model_state_bytes=sum(unit.nbytes for unit in units),
        unigram_entropy=valid_data.unigram_entropy() if valid_data and ranks.is_main else None,
    )
    checkpoints = Checkpointer(folder / "checkpoints", ranks, recipe.checkpoint.keep, recipe.checkpoint.asynchronous)
    with RunLogger(folder, recipe, about, enabled=ranks.is_main) as log:
        sync = GradientSync(units, ranks.groups.get(Axis.DATA), log.comm.add)
        progress, scale = Progress(), LossScale.of(recipe.precision)
        yield Run(
            recipe, ranks, folder, config, model, units, sync, train_data, valid_data, log, checkpoints, progress,
            scale, stop,
        )  # fmt: skip
        checkpoints.close()


def _open_data(recipe: Recipe, config: GPTConfig) -> tuple[Samples, Samples | None]:
    training = open_split(recipe.data, "train")
    if (largest := training.max_token()) >= config.vocab:
        raise BadInputError(
            f"data.path holds token {largest}, but model.vocab is {config.vocab}; prepare the data with the "
            "tokenizer of this recipe, or raise model.vocab"
        )
    evaluated = recipe.train.eval_every and recipe.data.split[1]
    return training, open_split(recipe.data, "valid") if evaluated else None


def _build_model(recipe: Recipe, config: GPTConfig, ranks: Ranks) -> tuple[GPT, list[FlatUnit]]:
    # On the meta device first; the flat units give it memory; compile comes last, as it traces what is there.
    model = GPT(config, ranks.device, recompute=_recompute(recipe))
    dtype = DTYPES[recipe.precision.compute]
    units = [materialize(u, model.unit(u.name), ranks.device, dtype, recipe.seed) for u in model_units(config)]
    if recipe.train.compile:
        for block in model.blocks:
            block.compile()
    return model, units


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailedError(f"{folder} cannot be written: {error.strerror}; check logging.dir") from error


def _recompute(recipe: Recipe) -> int:
    match recipe.activation_checkpointing:
        case EveryK(every=every):
            return every
        case "full":
            return 1
        case _:
            return 0


def save(run: Run) -> None:
    """Save the states; each rank writes an even share of every unit. Collective."""
    shards = _my_shards(run)
    failure = run.checkpoints.save(
        run.progress.step, shards, asdict(run.progress), {"recipe": as_data(run.recipe), "model": asdict(run.config)}
    )
    if failure:
        run.log.warn(failure)


def resume(run: Run) -> None:
    """Bring the states to where the recipe says the run starts from. Collective."""
    run.checkpoints.reserve(_my_shards(run))
    start, own = run.recipe.checkpoint.resume, run.folder / "checkpoints"
    shards = [_shard(unit, 0, unit.spec.numel) for unit in run.units]
    progress = load_latest(own, shards, run.ranks, run.log.warn, run.config)
    if progress is not None and start == "never":
        raise BadInputError(f"{own} holds checkpoints and checkpoint.resume is never; give the run another name")
    if progress is None and start not in ("auto", "never"):
        progress = load_latest(Path(start), shards, run.ranks, run.log.warn, run.config)
        if progress is None:
            raise BadInputError(f"checkpoint.resume is {start}, which holds no checkpoint; expected a run's folder")
    if progress is not None:
        run.progress = Progress(**progress)  # type: ignore[arg-type]
    if run.progress.step:
        run.scale.value, run.scale.good_steps = run.progress.loss_scale, run.progress.good_steps
    if progress is None and run.recipe.model.hf is not None:
        _import_hf(run, Path(run.recipe.model.hf))
    for unit in run.units:
        unit.publish()
    if run.ranks.is_main:
        # Only now: a recipe that does not fit the folder's checkpoints leaves the folder as it was.
        _record(run)


def _record(run: Run) -> None:
    with _writing(run.folder):
        (run.folder / "recipe.resolved.yaml").write_text(to_yaml(run.recipe))
        if run.recipe.data.tokenizer is not None:
            # So that the run can be sampled and converted wherever it is taken.
            copy_tokenizer(Path(run.recipe.data.tokenizer), run.folder / "tokenizer")


def _import_hf(run: Run, folder: Path) -> None:
    places = {
        tensor.name: unit.master[start : start + tensor.numel]
        for unit in run.units
        for tensor, start in zip(unit.spec.tensors, unit.spec.offsets, strict=False)
    }
    for name, tensor in hf_tensors(folder, run.config):
        places[name].copy_(tensor.flatten())


def _my_shards(run: Run) -> list[StateShard]:
    world, rank = run.ranks.layout.world, run.ranks.rank
    return [_shard(unit, *even_share(unit.spec.numel, world, rank)) for unit in run.units]


def _shard(unit: FlatUnit, start: int, end: int) -> StateShard:
    states = {"master": unit.master, "m": unit.m, "v": unit.v}
    return StateShard(unit.spec, start, end, {name: state[start:end] for name, state in states.items()})
