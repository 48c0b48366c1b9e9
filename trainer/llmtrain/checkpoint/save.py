"""Save a checkpoint: every rank writes its ranges, rank 0 writes the manifest and renames the folder at the end."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from llmtrain_data.sync import sync_folder
from pydantic import JsonValue, TypeAdapter

from llmtrain.checkpoint.folder import clean, commit, prune, step_folders, step_name, step_of
from llmtrain.checkpoint.manifest import Manifest
from llmtrain.checkpoint.safetensors_file import bytes_of
from llmtrain.checkpoint.shard_file import Content, Range, ShardFile, merge_shard_files, write_shard_file
from llmtrain.checkpoint.state_shard import StateRange, StoredBytes
from llmtrain.checkpoint.store_messages import StoreMessages
from llmtrain.comm.device import HostCopies
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.stream import waiting_stream
from llmtrain.comm.waits import Done, Event
from llmtrain.errors import RunFailedError


@dataclass(frozen=True)
class _Save:
    """One save. host: copies of the states that are not read late, in order, which do not change until the save has
    ended; none if it reads all states while it writes them. copied: stands for the copies.
    """

    step: int
    shards: Sequence[StateRange]
    host: list[torch.Tensor]
    copied: Event
    progress: dict[str, JsonValue]
    about: Mapping[str, dict[str, JsonValue]]


@dataclass(frozen=True)
class _Result:
    """A rank's result, for rank 0. shard_file: None if it has no ranges. failure: why the write failed, or empty."""

    shard_file: ShardFile | None = None
    failure: str = ""


@cache
def _adapter() -> TypeAdapter[_Result]:
    return TypeAdapter(_Result)


