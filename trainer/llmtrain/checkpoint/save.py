"""Saving: every rank writes its ranges, rank 0 the manifest; nothing shows until all of it is on disk."""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from pydantic import JsonValue, TypeAdapter

from llmtrain.checkpoint.folder import clean, commit, prune, step_folders, step_name, step_of
from llmtrain.checkpoint.manifest import Manifest
from llmtrain.checkpoint.safetensors_file import bytes_of, sync_folder
from llmtrain.checkpoint.shard_file import Range, ShardFile, merge_shard_files, write_shard_file
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.checkpoint.store_messages import StoreMessages
from llmtrain.comm.ranks import Ranks
from llmtrain.errors import RunFailedError


@dataclass(frozen=True)
class _Save:
    """One save. host: the shards' states in order, in memory that stays as it is until the save has ended."""

    step: int
    shards: list[StateShard]
    host: list[torch.Tensor]
    copied: torch.cuda.Event | None
    progress: dict[str, JsonValue]
    about: Mapping[str, dict[str, JsonValue]]


@dataclass(frozen=True)
class _Report:
    """What a rank tells rank 0 of its part: the part, if it has ranges at all, or why it could not be written."""

    part: ShardFile | None = None
    failure: str = ""


class Checkpointer:
    """Saves checkpoints into one folder, one at a time.

    folder: the run's `checkpoints`, shared by all ranks. keep: how many complete ones stay. asynchronous:
    write in the background, from host copies made by `save`. Every rank makes one and calls the same methods
    in the same order. confirm: raises RunFailedError where the folder is another run's by now; called on the
    main rank before anything is written and before a checkpoint gets its name. Raises RunFailedError if what a killed
    process left in the folder cannot be cleaned up.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        keep: int,
        asynchronous: bool,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._ranks, self._keep, self._asynchronous = folder, ranks, keep, asynchronous
        self._messages, self._confirm = StoreMessages(ranks, "save"), confirm
        self._staging: list[torch.Tensor] = []
        self._failure: str | None = None
        self._remark = ""
        self._queue: SimpleQueue[_Save | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        if ranks.is_main:
            try:
                clean(folder)
            except OSError as error:
                raise RunFailedError(f"{folder} cannot be cleaned up: {_reason(error)}") from error
        if asynchronous:
            # One for all saves, as starting a thread takes milliseconds; it must not keep a failed run from ending.
            threading.Thread(target=self._work, name="checkpoint", daemon=True).start()

    def reserve(self, shards: list[StateShard]) -> None:
        """Allocate the host copies now, so that the first asynchronous save takes no longer than the next."""
        if not self._asynchronous and not any(state.is_cuda for state in _states(shards)):
            return
        sizes = [state.numel() for state in _states(shards)]
        if [buffer.numel() for buffer in self._staging] != sizes:
            pinned = any(state.is_cuda for state in _states(shards))
            # fill_ touches every page; memory that was only promised would be mapped during the first copy.
            self._staging = list(torch.empty(sum(sizes), dtype=torch.float32, pin_memory=pinned).fill_(0).split(sizes))

    def save(
        self,
        step: int,
        shards: list[StateShard],
        progress: dict[str, JsonValue],
        about: Mapping[str, dict[str, JsonValue]],
    ) -> str | None:
        """Save `shards`, this rank's own part of the states, as the checkpoint of `step`.

        progress: what the training loop needs to go on. about: `recipe`, the resolved recipe, and `model`,
        the GPTConfig, both as mappings. Asynchronous, it joins the previous save and returns when the states
        are copied (on CUDA: when the copies are queued on the current stream); else when the checkpoint is on
        disk. Returns a sentence if the joined save failed, or this one if it is not asynchronous, the same on
        every rank; earlier checkpoints then stay.
        """
        failure = self.wait()
        self._messages.next()
        host, copied = self._host_copies(shards)
        save = _Save(step, shards, host, copied, {**progress, "step": step}, about)
        if not self._asynchronous:
            self._run(save)
            # It stays for `wait` as well: who ends a run has to know whether its last checkpoint is there.
            return self._failure
        self._idle.clear()
        self._queue.put(save)
        return failure

    def wait(self) -> str | None:
        """Join the save that is under way. Returns a sentence if it failed, the same on every rank, once."""
        self._idle.wait()
        failure, self._failure = self._failure, None
        return failure

    def remark(self) -> str:
        """Return what there is to say of a save that went well, once; empty on all ranks but the first."""
        remark, self._remark = self._remark, ""
        return remark

    def close(self) -> str | None:
        """Join the save that is under way and free what the next one would need. Returns what `wait` returns."""
        failure = self.wait()
        self._staging = []
        self._queue.put(None)
        return failure

    def _host_copies(self, shards: list[StateShard]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        states = _states(shards)
        on_cuda = any(state.is_cuda for state in states)
        if not self._asynchronous and not on_cuda:
            return states, None
        self.reserve(shards)
        for buffer, state in zip(self._staging, states, strict=True):
            buffer.copy_(state, non_blocking=True)
        if not on_cuda:
            return self._staging, None
        copied = torch.cuda.Event()
        copied.record()
        return self._staging, copied

    def _work(self) -> None:
        """Do in the background what is queued, until told to end."""
        while (save := self._queue.get()) is not None:
            self._run(save)
            del save
            self._idle.set()

    def _run(self, save: _Save) -> None:
        """Write; whatever goes wrong reaches the training loop as a sentence."""
        try:
            self._failure = self._lead(save) if self._ranks.is_main else self._follow(save)
        except Exception as error:
            self._failure = self._sentence(save, _reason(error))
        # A store that is gone has nothing left to tell.
        with suppress(RuntimeError):
            self._conclude()

    def _follow(self, save: _Save) -> str | None:
        failure = self._messages.hear("open")
        if not failure:
            report = self._write(save)
            self._messages.tell(str(self._ranks.rank), TypeAdapter(_Report).dump_json(report).decode())
            failure = self._messages.hear("done")
        return failure or None

    def _lead(self, save: _Save) -> str | None:
        partial = self._partial(save)
        try:
            self._confirm()
            shutil.rmtree(partial, ignore_errors=True)
            first = not self._folder.exists()
            partial.mkdir(parents=True)
            if first:
                sync_folder(self._folder.parent)
        except (OSError, RunFailedError) as error:
            failure = self._sentence(save, _reason(error))
            self._messages.tell("open", failure)
            return failure
        self._messages.tell("open", "")
        try:
            self._finish(save, [self._write(save), *self._reports()])
        except Exception as error:
            with suppress(OSError):
                clean(self._folder)
            failure = self._sentence(save, _reason(error))
        else:
            failure, self._remark = "", self._prune(save)
        self._messages.tell("done", failure)
        return failure or None

    def _conclude(self) -> None:
        """Have the main rank, which has the store, stay until all others have heard how it went."""
        if self._ranks.is_main:
            for rank in range(1, self._ranks.layout.world):
                self._messages.hear(f"{rank} has heard")
                self._messages.forget(f"{rank} has heard")
        else:
            self._messages.tell(f"{self._ranks.rank} has heard", "")

    def _reports(self) -> Iterator[_Report]:
        for rank in range(1, self._ranks.layout.world):
            yield TypeAdapter(_Report).validate_json(self._messages.hear(str(rank)))
            self._messages.forget(str(rank))

    def _write(self, save: _Save) -> _Report:
        """Write this rank's file."""
        name = f"rank-{self._ranks.rank:05d}.safetensors"
        self._ranks.activity.writing = True
        try:
            if save.copied is not None:
                save.copied.synchronize()
            ranges = list(_ranges(save.shards))
            if not ranges:
                return _Report()
            return _Report(write_shard_file(self._partial(save) / name, ranges, self._moving(_contents(save))))
        except Exception as error:
            return _Report(failure=f"rank {self._ranks.rank}: {_reason(error)}")
        finally:
            self._ranks.activity.writing = False

    def _moving(self, contents: Iterator[memoryview]) -> Iterator[memoryview]:
        """Have it known that a long write goes on."""
        for content in contents:
            self._ranks.activity.moving()
            yield content

    def _finish(self, save: _Save, reports: list[_Report]) -> None:
        """Write the manifest over all parts and give the checkpoint its name."""
        partial = self._partial(save)
        failures = [report.failure for report in reports if report.failure]
        if failures:
            raise RunFailedError(failures[0])
        parts = [report.part for report in reports if report.part is not None]
        for part in parts:
            if not (partial / part.name).exists():
                raise RunFailedError(f"rank 0 does not see {part.name}; all ranks must share {self._folder}")
        files, tensors = merge_shard_files(parts)
        manifest = Manifest(save.step, files, tensors, save.progress, save.about["recipe"], save.about["model"])
        self._confirm()
        commit(partial, self._folder / step_name(save.step), manifest)

    def _prune(self, save: _Save) -> str:
        try:
            prune(self._folder, save.step, self._keep)
        except OSError as error:
            return f"the checkpoint of step {save.step} is saved, but an older one stays: {_reason(error)}"
        return ""

    def _partial(self, save: _Save) -> Path:
        return self._folder / f"{step_name(save.step)}.partial"

    def _sentence(self, save: _Save, reason: str) -> str:
        kept = step_folders(self._folder)
        stays = f"the one of step {step_of(kept[-1])} stays" if kept else "there is no earlier one"
        return f"the checkpoint of step {save.step} was not saved: {reason}; {stays}"


def _states(shards: list[StateShard]) -> list[torch.Tensor]:
    return [state.detach() for shard in shards for state in shard.states.values()]


def _ranges(shards: list[StateShard]) -> Iterator[Range]:
    for shard in shards:
        for state in shard.states:
            for tensor, first, last in shard.unit.tensor_ranges(shard.start, shard.end):
                yield Range(tensor.name, tensor.shape, state, first, last)


def _contents(save: _Save) -> Iterator[memoryview]:
    """Yield the bytes of each of `_ranges`."""
    host = iter(save.host)
    for shard in save.shards:
        pieces = shard.unit.tensor_ranges(shard.start, shard.end)
        for _ in shard.states:
            values, offset = next(host), 0
            for _, first, last in pieces:
                yield bytes_of(values[offset : offset + last - first])
                offset += last - first


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
