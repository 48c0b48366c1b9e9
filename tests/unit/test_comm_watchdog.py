"""What the watchdog concludes from heartbeats, whatever the clocks of machines show."""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from llmtrain.comm import watchdog
from llmtrain.comm.activity import Activity
from llmtrain.comm.crash_notes import CRASH_NOTES, CrashNotes, EndReason
from llmtrain.comm.heartbeat import Heartbeat, ProcessId, RankState
from llmtrain.comm.watchdog import LOST_ROUNDS, Watchdog

ROUND = 5.0
STOPPED = 1000.0


class Pair:
    """Rank 0, which watches rank 1. ahead: by how many seconds the clock of rank 1 is ahead."""

    def __init__(self, ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ahead, self.reasons, self.gone = 0.0, ahead, list[str](), list[int]()
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(time=lambda: self.now, sleep=time.sleep))
        monkeypatch.setattr(Watchdog, "_end_run", lambda _, sentence, gone: self._end_run(sentence, gone))
        self._activity, self._store = Activity(0), dist.HashStore()
        self._watchdog = Watchdog(self._activity, self._store, 2, 600.0, noted=True)
        # Rounds are begun here instead of by its thread.
        self._watchdog.end()
        self._rounds = 0

    def _end_run(self, sentence: str, gone: list[int]) -> None:
        self.reasons.append(sentence)
        self.gone += gone

    def round(self, moved: Callable[[int, float], float], waiting: int | None = None) -> None:
        """Do one round. moved: returns when a rank last began something before a time, both by the clock of rank 0.
        waiting: a rank that waits for the other."""
        self._rounds += 1
        self.now += ROUND
        # Rounds of two ranks do not last exactly as long.
        sent = self.now - self._rounds * 0.3 % ROUND
        state = RankState(step=3, doing="computing", moved=moved(1, sent) + self.ahead, waiting=waiting == 1)
        heartbeat = Heartbeat(ProcessId("b", 1, 0.0), self._rounds, state, sent + self.ahead)
        self._store.set("heartbeat/1", json.dumps(asdict(heartbeat)))
        self._activity.moved, self._activity.waiting = moved(0, self.now), waiting == 0
        self._watchdog._write_heartbeat()
        self._watchdog._read_heartbeats()
        self._watchdog._check_ranks()


class Gone(dist.HashStore):
    """The store of a rank 0 that is gone."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("failed", [False, True])
def test_without_a_store_what_nccl_reports_still_counts(failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for its GPU then, and learns of nothing."""
    rounds, recorder = list[int](), SimpleNamespace(has_failed=lambda: failed, numbers=dict, groups=dict)
    over = SimpleNamespace(wait=lambda seconds: rounds.append(1) or len(rounds) > 50)
    monkeypatch.setattr(Watchdog, "_write_heartbeat", lambda self: None)
    watching = Watchdog(Activity(1), Gone(), 2, 600.0, noted=True, recorder=recorder)  # type: ignore[arg-type]
    watching.end()
    monkeypatch.setattr(watching, "_over", over)
    monkeypatch.setattr(Watchdog, "_say", lambda self, sentence: None)
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: rounds.extend([0] * 1000))
    watching._watch_store()
    assert rounds.index(0) == LOST_ROUNDS if failed else 0 not in rounds


@pytest.mark.parametrize("ahead", [0.0, 900.0, -900.0])
@pytest.mark.parametrize("still", [0, 1])
def test_a_rank_that_moves_is_seen_to(still: int, ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the other one does not, for three timeouts."""
    pair = Pair(ahead, monkeypatch)
    for _ in range(360):
        pair.round(lambda rank, at: min(at, 10.0) if rank == still else at)
    assert pair.reasons == []


@pytest.mark.parametrize(
    ("ahead", "later"),
    [(0.0, 0.01), (0.5, 0.6), (900.0, 1.0), (-900.0, 1.0), (3.0, 1.0), (-3.0, 1.0)],
    ids=str,
)
@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_that_stopped_first_is_named(
    first: int, ahead: float, later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """later: the seconds after which the other one waits for it. Before, the clock of rank 1 was set."""
    pair = Pair(-7000.0, monkeypatch)
    while not pair.reasons:
        pair.ahead = ahead if pair.now > STOPPED / 2 else pair.ahead
        pair.round(lambda rank, at: min(at, STOPPED if rank == first else STOPPED + later))
    assert f"the others wait for rank {first} on" in pair.reasons[0]
    assert pair.gone == [first]
    # 118 rounds, and two until both heartbeats are there.
    assert STOPPED + 590 <= pair.now <= STOPPED + 600


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_that_waits_is_not_named(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it has begun nothing for longer than the one that it waits for."""
    pair = Pair(0.0, monkeypatch)
    while not pair.reasons:
        pair.round(lambda rank, at: min(at, STOPPED if rank == waiting else STOPPED + 2.0), waiting)
    assert f"the others wait for rank {1 - waiting} on" in pair.reasons[0]


@pytest.mark.parametrize(("gone", "suspect"), [([0], 0), ([], None)])
def test_the_rank_at_fault_is_left_for_the_launcher(
    gone: list[int], suspect: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the watchdog that finds it is its own."""
    notes = CrashNotes(2)
    monkeypatch.setenv(CRASH_NOTES, str(notes.path))
    monkeypatch.setattr(watchdog.os, "_exit", sys.exit)
    watching = Watchdog(Activity(0), dist.HashStore(), 2, 0.1, noted=False)
    watching.end()
    with pytest.raises(SystemExit):
        watching._end_run("nothing has moved", gone)
    assert notes.reason == EndReason("nothing has moved", suspect)
    notes.close()


@pytest.mark.parametrize(("rank", "by_agent", "rounds"), [(0, False, 3), (0, True, 0), (1, False, 0)])
def test_a_rank_that_holds_the_store_ends_after_the_others_have_ended(
    rank: int, by_agent: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an agent, which holds it longer, the first rank does."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if by_agent:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    store, slept, at_exit = dist.HashStore(), list[float](), list[Callable[[], None]]()
    watching = Watchdog(Activity(rank), store, 3, 600.0, noted=False)
    watching.end()
    monkeypatch.setattr(watchdog.atexit, "register", at_exit.append)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        # Rank 1 ends in the second round. Rank 2 never came.
        store.set("heartbeat/1", str(min(len(slept), 2)))

    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    watching.leave_word()
    for call in at_exit:
        call()
    assert slept == rounds * [watchdog.LONGEST_ROUND]
    assert store.check([watchdog.REASON])


def test_the_store_is_held_no_longer_than_others_may_take_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store, slept = dist.HashStore(), list[float]()
    watching = Watchdog(Activity(0), store, 2, 600.0, noted=False)
    watching.end()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        store.set("heartbeat/1", str(len(slept)))

    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    watching._stay_until_read()
    assert len(slept) == LOST_ROUNDS + 2


def test_only_the_thread_that_computes_is_said_to_wait() -> None:
    activity, seen = Activity(0), list[bool]()

    def look() -> None:
        seen.append(activity.waiting)

    activity.wait(look)
    activity.wait(lambda: activity.wait(look))
    other = threading.Thread(target=lambda: activity.wait(look))
    other.start()
    other.join()
    with pytest.raises(ZeroDivisionError):
        activity.wait(lambda: 1 / 0)
    assert seen == [True, True, False]
    assert not activity.waiting
