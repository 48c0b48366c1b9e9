"""A run's model states: saved, loaded, and imported from a Hugging Face model."""

from dataclasses import asdict
from pathlib import Path

from pydantic import JsonValue

from llmtrain.checkpoint.convert.hf_weights import hf_ranges
from llmtrain.checkpoint.folder import begun_before, nothing_in
from llmtrain.checkpoint.load import load_latest
from llmtrain.cluster.layout import Axis, even_share
from llmtrain.errors import BadInputError
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.checkpointing import Origin
from llmtrain.sharding.optimizer_shard import STATES, OptimizerStateRange
from llmtrain.training.run import Run
from llmtrain.training.run_data import DATA, check_data
from llmtrain.training.run_folder import recipe_changes, write_record
from llmtrain.training.saved_progress import progress_of


def save(run: Run) -> None:
    """Save the states; each rank writes an even share of every unit. Collective."""
    run.ranks.activity.begin(f"saving the checkpoint of step {run.progress.step}")
    shards = _shards_to_write(run)
    run.progress.rewinds = 0
    progress = {**asdict(run.progress), DATA: [asdict(one) for one in run.fingerprints]}
    about = {"recipe": dict(run.plan.record), "model": asdict(run.plan.model)}
    failure = run.checkpoints.save(run.progress.step, shards, progress, about)
    for sentence in filter(None, (failure, run.checkpoints.warning())):
        run.log.warn(sentence)


def start_states(run: Run) -> bool:
    """Load the run's newest checkpoint, or what `checkpoint.resume`, `checkpoint.weights` or `model.hf` names; return
    whether the run has checkpoints of its own. Collective."""
    run.ranks.activity.begin("preparing the model's states")
    run.checkpoints.reserve(_shards_to_write(run))
    saving, own = run.plan.checkpoint, run.folder / "checkpoints"
    progress = _load(run, own, STATES)
    resumes = progress is not None
    if resumes and not saving.resumes:
        raise BadInputError(begun_before(own))
    if not resumes and saving.origin is not None:
        progress = _load_origin(run, saving.origin)
    accepted, before = run.plan.data.accept_changed, progress if resumes else None
    run.fingerprints = check_data(run.train_data, before, accepted, run.ranks, run.log.warn)
    if run.valid_data is not None and run.plan.data.validation is not None:
        check_data(run.valid_data, None, accepted, run.ranks, run.log.warn)
    if progress is not None:
        restore_progress(run, progress)
    elif run.plan.import_from is not None:
        _import_hf(run, Path(run.plan.import_from))
    run.engine.update()
    run.compared = run.progress.step
    if run.ranks.is_main:
        run.changed = recipe_changes(run.folder, run.plan) if resumes else []
        # Not earlier: a recipe that does not fit the folder's checkpoints leaves the folder as it was. So does one with
        # which nothing is trained.
        if run.progress.step < run.plan.training.steps:
            write_record(run.folder, run.plan)
    return resumes


def _load(run: Run, path: Path, names: tuple[str, ...]) -> dict[str, JsonValue] | None:
    return load_latest(path, shards_to_read(run, names), run.ranks, run.log.warn, run.plan.model)


def _load_origin(run: Run, origin: Origin) -> dict[str, JsonValue] | None:
    """Load what the run starts from; return its progress if the run continues that, None if it takes the weights
    alone."""
    found = _load(run, origin.folder, ("master",) if origin.alone else STATES)
    if found is None:
        raise BadInputError(nothing_in(origin))
    what = "weights alone" if origin.alone else "states"
    run.origin = (
        f"the run starts with the {what} of {origin.folder} after its step {found.get('step', 0)} ({origin.key})"
    )
    return None if origin.alone else found


def restore_progress(run: Run, saved: dict[str, JsonValue]) -> None:
    """Set the progress and the loss scale to those of a checkpoint."""
    run.progress = progress_of(saved, run.plan.batch)
    if run.plan.compute == "fp16" and run.progress.loss_scale is not None:
        run.scale.value, run.scale.good_steps = run.progress.loss_scale, run.progress.good_steps


def _import_hf(run: Run, folder: Path) -> None:
    """Set the masters to the weights of a Hugging Face model: each rank reads what it holds."""
    targets, wanted = {}, {}
    for unit in run.engine.units.values():
        start, end = _without_padding(unit.spec, unit.ranges.optimizer)
        offset = start
        for tensor, first, last in unit.spec.tensor_ranges(start, end):
            targets[tensor.name], wanted[tensor.name] = (unit.optimizer, offset), (first, last)
            offset += last - first
    run.ranks.activity.begin(f"reading the weights of {folder}")
    done, total = 0, sum(last - first for first, last in wanted.values())
    for name, values in hf_ranges(folder, run.plan.model, wanted):
        done += values.numel()
        run.ranks.activity.moving(done / total)
        shard, offset = targets[name]
        shard.write("master", offset, values)


def _shards_to_write(run: Run) -> list[OptimizerStateRange]:
    """Return the ranges that this rank writes.

    Ranks that hold the same optimizer shard write an even share each. The first tensor-parallel rank alone writes
    replicated parameters, and the first stage tied embeddings.
    """
    tensor = run.ranks.layout.coordinate(run.ranks.rank, Axis.TENSOR)
    shards = []
    for name, unit in run.engine.units.items():
        if name in run.engine.gradients.replica_groups.second:
            continue
        start, end = _without_padding(unit.spec, unit.ranges.optimizer)
        if tensor:
            start, end = min(start, unit.spec.replicated_from), min(end, unit.spec.replicated_from)
        copies, copy = unit.degrees.ranks // unit.degrees.optimizer, unit.hops.data_rank // unit.degrees.optimizer
        first, last = even_share(end - start, copies, copy)
        shards.append(OptimizerStateRange(unit.spec, unit.optimizer, start + first, start + last))
    return shards


def shards_to_read(run: Run, names: tuple[str, ...] = STATES) -> list[OptimizerStateRange]:
    """Return all ranges that this rank holds, of these states."""
    return [
        OptimizerStateRange(unit.spec, unit.optimizer, *_without_padding(unit.spec, unit.ranges.optimizer), names)
        for unit in run.engine.units.values()
    ]


def _without_padding(spec: UnitSpec, bounds: tuple[int, int]) -> tuple[int, int]:
    return min(bounds[0], spec.numel), min(bounds[1], spec.numel)
