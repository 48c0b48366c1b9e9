"""Ranks watch each other through the store: a rank that is lost or hangs is named in one sentence, and the run ends.

Every rank regularly writes a heartbeat, with what it does. The first rank watches the others, and they watch the
first. A silence is counted in rounds of the watching rank and not in seconds, so that a whole job may be suspended
for any time. The clocks of machines may differ by any time.
"""

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import inf
from typing import Any

import psutil
import torch.distributed as dist
from llmtrain_data.output import say

from llmtrain.comm.activity import Activity
from llmtrain.comm.clocks import ClockOffset
from llmtrain.comm.crash_notes import CRASH_NOTES, EndReason, Last, read_note, write_reason
from llmtrain.comm.device import on_this_device
from llmtrain.comm.flight_recorder import FlightRecorder, GroupProgress
from llmtrain.comm.heartbeat import Heartbeat, ProcessId, RankState, key_of, parse
from llmtrain.comm.standstill import why_stalled
from llmtrain.comm.threads import started_by_agent
from llmtrain.errors import EXIT_FAILED, RESUMES

# Most seconds between two heartbeats; there are at least ROUNDS of them in a timeout.
LONGEST_ROUND = 5.0
ROUNDS = 8
# Rounds without a heartbeat after which a rank is taken for gone, once another rank has lost contact.
LOST_ROUNDS = 4
REASON = "reason"