class Checkpointer:
    """Saves checkpoints into one folder, one at a time. Every rank makes one and calls the same methods in one order.

    folder: the run's `checkpoints`, shared by all ranks. keep: number of complete checkpoints to keep; with
    keep_scheduled, the one of the step `scheduled` in the progress that is saved stays as well. asynchronous:
    write in the background, from host copies that `save` makes; otherwise no copies are made, and states of a GPU are
    read block by block. confirm: raises RunFailedError if another run has taken the folder; called on the main rank
    before the first write and before the final rename. Raises RunFailedError if the leftovers of a killed process
    cannot be removed.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        keep: int,
        asynchronous: bool,
        confirm: Callable[[], None] = lambda: None,
        keep_scheduled: bool = False,
    ) -> None:
        self._folder, self._ranks, self._keep, self._keep_scheduled = folder, ranks, keep, keep_scheduled
        self._messages, self._confirm = StoreMessages(ranks, "save"), confirm
        self._staging: HostCopies | None = None
        self._copied: Event = Done()
        self._failure: str | None = None
        self._warning = ""
        self._idle = threading.Event()
        self._idle.set()
        # Set unless a save still has to read states.
        self._taken = threading.Event()
        self._taken.set()
        if ranks.is_main:
            try:
                clean(folder)
            except OSError as error:
                raise RunFailedError(f"{folder} cannot be cleaned up: {_reason(error)}") from error
        # Use one thread for all saves, as a start takes milliseconds.
        self._stream = waiting_stream(ranks.device, "checkpoint", ranks.activity) if asynchronous else None

    def reserve(self, shards: Sequence[StateRange]) -> None:
        """Allocate the host copies of asynchronous saves now, so that the first one takes no longer than later ones."""
        states = _states(shards)
        if self._stream is not None and not (self._staging and self._staging.fits(states)):
            self._staging = HostCopies(states)

    def save(
        self,
        step: int,
        shards: Sequence[StateRange],
        progress: dict[str, JsonValue],
        about: Mapping[str, dict[str, JsonValue]],
    ) -> str | None:
        """Save `shards`, this rank's shards of the states, as the checkpoint of `step`.

        progress: the training loop's state, to resume from. about: `recipe`, the resolved recipe, and `model`, the
        GPTConfig, both as mappings. An asynchronous save joins the previous one and returns when the states are copied
        (on CUDA: when the copies are queued on a stream of their own); a synchronous save returns when the checkpoint
        is on disk. Returns a sentence if the joined or synchronous save failed, the same on every rank; earlier
        checkpoints are then kept.
        """
        failure = self.wait()
        self._messages.begin()
        host = self._host_copies(shards)
        save = _Save(step, shards, host, self._copied, {**progress, "step": step}, about)
        if self._stream is None:
            self._run(save)
            # `wait` returns it again: the end of a run must know whether its last checkpoint was saved.
            return self._failure
        self._idle.clear()
        if any(shard.read_late for shard in shards):
            self._taken.clear()
        self._stream.submit(partial(self._run_beside, save))
        return failure

    @property
    def saving(self) -> bool:
        """Whether this rank is still writing a checkpoint."""
        return not self._idle.is_set()

    def wait(self) -> str | None:
        """Join the current save. Returns a sentence if it failed, the same on every rank, and only once."""
        self._idle.wait()
        failure, self._failure = self._failure, None
        return failure

    def wait_until_taken(self) -> float:
        """Wait until the current save needs the states no longer: they may change. Return the seconds of that. For
        copies from a GPU, the current stream waits, and the host does not."""
        started = time.perf_counter()
        self._copied.wait()
        if not self._taken.is_set():
            self._ranks.activity.begin("waiting until the checkpoint has read the states")
            self._taken.wait()
        return time.perf_counter() - started

    def warning(self) -> str:
        """Return the warning of a save that succeeded, only once; empty on all ranks but the main one."""
        warning, self._warning = self._warning, ""
        return warning

    def close(self) -> str | None:
        """Join the current save and free the host copies. Returns the result of `wait`."""
        failure = self.wait()
        self._staging = None
        if self._stream is not None:
            self._stream.close()
        return failure

    def _host_copies(self, shards: Sequence[StateRange]) -> list[torch.Tensor]:
        self.reserve(shards)
        if self._staging is None:
            return []
        self._copied = self._staging.copy(_states(shards))
        return self._staging.copies

    def _run_beside(self, save: _Save) -> None:
        """Run one save in the background."""
        try:
            self._run(save)
        finally:
            self._idle.set()

    def _run(self, save: _Save) -> None:
        """Run one save; turn any error into a sentence for the training loop."""
        try:
            self._failure = self._run_main(save) if self._ranks.is_main else self._run_other(save)
        except Exception as error:
            self._failure = self._failure_text(save, _reason(error))
        finally:
            self._taken.set()
        # This raises where the store is gone. No rank waits then.
        with suppress(RuntimeError):
            self._acknowledge()

    def _run_other(self, save: _Save) -> str | None:
        failure = self._messages.wait_for("open")
        if not failure:
            result = self._write(save)
            self._messages.publish(str(self._ranks.rank), _adapter().dump_json(result).decode())
            failure = self._messages.wait_for("done")
        return failure or None

    def _run_main(self, save: _Save) -> str | None:
        partial = self._partial(save)
        try:
            self._confirm()
            shutil.rmtree(partial, ignore_errors=True)
            first = not self._folder.exists()
            partial.mkdir(parents=True)
            if first:
                sync_folder(self._folder.parent)
        except (OSError, RunFailedError) as error:
            failure = self._failure_text(save, _reason(error))
            self._messages.publish("open", failure)
            return failure
        self._messages.publish("open", "")
        try:
            self._finish(save, [self._write(save), *self._results()])
        except Exception as error:
            # A run that has taken the folder may be writing into it.
            with suppress(OSError, RunFailedError):
                self._confirm()
                clean(self._folder)
            failure = self._failure_text(save, _reason(error))
        else:
            failure, self._warning = "", self._sync_and_prune(save)
        self._messages.publish("done", failure)
        return failure or None

    def _acknowledge(self) -> None:
        """Acknowledge the result; the main rank, which hosts the store, waits until all others have done so."""
        if self._ranks.is_main:
            for rank in range(1, self._ranks.layout.world):
                self._messages.wait_for(f"{rank} acknowledges")
                self._messages.delete(f"{rank} acknowledges")
        else:
            self._messages.publish(f"{self._ranks.rank} acknowledges", "")

    def _results(self) -> Iterator[_Result]:
        for rank in range(1, self._ranks.layout.world):
            yield _adapter().validate_json(self._messages.wait_for(str(rank)))
            self._messages.delete(str(rank))

    def _write(self, save: _Save) -> _Result:
        """Write this rank's file."""
        name = f"rank-{self._ranks.rank:05d}.safetensors"
        self._ranks.activity.writing = True
        try:
            save.copied.synchronize()
            ranges = list(_ranges(save.shards))
            if not ranges:
                return _Result()
            path, moved = self._partial(save) / name, self._ranks.activity.moving
            return _Result(write_shard_file(path, ranges, self._taking(_contents(save)), moved))
        except Exception as error:
            return _Result(failure=f"rank {self._ranks.rank}: {_reason(error)}")
        finally:
            self._taken.set()
            self._ranks.activity.writing = False

    def _taking(self, contents: Iterator[Content]) -> Iterator[Content]:
        """Yield `contents`, and note when all are taken."""
        yield from contents
        # The system has all bytes. The states may change while it makes them durable.
        self._taken.set()

    def _finish(self, save: _Save, results: list[_Result]) -> None:
        """Write the manifest of all shard files, and rename the checkpoint's folder."""
        partial = self._partial(save)
        failures = [result.failure for result in results if result.failure]
        if failures:
            raise RunFailedError(failures[0])
        shard_files = [result.shard_file for result in results if result.shard_file is not None]
        for shard_file in shard_files:
            if not (partial / shard_file.name).exists():
                raise RunFailedError(f"rank 0 does not see {shard_file.name}; all ranks must share {self._folder}")
        files, tensors = merge_shard_files(shard_files)
        manifest = Manifest(
            step=save.step,
            files=files,
            tensors=tensors,
            progress=save.progress,
            recipe=save.about["recipe"],
            model=save.about["model"],
        )
        self._confirm()
        commit(partial, self._folder / step_name(save.step), manifest)

    def _sync_and_prune(self, save: _Save) -> str:
        """Make the checkpoint's name durable, and then delete older checkpoints; return a warning, or nothing."""
        saved = f"the checkpoint of step {save.step} is saved"
        try:
            sync_folder(self._folder)
        except OSError as error:
            return f"{saved}, but may not survive a power failure, and older ones stay: {_reason(error)}"
        scheduled = save.progress.get("scheduled") if self._keep_scheduled else None
        try:
            prune(self._folder, save.step, self._keep, scheduled if isinstance(scheduled, int) else None)
        except OSError as error:
            return f"{saved}, but an older one stays: {_reason(error)}"
        return ""

    def _partial(self, save: _Save) -> Path:
        return self._folder / f"{step_name(save.step)}.partial"

    def _failure_text(self, save: _Save, reason: str) -> str:
        try:
            kept = step_folders(self._folder)
        except OSError:
            # Often the error that made the save fail.
            stays = "earlier ones cannot be listed"
        else:
            stays = f"the one of step {step_of(kept[-1])} stays" if kept else "there is no earlier one"
        return f"the checkpoint of step {save.step} was not saved: {reason}; {stays}"


def _states(shards: Sequence[StateRange]) -> list[torch.Tensor]:
    """Return the states that a save may copy before it begins."""
    read_now = [shard for shard in shards if not shard.read_late]
    return [shard.read(name, shard.start, shard.end).detach() for shard in read_now for name in shard.names]


def _ranges(shards: Sequence[StateRange]) -> Iterator[Range]:
    for shard in shards:
        for state in shard.names:
            for tensor, first, last in shard.unit.tensor_ranges(shard.start, shard.end):
                yield Range(tensor.name, tensor.shape, state, first, last)


def _contents(save: _Save) -> Iterator[Content]:
    """Yield the bytes of each of `_ranges`. States without a copy are read when their bytes are taken."""
    host = iter(save.host)
    for shard in save.shards:
        ranges = shard.unit.tensor_ranges(shard.start, shard.end)
        for name in shard.names:
            values, offset = None if shard.read_late else next(host, None), 0
            for _, first, last in ranges:
                end = offset + last - first
                if values is None:
                    yield StoredBytes(shard, name, shard.start + offset, shard.start + end)
                else:
                    yield bytes_of(values[offset:end])
                offset = end


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
