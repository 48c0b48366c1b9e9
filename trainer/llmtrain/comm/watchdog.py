"""Ranks watch each other through the store: a rank that is lost or hangs is named in one sentence, and the run ends.

Every rank regularly writes a sign of life, a beat, with what it does. The first rank watches the others, and they watch
the first. A silence is counted in rounds of the watching rank and not in seconds, so that a whole job may be suspended
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
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

import psutil
import torch.distributed as dist
from llmtrain_data.output import say

from llmtrain.comm.activity import Activity
from llmtrain.comm.clocks import ClockOffset
from llmtrain.comm.crash_notes import CRASH_NOTES, Last, Verdict, leave_verdict, read_note
from llmtrain.comm.device import on_this_device
from llmtrain.comm.flight_recorder import FlightRecorder, GroupProgress, late_rank, queued_by_all
from llmtrain.comm.threads import started_by_agent
from llmtrain.errors import EXIT_FAILED, RESUMES

# Most seconds between two beats; there are at least ROUNDS of them in a timeout.
LONGEST_ROUND = 5.0
ROUNDS = 8
# Rounds without a beat after which a rank is taken for gone, once another rank has lost contact.
LOST_ROUNDS = 4
VERDICT = "verdict"
# What ranks do before their first collective.
CONNECTING = "connecting to the other ranks"


@dataclass(frozen=True)
class ProcessId:
    """A process of a machine. born: when it started, which tells it from a later process with the same pid."""

    host: str
    pid: int
    born: float


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What a rank does. moved: when it last began something, by its own clock, in seconds. lost: whether it has lost
    contact to others. writing: whether it writes its part of a checkpoint. waiting: whether its host waits for others.
    groups: progress of its collectives by group, where its host runs ahead of its GPU and nothing has moved for a
    round."""

    step: int = 0
    doing: str = ""
    moved: float = 0.0
    lost: bool = False
    writing: bool = False
    waiting: bool = False
    groups: dict[str, GroupProgress] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat:
    """A sign of life. number: counts them. sent: when it was written, by the rank's own clock, in seconds."""

    process: ProcessId
    number: int = 0
    state: RankState = RankState()
    sent: float = 0.0

    @property
    def host(self) -> str:
        """The machine that the rank is on."""
        return self.process.host

    @property
    def last(self) -> Last:
        """What the rank did last."""
        return Last(self.state.step, "writing its part of a checkpoint" if self.state.writing else self.state.doing)


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
        # The other ranks need two rounds to read the verdict.
        self._patience = max(2, int(timeout / self._pause) - 2)
        self._others = list(range(1, world)) if activity.rank == 0 else [0]
        self._heard: dict[int, Beat] = {}
        self._silent = dict.fromkeys(self._others, 0)
        self._answers = self._apart = self._still = self._verdicts_read = 0
        # When each rank last began something, by its own clock, and how far this clock is ahead of that one.
        self._moves: dict[int, float] = {}
        self._offsets: dict[int, ClockOffset] = {}
        self._looked = time.time()
        self.on_failure: Callable[[str], None] = lambda sentence: None
        self._over = threading.Event()
        process = psutil.Process()
        self._self = Beat(ProcessId(socket.gethostname(), process.pid, process.create_time()))
        self._write_beat()
        works = map(on_this_device, (self._talk, self._guard))
        self._threads = [threading.Thread(target=work, name="watch", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def host_of(self, rank: int) -> str:
        """Return the name of the machine that a rank is on, or a text that says that the store does not answer."""
        try:
            return _parse(self._store.get(_key(rank))).host
        except RuntimeError:
            return "a machine that is out of reach"

    def leave_word(self) -> None:
        """Tell the others that this rank ends and says why. They end a little later and print nothing."""
        with suppress(RuntimeError):
            self._store.compare_set(VERDICT, "", json.dumps({"sentence": "", "gone": []}))
        if self._activity.rank == 0 and self._others and not started_by_agent(os.environ):
            # The others still have to read it, and this process holds the store. Over NCCL they would wait for long.
            atexit.register(time.sleep, 2 * self._pause)

    def find_lost(self) -> None:
        """After a loss of contact, wait until the lost rank is found, which ends the process. Return if none is."""
        self._over.wait(self._timeout)

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
        for thread in self._threads:
            # A thread that waits for a store that is gone ends with the process.
            thread.join(1)

    def _talk(self) -> None:
        """Write a beat, read the others' and judge, in every round."""
        # `_guard` notices a store that is gone or never answers.
        with suppress(RuntimeError):
            if self._activity.rank:
                # Read at the start, so that the first rank can be named and ended even if it is lost early.
                self._heard[0] = _parse(self._store.get(_key(0)))
            while not self._over.wait(self._pause):
                self._write_beat()
                self._hear()
                self._answers += 1
                if self._store.check([VERDICT]):
                    self._carry_out(json.loads(self._store.get(VERDICT)))
                else:
                    self._judge()

    def _write_beat(self) -> None:
        activity, last = self._activity, self._activity.last
        moved, groups = self._moved_until(activity.moved)
        # The host may wait for the GPU, and so may not learn of it.
        activity.lost = activity.lost or (self._recorder is not None and self._recorder.has_failed())
        state = RankState(
            step=last.step, doing=last.doing, moved=moved, lost=activity.lost, writing=activity.writing,
            waiting=activity.waiting, groups=groups,
        )  # fmt: skip
        self._self = replace(self._self, number=self._self.number + 1, state=state, sent=time.time())
        self._store.set(_key(activity.rank), json.dumps(asdict(self._self)))

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

    def _hear(self) -> None:
        here = [rank for rank in self._others if rank in self._heard or self._store.check([_key(rank)])]
        looked, self._looked = self._looked, time.time()
        texts = self._store.multi_get([_key(rank) for rank in here]) if here else []
        found = time.time()
        for rank in self._others:
            self._silent[rank] += 1
        for rank, text in zip(here, texts, strict=True):
            beat = _parse(text)
            if rank not in self._heard or self._heard[rank].number != beat.number:
                self._silent[rank] = 0
                # The first beat may be older than the first look.
                since = looked if rank in self._heard else -inf
                self._offsets[rank] = self._offsets.get(rank, ClockOffset()).narrowed(beat.sent, since, found)
            self._heard[rank] = beat

    def _judge(self) -> None:
        apart = self._activity.lost or any(beat.state.lost for beat in self._heard.values())
        self._apart = self._apart + 1 if apart else 0
        patience = min(LOST_ROUNDS, self._patience) if apart else self._patience
        gone = [rank for rank in self._others if self._silent[rank] >= patience]
        if gone:
            self._condemn(self._named(gone), gone)
        elif self._apart > 2 * LOST_ROUNDS:
            self._condemn(f"ranks lost contact with each other {self._activity.last}, though each still answers", [])
        elif self._noted and self._activity.rank == 0 and len(self._heard) == len(self._others):
            self._judge_standstill()

    def _judge_standstill(self) -> None:
        """If no rank has begun anything for long, all of them wait for the rank that stopped first."""
        beats = {0: self._self} | self._heard
        moves = {rank: beat.state.moved for rank, beat in beats.items()}
        self._still = self._still + 1 if moves == self._moves else 0
        if not self._still:
            self._moves = moves
            # Clocks may be set in a long run.
            self._offsets.clear()
        if self._still >= self._patience:
            if all(beat.state.doing == CONNECTING for beat in beats.values()):
                self._condemn(
                    f"the ranks have not connected for {self._spent(self._still)}; {self._connecting_hint()}", []
                )
                return
            # A rank that writes a checkpoint comes first: the training continues meanwhile and then waits for it. Then
            # one that does not wait for others.
            offsets = {rank: offset.seconds for rank, offset in self._offsets.items()}
            begun = {rank: moved + offsets.get(rank, 0.0) for rank, moved in moves.items()}
            states = {rank: beat.state for rank, beat in beats.items()}
            first = min(states, key=lambda rank: (not states[rank].writing, states[rank].waiting, begun[rank]))
            whom, groups = "the others wait", {rank: beat.state.groups for rank, beat in beats.items()}
            if not beats[first].state.writing:
                if (late := late_rank(groups)) is not None:
                    first, whom = late[0], f"the others wait in {late[1]}"
                elif (what := queued_by_all(groups)) is not None:
                    # No host is behind: which GPU is, nobody records.
                    self._condemn(
                        f"nothing has moved for {self._spent(self._still)}: ranks wait in {what}, and all of them have "
                        "queued it, so a GPU or the network stands still; NCCL_DEBUG=INFO and the kernel's log of each "
                        "machine (dmesg) may show which; where a step may take as long, raise train.timeout",
                        [],
                    )
                    return
            last = beats[first].last
            where = f": {whom} for rank {first} on {beats[first].host}, which stopped {last}; where a step"
            if len(beats) == 1:
                where = f" in {last.doing}, after step {last.step}; where that"
            self._condemn(
                f"nothing has moved for {self._spent(self._still)}{where} may take as long, raise train.timeout",
                [first],
            )

    def _connecting_hint(self) -> str:
        """Return what to look at where ranks start and do not connect."""
        if self._recorder is None:
            return "see whether their machines reach each other, or raise train.timeout"
        return (
            "NCCL_DEBUG=INFO shows where NCCL waits: often for a network that joins not all machines "
            "(the interface in the cluster's description sets it, or else NCCL_SOCKET_IFNAME), or for GPUs that cannot "
            "reach each other (NCCL_P2P_DISABLE=1)"
        )

    def _guard(self) -> None:
        """End this process when the store, which the first rank or its launcher holds, no longer answers."""
        answers, silent = 0, 0
        while not self._over.wait(self._pause):
            silent = 0 if self._answers != answers else silent + 1
            answers = self._answers
            # Without the store, nobody else asks.
            if silent and self._recorder is not None and self._recorder.has_failed():
                self._activity.lost = True
            if silent < (min(LOST_ROUNDS, self._patience) if self._activity.lost else self._patience):
                continue
            first = self._heard.get(0, self._self)
            # Without the store, ranks cannot agree who reports. The first rank of each machine does.
            # Rank 1 replaces rank 0, because the sentence is about rank 0.
            if self._activity.rank == max(self._activity.rank - int(os.environ.get("LOCAL_RANK", "0")), 1):
                sentence = (
                    f"rank 0 on {first.host}, or what keeps the run's store there, has not answered "
                    f"{self._self.host} for {self._spent(silent)}; it was last seen {first.last}"
                )
                self._say(Verdict(sentence, 0))
            # A process that is only stopped would outlive the run.
            self._kill([asdict(first.process)])
            os._exit(EXIT_FAILED)

    def _named(self, gone: Sequence[int]) -> str:
        known = [(rank, self._heard[rank]) for rank in gone if rank in self._heard]
        unknown = [str(rank) for rank in gone if rank not in self._heard]
        parts = [
            f"rank {rank} on {beat.host} has not answered for {self._spent(self._silent[rank])}, last seen "
            f"{_newest(rank, beat)}"
            for rank, beat in known[:4]
        ]
        parts += [f"{len(known) - 4} more do not answer either"] if len(known) > 4 else []
        parts += [f"rank {', '.join(unknown[:8])} never came"] if unknown else []
        return "; ".join(parts)

    def _spent(self, rounds: int) -> str:
        return f"{rounds * self._pause:.3g} s"

    def _condemn(self, sentence: str, gone: Sequence[int]) -> None:
        """End the run, unless another rank does. gone: the ranks at fault, maybe this one too; the others of them are
        killed."""
        verdict = Verdict(sentence, gone[0] if gone else None)
        processes = [asdict(self._heard[rank].process) for rank in gone if rank in self._heard]
        text = json.dumps(asdict(verdict) | {"gone": processes})
        held = self._store.compare_set(VERDICT, "", text).decode()
        if held == text:
            # Say the reason first: the launcher takes a rank that dies without a reason for the reason, and the others
            # may end as soon as they read the verdict.
            self._say(verdict)
            self._report_in_time(sentence)
            self._kill(processes)
            if self._others:
                # The others still have to read the verdict, and this process may hold the store.
                time.sleep(2 * self._pause)
            os._exit(EXIT_FAILED)
        self._carry_out(json.loads(held))

    def _carry_out(self, verdict: dict[str, Any]) -> None:
        """Act on another rank's verdict, which that rank has printed."""
        gone, path = verdict["gone"], os.environ.get(CRASH_NOTES)
        if gone and path is not None:
            leave_verdict(path, Verdict(verdict["sentence"], verdict["suspect"]))
        self._kill(gone)
        self._verdicts_read += 1
        # Without a sentence a rank ended by itself, and the others may be about to do so.
        if verdict["sentence"] or self._activity.lost or self._verdicts_read > LOST_ROUNDS:
            if verdict["sentence"]:
                self._report_in_time(verdict["sentence"])
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

    def _say(self, verdict: Verdict) -> None:
        path = os.environ.get(CRASH_NOTES)
        if path is None:
            say(f"llmtrain: {verdict.sentence}; the run stopped; {RESUMES}", err=True)
        else:
            leave_verdict(path, verdict)


def _newest(rank: int, beat: Beat) -> Last:
    """Return what a rank did last, from its crash note if there is one, as a beat may be some seconds old."""
    with suppress(KeyError, OSError):
        return read_note(os.environ[CRASH_NOTES], rank)
    return beat.last


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _parse(text: bytes) -> Beat:
    beat = json.loads(text)
    groups = {name: GroupProgress(*values) for name, values in beat["state"].pop("groups").items()}
    return Beat(ProcessId(**beat["process"]), beat["number"], RankState(**beat["state"], groups=groups), beat["sent"])