class Watchdog:
    """Watches other ranks in two threads. If it finds one lost or hanging, it ends the process with exit code 1.

    store: a connection of its own, as the training loop may wait for an answer in its connection. timeout: seconds
    within which all ranks end after one is lost or hangs. noted: whether ranks record what they do; without records a
    hang looks like work. recorder: records the collectives, where the host runs ahead of its GPU; while they complete,
    nothing hangs. on_failure: called with the sentence before this watchdog ends the process; does nothing if not set.
    """

    def __init__(
        self, activity: Activity, store: dist.Store, world: int, timeout: float, noted: bool,
        recorder: FlightRecorder | None = None,
    ) -> None:  # fmt: skip
        self._activity, self._store, self._timeout, self._noted = activity, store, timeout, noted
        self._recorder, self._numbers, self._moved = recorder, None, 0.0
        self._pause = min(LONGEST_ROUND, timeout / ROUNDS)
        # The other ranks need two rounds to read the reason.
        self._most_missed = max(2, int(timeout / self._pause) - 2)
        self._others = list(range(1, world)) if activity.rank == 0 else [0]
        self._heartbeats: dict[int, Heartbeat] = {}
        self._missed = dict.fromkeys(self._others, 0)
        self._answers = self._without_contact = self._stalled = self._reasons_read = 0
        # When each rank last began something, by its own clock, and how far this clock is ahead of that one.
        self._moves: dict[int, float] = {}
        self._offsets: dict[int, ClockOffset] = {}
        self._looked = time.time()
        self.on_failure: Callable[[str], None] = lambda sentence: None
        self._over = threading.Event()
        process = psutil.Process()
        self._self = Heartbeat(ProcessId(socket.gethostname(), process.pid, process.create_time()))
        self._write_heartbeat()
        works = map(on_this_device, (self._exchange, self._watch_store))
        self._threads = [threading.Thread(target=work, name="watch", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def host_of(self, rank: int) -> str:
        """Return the name of the machine that a rank is on, or a text that says that the store does not answer."""
        try:
            return parse(self._store.get(key_of(rank))).host
        except RuntimeError:
            return "a machine that is out of reach"

    def leave_word(self) -> None:
        """Tell the others that this rank ends and says why. They end a little later and print nothing."""
        with suppress(RuntimeError):
            self._store.compare_set(REASON, "", json.dumps({"sentence": "", "gone": []}))
        if self._holds_store:
            atexit.register(self._stay_until_read)

    @property
    def _holds_store(self) -> bool:
        return self._activity.rank == 0 and bool(self._others) and not started_by_agent(os.environ)

    def _stay_until_read(self) -> None:
        """Hold the store until the others have ended: over NCCL, those that have not read why would wait for long."""
        before = list[bytes]()
        with suppress(RuntimeError):
            # They end by themselves, or after LOST_ROUNDS.
            for _ in range(LOST_ROUNDS + 2):
                time.sleep(self._pause)
                keys = [key_of(rank) for rank in self._others if self._store.check([key_of(rank)])]
                now = self._store.multi_get(keys) if keys else []
                if now == before:
                    return
                before = now

    def find_lost(self) -> None:
        """After a loss of contact, wait until the lost rank is found, which ends the process. Return if none is."""
        self._over.wait(self._timeout)

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        for thread in self._threads:
            # A thread that waits for a store that is gone ends with the process.
            thread.join(1)

    def _exchange(self) -> None:
        """Write a heartbeat, read the others' and look for failures, in every round."""
        # `_watch_store` notices a store that is gone or never answers.
        with suppress(RuntimeError):
            if self._activity.rank:
                # Read at the start, so that the first rank can be named and ended even if it is lost early.
                self._heartbeats[0] = parse(self._store.get(key_of(0)))
            while not self._over.wait(self._pause):
                self._write_heartbeat()
                self._read_heartbeats()
                self._answers += 1
                if self._store.check([REASON]):
                    self._end_with(json.loads(self._store.get(REASON)))
                else:
                    self._check_ranks()

    def _write_heartbeat(self) -> None:
        activity, last = self._activity, self._activity.last
        moved, groups = self._moved_until(activity.moved)
        # The host may wait for the GPU, and so may not learn of it.
        activity.lost = activity.lost or (self._recorder is not None and self._recorder.has_failed())
        state = RankState(
            step=last.step, doing=last.doing, moved=moved, lost=activity.lost, writing=activity.writing,
            waiting=activity.waiting, groups=groups,
        )  # fmt: skip
        self._self = replace(self._self, number=self._self.number + 1, state=state, sent=time.time())
        self._store.set(key_of(activity.rank), json.dumps(asdict(self._self)))

    def _moved_until(self, began: float) -> tuple[float, dict[str, GroupProgress]]:
        """Return when this rank last began something or had a collective, and its groups if that is a round ago. began:
        when its host last began something."""
        if self._recorder is None:
            return began, {}
        numbers = self._recorder.numbers()
        still = numbers == self._numbers and began <= self._moved
        if not still:
            self._numbers, self._moved = numbers, time.time()
        return self._moved, self._recorder.groups() if still else {}

    def _read_heartbeats(self) -> None:
        here = [rank for rank in self._others if rank in self._heartbeats or self._store.check([key_of(rank)])]
        looked, self._looked = self._looked, time.time()
        texts = self._store.multi_get([key_of(rank) for rank in here]) if here else []
        found = time.time()
        for rank in self._others:
            self._missed[rank] += 1
        for rank, text in zip(here, texts, strict=True):
            heartbeat = parse(text)
            if rank not in self._heartbeats or self._heartbeats[rank].number != heartbeat.number:
                self._missed[rank] = 0
                # The first heartbeat may be older than the first look.
                since = looked if rank in self._heartbeats else -inf
                self._offsets[rank] = self._offsets.get(rank, ClockOffset()).narrowed(heartbeat.sent, since, found)
            self._heartbeats[rank] = heartbeat

    def _check_ranks(self) -> None:
        apart = self._activity.lost or any(one.state.lost for one in self._heartbeats.values())
        self._without_contact = self._without_contact + 1 if apart else 0
        most = min(LOST_ROUNDS, self._most_missed) if apart else self._most_missed
        gone = [rank for rank in self._others if self._missed[rank] >= most]
        if gone:
            self._end_run(self._named(gone), gone)
        elif self._without_contact > 2 * LOST_ROUNDS:
            self._end_run(f"ranks lost contact with each other {self._activity.last}, though each still answers", [])
        elif self._noted and self._activity.rank == 0 and len(self._heartbeats) == len(self._others):
            self._check_progress()

    def _check_progress(self) -> None:
        """If no rank has begun anything for long, end the run."""
        heartbeats = {0: self._self} | self._heartbeats
        moves = {rank: heartbeat.state.moved for rank, heartbeat in heartbeats.items()}
        self._stalled = self._stalled + 1 if moves == self._moves else 0
        if not self._stalled:
            self._moves = moves
            # Clocks may be set in a long run.
            self._offsets.clear()
        if self._stalled >= self._most_missed:
            offsets = {rank: offset.seconds for rank, offset in self._offsets.items()}
            self._end_run(*why_stalled(heartbeats, offsets, self._spent(self._stalled), self._recorder is not None))

    def _watch_store(self) -> None:
        """End this process when the store, which the first rank or its launcher holds, no longer answers."""
        answers, silent = 0, 0
        while not self._over.wait(self._pause):
            silent = 0 if self._answers != answers else silent + 1
            answers = self._answers
            # Without the store, nobody else asks.
            if silent and self._recorder is not None and self._recorder.has_failed():
                self._activity.lost = True
            if silent < (min(LOST_ROUNDS, self._most_missed) if self._activity.lost else self._most_missed):
                continue
            first = self._heartbeats.get(0, self._self)
            # Without the store, ranks cannot agree who reports. The first rank of each machine does.
            # Rank 1 replaces rank 0, because the sentence is about rank 0.
            if self._activity.rank == max(self._activity.rank - int(os.environ.get("LOCAL_RANK", "0")), 1):
                sentence = (
                    f"rank 0 on {first.host}, or what keeps the run's store there, has not answered "
                    f"{self._self.host} for {self._spent(silent)}; it was last seen {first.last}"
                )
                self._say(EndReason(sentence, 0))
            # A process that is only stopped would outlive the run.
            self._kill([asdict(first.process)])
            os._exit(EXIT_FAILED)

    def _named(self, gone: Sequence[int]) -> str:
        known = [(rank, self._heartbeats[rank]) for rank in gone if rank in self._heartbeats]
        unknown = [str(rank) for rank in gone if rank not in self._heartbeats]
        parts = [
            f"rank {rank} on {heartbeat.host} has not answered for {self._spent(self._missed[rank])}, last seen "
            f"{_newest(rank, heartbeat)}"
            for rank, heartbeat in known[:4]
        ]
        parts += [f"{len(known) - 4} more do not answer either"] if len(known) > 4 else []
        parts += [f"rank {', '.join(unknown[:8])} never came"] if unknown else []
        return "; ".join(parts)

    def _spent(self, rounds: int) -> str:
        return f"{rounds * self._pause:.3g} s"

    def _end_run(self, sentence: str, gone: Sequence[int]) -> None:
        """End the run, unless another rank does. gone: the ranks at fault, maybe this one too; the others of them are
        killed."""
        reason = EndReason(sentence, gone[0] if gone else None)
        processes = [asdict(self._heartbeats[rank].process) for rank in gone if rank in self._heartbeats]
        text = json.dumps(asdict(reason) | {"gone": processes})
        stored = self._store.compare_set(REASON, "", text).decode()
        if stored == text:
            # Say the reason first: the launcher takes a rank that dies without a reason for the reason, and the others
            # may end as soon as they read the reason.
            self._say(reason)
            self._report_in_time(sentence)
            self._kill(processes)
            if self._others:
                # The others still have to read the reason, and this process may hold the store.
                time.sleep(2 * self._pause)
            os._exit(EXIT_FAILED)
        self._end_with(json.loads(stored))

    def _end_with(self, reason: dict[str, Any]) -> None:
        """Act on the reason that another rank has given and printed."""
        gone, path = reason["gone"], os.environ.get(CRASH_NOTES)
        if gone and path is not None:
            write_reason(path, EndReason(reason["sentence"], reason["rank"]))
        self._kill(gone)
        self._reasons_read += 1
        # Without a sentence a rank ended by itself, and the others may be about to do so.
        if reason["sentence"] or self._activity.lost or self._reasons_read > LOST_ROUNDS:
            if reason["sentence"]:
                self._report_in_time(reason["sentence"])
            if self._holds_store:
                self._stay_until_read()
            os._exit(EXIT_FAILED)

    def _report_in_time(self, sentence: str) -> None:
        """Call `on_failure` with why the run ends, and wait for it for a round at most: it may write to a disk that is
        gone."""
        thread = threading.Thread(target=self.on_failure, args=(sentence,), daemon=True)
        thread.start()
        thread.join(self._pause)

    def _kill(self, gone: Sequence[dict[str, object]]) -> None:
        """Kill those of the processes that are on this machine, as they would outlive the run."""
        own = self._self.process
        for one in gone:
            if one["host"] == own.host and one["pid"] != own.pid:
                with suppress(psutil.Error):
                    process = psutil.Process(int(str(one["pid"])))
                    if process.create_time() == one["born"]:
                        process.kill()

    def _say(self, reason: EndReason) -> None:
        path = os.environ.get(CRASH_NOTES)
        if path is None:
            say(f"llmtrain: {reason.sentence}; the run stopped; {RESUMES}", err=True)
        else:
            write_reason(path, reason)


def _newest(rank: int, heartbeat: Heartbeat) -> Last:
    """Return what a rank did last, from its crash note if there is one, as a heartbeat may be some seconds old."""
    with suppress(KeyError, OSError):
        return read_note(os.environ[CRASH_NOTES], rank)
    return heartbeat.last
