"""What a run is made of, and how its states are saved and brought back."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llmtrain_data.dataset import Samples
from llmtrain_data.fingerprint import Fingerprint
from llmtrain_data.output import say
from llmtrain_kernels.native import native_reason
from omegaconf import OmegaConf
from pydantic import JsonValue, TypeAdapter, ValidationError

from llmtrain.checkpoint.convert.hf_weights import hf_tensors
from llmtrain.checkpoint.convert.tokenizer import copy_tokenizer
from llmtrain.checkpoint.folder import drop_later
from llmtrain.checkpoint.load import load_latest
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.cluster.layout import Axis, even_share
from llmtrain.comm.device import is_cpu
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import BadInputError, PreemptedError, RunFailedError
from llmtrain.launch.run_lock import LOOK, RunLock
from llmtrain.launch.stop import TOLD_EARLY, StopRequest
from llmtrain.model.gpt import GPT
from llmtrain.model.tensors import UnitSpec, parameter_count
from llmtrain.optim.loss_scale import LossScale
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.plan.plan import Plan
from llmtrain.plan.record import changes
from llmtrain.sharding.engine import Engine
from llmtrain.sharding.optimizer_shard import OptimizerStateRange
from llmtrain.sharding.traffic import Traffic
from llmtrain.telemetry.about import RunInfo
from llmtrain.telemetry.link_usage import LinkSampler
from llmtrain.telemetry.logger import RunLogger
from llmtrain.telemetry.meters import CommMeter
from llmtrain.training.build import build
from llmtrain.training.run_data import DATA, check_data, open_data
from llmtrain.yaml.dump import to_yaml
from llmtrain.yaml.file import read_yaml

# The recipe as it is resolved, in a run's folder.
RECORD = "recipe.resolved.yaml"

# The C++ kernels that a model calls; they are built at the first run on a machine.
MODEL_KERNELS = ("activation", "attention", "cross_entropy", "norm", "squared_sum")


@dataclass
class Progress:
    """How far the run is; saved with every checkpoint.

    step: steps done. samples: sequences of the data that have gone by, with those of batches that were passed over.
    tokens: trained on. applied: those of them that were not skipped. skipped_in_row: skipped steps just before.
    loss_scale: None where the loss is not scaled. passed: global batches that were passed over. rewinds: times in a
    row that the run went back to its newest checkpoint. losses: what spikes are told by.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    loss_scale: float | None = None
    good_steps: int = 0
    passed: int = 0
    rewinds: int = 0
    losses: list[float] = field(default_factory=list)


@dataclass
class Run:
    """Everything that a step needs. lock: of the folder, which the main rank has. compared: steps after which replicas
    were last found alike. changed: what the recipe has otherwise than at the run's last start, as the main rank knows
    it, which also knows the fingerprints of the data."""

    plan: Plan
    ranks: Ranks
    folder: Path
    model: GPT
    engine: Engine
    executor: Executor
    train_data: Samples
    valid_data: Samples | None
    log: RunLogger
    checkpoints: Checkpointer
    progress: Progress
    scale: LossScale
    stop: StopRequest
    lock: RunLock
    compared: int = 0
    changed: list[str] = field(default_factory=list)
    fingerprints: list[Fingerprint] = field(default_factory=list)


@contextmanager
def compose(plan: Plan, ranks: Ranks, stop: StopRequest) -> Iterator[Run]:
    """Build the run's parts, in the order in which they need each other, and close them at the end. Collective."""
    folder = Path(plan.logging.dir) / plan.name
    ranks.activity.begin("opening the data")
    # Data first: it is what most often turns out to be missing, and opening it costs nothing.
    train_data, valid_data = open_data(plan)
    with _claim(folder, ranks, stop) as lock:
        comm = CommMeter()

        def count(calls: Iterable[Traffic]) -> None:
            comm.add(calls := list(calls))
            if calls:
                ranks.activity.record(f"{calls[-1].op} ({calls[-1].purpose})")

        if is_cpu(ranks.device):
            ranks.activity.begin("building C++ kernels for this processor")
            native_reason(MODEL_KERNELS)
        ranks.activity.begin("building the model")
        parts = build(plan, ranks, count)
        about = RunInfo(
            device=ranks.device,
            model_state_bytes=parts.engine.state_bytes,
            unigram_entropy=valid_data.unigram_entropy() if valid_data and ranks.is_main else None,
            host_of=ranks.host_of,
            doing=ranks.activity.doing,
        )
        saving = plan.checkpoint
        checkpoints = Checkpointer(folder / "checkpoints", ranks, saving.keep, saving.asynchronous, lock.confirm)
        with LinkSampler(ranks) as links, RunLogger(folder, plan, about, ranks.is_main, comm, links) as log:
            progress, scale = Progress(), LossScale.of(plan.loss_scaling, plan.compute)
            yield Run(
                plan, ranks, folder, parts.model, parts.engine, parts.executor, train_data, valid_data, log,
                checkpoints, progress, scale, stop, lock,
            )  # fmt: skip
            checkpoints.close()
            parts.close()


