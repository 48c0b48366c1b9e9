"""Ranks that watch each other: each tells through the store that it lives and what it does, and one that is silent, or
that all others wait for, is named in one sentence and ends the run.

The first rank judges the others and they judge the first. A silence is counted in the listener's own rounds and not in
seconds, so that a job that is suspended as a whole may sleep as long as it likes.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import psutil
import torch.distributed as dist
from llmtrain_data.output import say

from llmtrain.comm.activity import Activity
from llmtrain.comm.crash_notes import CRASH_NOTES, Last, leave_verdict, read_note
from llmtrain.errors import EXIT_FAILED

# Seconds between two signs of life, at most; more often where the timeout is short.
LONGEST_ROUND = 5.0
ROUNDS = 8
# Rounds without a sign of life after which a rank is gone, once another has lost contact.
LOST_ROUNDS = 4
VERDICT = "verdict"


@dataclass(frozen=True)
class Beat:
    """A sign of life. turn: its number. moved: when the rank last began something, seconds since the epoch. lost:
    whether it has lost contact. writing: whether it writes its part of a checkpoint. born: when the process started,
    which tells it from a later one of the same pid."""

    host: str
    pid: int
    born: float
    turn: int = 0
    step: int = 0
    doing: str = ""
    moved: float = 0.0
    lost: bool = False
    writing: bool = False

    @property
    def last(self) -> Last:
        """What the rank did last."""
        return Last(self.step, "writing its part of a checkpoint" if self.writing else self.doing)


class Watchdog:
    """One rank's eye on the others, in two threads; what it finds ends the process with exit code 1.

    store: a connection of its own, as the training loop may wait for an answer in its. timeout: seconds within which
    silence or standstill has ended all ranks. noted: whether ranks note what they do, else standstill looks like work.
    """

    def __init__(self, activity: Activity, store: dist.Store, world: int, timeout: float, noted: bool) -> None:
        self._activity, self._store, self._timeout, self._noted = activity, store, timeout, noted
        self._pause = min(LONGEST_ROUND, timeout / ROUNDS)
        # Two rounds are for the others to hear of it.
        self._patience = max(2, int(timeout / self._pause) - 2)
        self._others = list(range(1, world)) if activity.rank == 0 else [0]
        self._heard: dict[int, Beat] = {}
        self._silent = dict.fromkeys(self._others, 0)
        self._answers = self._apart = self._still = self._told = 0
        self._newest = 0.0
        self._over = threading.Event()
        process = psutil.Process()
        self._self = Beat(socket.gethostname(), process.pid, process.create_time())
        self._tell()
        self._threads = [threading.Thread(target=work, name="watch", daemon=True) for work in (self._talk, self._guard)]
        for thread in self._threads:
            thread.start()

    def host_of(self, rank: int) -> str:
        """Return the name of the machine that a rank is on, as far as it can still be asked for."""
        try:
            return _parse(self._store.get(_key(rank))).host
        except RuntimeError:
            return "a machine that is out of reach"

    def leave_word(self) -> None:
        """Tell the others that this rank has said why it ends; they end a little later, without a word."""
        with suppress(RuntimeError):
            self._store.compare_set(VERDICT, "", json.dumps({"sentence": "", "gone": []}))

    def find_lost(self) -> None:
        """Wait, having lost contact, until it is known with whom: the process then ends. Returns if it never is."""
        self._over.wait(self._timeout)

    def end(self) -> None:
        """Watch no more."""
        self._over.set()
        for thread in self._threads:
            # One that waits for a store that is gone is left to end with the process.
            thread.join(1)

    def _talk(self) -> None:
        """Tell, hear and judge, round by round."""
        # A store that is gone is for `_guard` to notice, as is one that never answers.
        with suppress(RuntimeError):
            if self._activity.rank:
                # Known from the start, so that it is named and ended however soon it falls silent.
                self._heard[0] = _parse(self._store.get(_key(0)))
            while not self._over.wait(self._pause):
                self._tell()
                self._hear()
                self._answers += 1
                if self._store.check([VERDICT]):
                    self._carry_out(json.loads(self._store.get(VERDICT)))
                else:
                    self._judge()

    def _tell(self) -> None:
        activity, turn = self._activity, self._self.turn + 1
        last = activity.last
        self._self = replace(
            self._self, turn=turn, step=last.step, doing=last.doing, moved=activity.moved, lost=activity.lost,
            writing=activity.writing,
        )  # fmt: skip
        self._store.set(_key(activity.rank), json.dumps(asdict(self._self)))

    def _hear(self) -> None:
        here = [rank for rank in self._others if rank in self._heard or self._store.check([_key(rank)])]
        texts = self._store.multi_get([_key(rank) for rank in here]) if here else []
        for rank in self._others:
            self._silent[rank] += 1
        for rank, text in zip(here, texts, strict=True):
            beat = _parse(text)
            if rank not in self._heard or self._heard[rank].turn != beat.turn:
                self._silent[rank] = 0
            self._heard[rank] = beat

    def _judge(self) -> None:
        apart = self._activity.lost or any(beat.lost for beat in self._heard.values())
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
        """Where nobody begins anything any more, all wait for the one that stopped first."""
        beats = {0: self._self} | self._heard
        newest = max(beat.moved for beat in beats.values())
        self._still = self._still + 1 if newest == self._newest else 0
        self._newest = newest
        if self._still >= self._patience:
            # A checkpoint is written beside the training, which waits for it in the end.
            first = min(beats, key=lambda rank: (not beats[rank].writing, beats[rank].moved))
            whom = "the run waits for" if len(beats) == 1 else "the others wait for"
            self._condemn(
                f"nothing has moved for {self._spent(self._still)}: {whom} rank {first} on {beats[first].host}, which "
                f"stopped {beats[first].last}; where a step may take as long, raise train.timeout",
                [first] if first else [],
            )

    def _guard(self) -> None:
        """End this process when the store, which the first rank or its launcher keeps, answers no more."""
        answers, silent = 0, 0
        while not self._over.wait(self._pause):
            silent = 0 if self._answers != answers else silent + 1
            answers = self._answers
            if silent < (min(LOST_ROUNDS, self._patience) if self._activity.lost else self._patience):
                continue
            first = self._heard.get(0, self._self)
            # One voice for each machine, as they have nothing left to agree by: its first rank but the one gone.
            if self._activity.rank == max(self._activity.rank - int(os.environ.get("LOCAL_RANK", "0")), 1):
                self._say(
                    f"rank 0 on {first.host}, or what keeps the run's store there, has not answered "
                    f"{self._self.host} for {self._spent(silent)}; it was last seen {first.last}"
                )
            # One that is only stopped would outlive the run.
            self._kill([asdict(first)])
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
        beats = [asdict(self._heard[rank]) for rank in gone if rank in self._heard]
        text = json.dumps({"sentence": sentence, "gone": beats})
        held = self._store.compare_set(VERDICT, "", text).decode()
        if held == text:
            # In this order: what dies without a word is taken for the reason unless there is one.
            self._say(sentence)
            self._kill(beats)
            # The others have yet to read it, and the store may be this process's.
            time.sleep(2 * self._pause)
            os._exit(EXIT_FAILED)
        self._carry_out(json.loads(held))

    def _carry_out(self, verdict: dict[str, object]) -> None:
        """Do what another rank's verdict says, which has been said."""
        gone, path = verdict["gone"], os.environ.get(CRASH_NOTES)
        assert isinstance(gone, list)
        if gone and path is not None:
            leave_verdict(path, str(verdict["sentence"]))
        self._kill(gone)
        self._told += 1
        # Where a rank ended by itself, the others may be about to do the same.
        if verdict["sentence"] or self._activity.lost or self._told > LOST_ROUNDS:
            os._exit(EXIT_FAILED)

    def _kill(self, gone: Sequence[dict[str, object]]) -> None:
        """Kill what stands still on this machine, as it would outlive the run."""
        for beat in gone:
            if beat["host"] == self._self.host and beat["pid"] != self._self.pid:
                with suppress(psutil.Error):
                    process = psutil.Process(int(str(beat["pid"])))
                    if process.create_time() == beat["born"]:
                        process.kill()

    def _say(self, sentence: str) -> None:
        path = os.environ.get(CRASH_NOTES)
        if path is None:
            say(f"llmtrain: {sentence}; the run stopped", err=True)
        else:
            leave_verdict(path, sentence)


def _newest(rank: int, beat: Beat) -> Last:
    """Return what a rank did last, by its notes where they are at hand, as beats are some seconds apart."""
    with suppress(KeyError, OSError):
        return read_note(os.environ[CRASH_NOTES], rank)
    return beat.last


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _parse(text: bytes) -> Beat:
    return Beat(**json.loads(text))
