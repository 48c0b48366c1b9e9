"""The parts of a run."""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain_data.dataset import Samples
from llmtrain_data.errors import DataError
from llmtrain_data.fingerprint import Fingerprint
from llmtrain_kernels.native import native_reason

from llmtrain.checkpoint.save import Checkpointer
from llmtrain.comm.device import synchronize
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import RunFailedError
from llmtrain.launch.run_lock import RunLock
from llmtrain.launch.stop import StopRequest
from llmtrain.model.gpt import GPT
from llmtrain.offload.activations import OffloadedActivations
from llmtrain.offload.place import OffloadStores
from llmtrain.offload.usage import TierUsage
from llmtrain.optim.loss_scale import LossScale
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.plan.cost.lane_times import volume_paths
from llmtrain.plan.plan import Plan
from llmtrain.plan.traffic import CountTraffic, Traffic
from llmtrain.sharding.engine import Engine
from llmtrain.telemetry.about import RunInfo, mixed_devices
from llmtrain.telemetry.counters import CounterSource, HostLink, VolumeCounters
from llmtrain.telemetry.link_usage import LinkSampler
from llmtrain.telemetry.logger import RunLogger
from llmtrain.telemetry.meters import CommMeter
from llmtrain.training.batches import BatchReader
from llmtrain.training.build import build
from llmtrain.training.run_data import open_data
from llmtrain.training.run_folder import lock_folder
from llmtrain.training.saved_progress import Progress

# The C++ kernels that a run calls; the first run on a machine builds them.
CPU_KERNELS = ("activation", "adamw", "attention", "cross_entropy", "norm", "squared_sum")


@dataclass(kw_only=True)
class Run:
    """Everything that a step needs.

    batches: reads `train_data`. lock: the main rank has the folder's lock. compared: the step after which replicas were
    last found equal. offloaded: what this rank offloads. activations: what moves its activations. clips: whether the
    last step clipped gradients. changed: how the recipe differs from that of the run's last start; the main rank alone
    knows it, and the fingerprints of the data. origin: a sentence about another run that this start began from, None
    without one.
    """

    plan: Plan
    ranks: Ranks
    folder: Path
    model: GPT
    engine: Engine
    executor: Executor
    train_data: Samples
    batches: BatchReader
    valid_data: Samples | None
    log: RunLogger
    checkpoints: Checkpointer
    scale: LossScale
    stop: StopRequest
    lock: RunLock
    offloaded: OffloadStores
    progress: Progress = field(default_factory=Progress)
    compared: int = 0
    activations: OffloadedActivations | None = None
    clips: bool = False
    changed: list[str] = field(default_factory=list)
    fingerprints: list[Fingerprint] = field(default_factory=list)
    origin: str | None = None


@contextmanager
def open_run(plan: Plan, ranks: Ranks, stop: StopRequest) -> Iterator[Run]:
    """Build the run's parts, in the order in which they need each other, and close them at the end. Collective."""
    folder = Path(plan.logging.dir) / plan.name
    ranks.activity.begin("opening the data")
    # Data first: it is missing most often, and opening it costs nothing.
    train_data, valid_data = open_data(plan, ranks.activity.moving)
    with lock_folder(folder, ranks, stop) as lock:
        if plan.device == "cpu":
            ranks.activity.begin("building C++ kernels for this processor")
            native_reason(CPU_KERNELS)
        ranks.activity.begin("building the model")
        comm = CommMeter()
        parts = build(plan, ranks, _counter(comm, ranks))
        about = RunInfo(
            device=ranks.device,
            mixed=mixed_devices(plan, ranks),
            model_state_bytes=parts.engine.state_bytes,
            unigram_entropy=valid_data.unigram_entropy(ranks.activity.moving) if valid_data and ranks.is_main else None,
            host_of=ranks.host_of,
            doing=lambda: stop.with_request(ranks.activity.doing()),
        )
        saving = plan.checkpoint
        own, spared = folder / "checkpoints", plan.spikes.rewinds
        checkpoints = Checkpointer(own, ranks, saving.keep, saving.asynchronous, lock.confirm, spared)
        sampler = LinkSampler(ranks, more=_offload_links(plan, parts.offloaded, parts.activations))
        batches = closing(BatchReader(train_data, plan, ranks))
        with sampler as links, RunLogger(folder, plan, about, ranks.is_main, comm, links) as log, batches as reader:
            run = Run(
                plan=plan,
                ranks=ranks,
                folder=folder,
                model=parts.model,
                engine=parts.engine,
                executor=parts.executor,
                train_data=train_data,
                batches=reader,
                valid_data=valid_data,
                log=log,
                checkpoints=checkpoints,
                scale=LossScale.of(plan.loss_scaling, plan.compute),
                stop=stop,
                lock=lock,
                offloaded=parts.offloaded,
                activations=parts.activations,
            )
            if ranks.watchdog is not None:
                ranks.watchdog.on_failure = log.fail
            try:
                yield run
            except (DataError, RunFailedError):
                # What ends the run so is not in the checkpoint that is being written.
                checkpoints.wait()
                raise
            checkpoints.close()
            parts.close()
            # The host's memory may go only after the last copy from and to it.
            synchronize(ranks.device)


def _offload_links(
    plan: Plan, offloaded: OffloadStores, activations: OffloadedActivations | None
) -> list[CounterSource]:
    """Return what counts the bytes of volumes and, on a GPU, of the link to the host."""
    volumes = volume_paths(plan)
    found: list[CounterSource] = [VolumeCounters(volumes)] if volumes else []
    if plan.device == "cuda" and (offloaded.moving or activations is not None):
        found.append(
            HostLink(lambda: offloaded.usage() + (TierUsage() if activations is None else activations.usage()))
        )
    return found


def _counter(comm: CommMeter, ranks: Ranks) -> CountTraffic:
    """Return what counts collectives, and records the last one as this rank's activity."""

    def count(calls: Iterable[Traffic]) -> None:
        comm.add(calls := list(calls))
        if calls:
            ranks.activity.record(f"{calls[-1].op} ({calls[-1].purpose})")

    return count