def _claim(folder: Path, ranks: Ranks, stop: StopRequest) -> RunLock:
    """Make the run's folder and take its lock. Raises RunFailedError where another run has it, PreemptedError when told
    to stop while it waits for one that may have it. Collective."""
    lock, refusal, told = RunLock(folder), None, set[str]()

    def pause(why: str) -> None:
        if stop.asked:
            raise PreemptedError(TOLD_EARLY)
        if why not in told:
            told.add(why)
            say(f"llmtrain: {why}", err=True)
        ranks.activity.record("waiting for the run's folder")
        time.sleep(LOOK)

    if ranks.is_main:
        try:
            with _writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                refusal = lock.take(pause)
        except (RunFailedError, PreemptedError) as error:
            refusal = str(error)
    if refusal := ranks.from_main("refusal", refusal or ""):
        raise (PreemptedError if refusal == TOLD_EARLY else RunFailedError)(refusal)
    return lock


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailedError(f"{folder} cannot be written: {error.strerror}; check logging.dir") from error


def save(run: Run) -> None:
    """Save the states; each rank writes an even share of every unit. Collective."""
    run.ranks.activity.begin(f"saving the checkpoint of step {run.progress.step}")
    shards = _my_shards(run)
    run.progress.rewinds = 0
    progress = {**asdict(run.progress), DATA: [asdict(one) for one in run.fingerprints]}
    about = {"recipe": dict(run.plan.record), "model": asdict(run.plan.model)}
    failure = run.checkpoints.save(run.progress.step, shards, progress, about)
    for sentence in filter(None, (failure, run.checkpoints.warning())):
        run.log.warn(sentence)


def resume(run: Run) -> bool:
    """Bring the states to where the recipe says the run starts from; return whether it has checkpoints of its own.
    Collective."""
    run.ranks.activity.begin("loading the checkpoint")
    run.checkpoints.reserve(_my_shards(run))
    start, own = run.plan.checkpoint.resume, run.folder / "checkpoints"
    progress = load_latest(own, _all_shards(run), run.ranks, run.log.warn, run.plan.model)
    goes_on = progress is not None
    if goes_on and start == "never":
        raise BadInputError(f"{own} holds checkpoints and checkpoint.resume is never; give the run another name")
    if progress is None and start not in ("auto", "never"):
        progress = load_latest(Path(start), _all_shards(run), run.ranks, run.log.warn, run.plan.model)
        if progress is None:
            raise BadInputError(f"checkpoint.resume is {start}, which holds no checkpoint; expected a run's folder")
    accepted, before = run.plan.data.accept_changed, progress if goes_on else None
    run.fingerprints = check_data(run.train_data, before, accepted, run.ranks, run.log.warn)
    if progress is not None:
        _take_up(run, progress)
    if progress is None and run.plan.import_from is not None:
        _import_hf(run, Path(run.plan.import_from))
    run.engine.update()
    run.compared = run.progress.step
    if run.ranks.is_main:
        run.changed = _changes(run) if goes_on else []
        # Only now: a recipe that does not fit the folder's checkpoints leaves the folder as it was.
        _record(run)
    return goes_on


def go_back(run: Run) -> None:
    """Bring the states back to the newest checkpoint, and pass over the data of the steps since then and of the step at
    hand. Collective."""
    run.ranks.activity.begin("going back to the last checkpoint")
    if failure := run.checkpoints.wait():
        run.log.warn(failure)
    gone, every, own = run.progress, run.plan.checkpoint.every, run.folder / "checkpoints"

    def regular(step: int) -> bool:
        """Whether an uninterrupted run has a checkpoint of `step`: one that a stop left must not change the curve."""
        return step % every == 0 if every else step == 0

    shards = _all_shards(run)
    saved = load_latest(own, shards, run.ranks, run.log.warn, run.plan.model, regular)
    saved = saved or load_latest(own, shards, run.ranks, run.log.warn, run.plan.model)
    if saved is None:
        raise RunFailedError(f"{own} holds no checkpoint to go back to (on_spike.action); start the run anew")
    _take_up(run, saved)
    run.progress.samples = gone.samples + run.plan.batch.sequences
    run.progress.passed = gone.passed + gone.step + 1 - run.progress.step
    run.progress.rewinds = gone.rewinds + 1
    run.engine.update()
    run.log.rewind(run.progress.step)
    if run.ranks.is_main:
        # Later ones are of steps that have not been.
        with _writing(own):
            drop_later(own, run.progress.step)


def _take_up(run: Run, saved: dict[str, JsonValue]) -> None:
    try:
        run.progress = TypeAdapter(Progress).validate_python(saved)
        if "samples" not in saved:
            # Of a time when these were not counted.
            run.progress.samples = (run.progress.step + run.progress.passed) * run.plan.batch.sequences
            run.progress.tokens = run.progress.step * run.plan.batch.tokens
    except ValidationError as error:
        raise RunFailedError(f"the checkpoint's progress cannot be read: {error.errors()[0]['msg']}") from error
    scaled = run.plan.compute == "fp16"
    if scaled and run.progress.loss_scale is not None:
        run.scale.value, run.scale.good_steps = run.progress.loss_scale, run.progress.good_steps


def _changes(run: Run) -> list[str]:
    try:
        before = OmegaConf.to_container(read_yaml(run.folder / RECORD, "is not a recipe"))
    except BadInputError:
        # It tells nothing that the run needs.
        return []
    assert isinstance(before, dict)
    return changes({str(key): value for key, value in before.items()}, run.plan.record)


def _record(run: Run) -> None:
    with _writing(run.folder):
        (run.folder / RECORD).write_text(to_yaml(run.plan.record))
        if run.plan.data.tokenizer is not None:
            # So that the run can be sampled and converted wherever it is taken.
            copy_tokenizer(Path(run.plan.data.tokenizer), run.folder / "tokenizer")


def _import_hf(run: Run, folder: Path) -> None:
    places = {}
    for unit in run.engine.units.values():
        start, end = _real(unit.spec, unit.ranges.optimizer)
        offset = 0
        for tensor, first, last in unit.spec.tensor_ranges(start, end):
            places[tensor.name] = (unit.optimizer, start + offset, first, last)
            offset += last - first
    run.ranks.activity.begin(f"reading the weights of {folder}")
    done, whole = 0, parameter_count(run.plan.model)
    for name, values in hf_tensors(folder, run.plan.model):
        done += values.numel()
        run.ranks.activity.moving(done / whole)
        if name in places:
            shard, place, first, last = places[name]
            shard.write("master", place, values.flatten()[first:last])


def _my_shards(run: Run) -> list[OptimizerStateRange]:
    """The data-parallel ranks that hold the same optimizer shard share the writing of it; what more ranks hold alike is
    written by the first of them."""
    tensor = run.ranks.layout.coordinate(run.ranks.rank, Axis.TENSOR)
    shards = []
    for name, unit in run.engine.units.items():
        if name in run.engine.gradients.replica_groups.second:
            continue
        start, end = _real(unit.spec, unit.ranges.optimizer)
        if tensor:
            start, end = min(start, unit.spec.replicated), min(end, unit.spec.replicated)
        copies, copy = unit.degrees.ranks // unit.degrees.optimizer, unit.hops.place // unit.degrees.optimizer
        first, last = even_share(end - start, copies, copy)
        shards.append(OptimizerStateRange(unit.spec, unit.optimizer, start + first, start + last))
    return shards


def _all_shards(run: Run) -> list[OptimizerStateRange]:
    """What this rank holds of the optimizer's states."""
    return [
        OptimizerStateRange(unit.spec, unit.optimizer, *_real(unit.spec, unit.ranges.optimizer))
        for unit in run.engine.units.values()
    ]


def _real(spec: UnitSpec, held: tuple[int, int]) -> tuple[int, int]:
    """Return the part of a range that is not padding."""
    return min(held[0], spec.numel), min(held[1], spec.numel)
