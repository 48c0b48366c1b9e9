"""What the benchmark of uneven stages makes of a pipeline of which all is known."""

import random
from itertools import product

import pytest
from llmtrain.parallel.pipeline.timeline import Timeline

from tools.bench import pipeline_watch
from tools.bench.pipeline_watch import Done, Message, Watch, durations, transfers
from tools.bench.uneven import STAGES, OwnDurations, Setting, busy, play, replayed

SETTING, LIMIT = Setting(hidden=256, tokens=64), 4
LATENCY = [0.01, 0.06]


def sends(message: Message) -> bool:
    return message.stage < STAGES - 1 if message.kind == "F" else message.stage > 0


def happened(schedule: str, seed: int) -> Timeline:
    """Return a timeline of actions of which each takes as long as it likes."""
    draw = random.Random(seed)
    took = {
        Message(*key): draw.uniform(0.005, 0.05) for key in product(range(STAGES), range(SETTING.microbatches), "FB")
    }
    late = {message: LATENCY[message.stage - (message.kind == "B")] for message in took if sends(message)}
    means = [0.01] * STAGES
    own = OwnDurations(means, means, means, busy(SETTING), [], took, took, late)
    return play(SETTING, schedule, LIMIT, own)


def watched(known: Timeline) -> list[Watch]:
    """Return what the ranks' watches note of it."""
    watches = []
    for rank, spans in enumerate(known.ranks):
        watch = Watch(steps=[(0.0, spans[-1].end)])
        for span in spans:
            watch.actions.append(Done(rank, span.action.microbatch, span.action.kind.value, span.start, span.end))
        watches.append(watch)
    return watches


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["1f1b", "message-driven"])
def test_a_timeline_of_what_happened_is_what_happened(
    schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the links' latency is known to it nor that messages waited for each other, only when actions ran."""
    # Nothing holds up these ranks but what they wait for.
    monkeypatch.setattr(pipeline_watch, "WAITED", 1e-9)
    known = happened(schedule, seed)
    watches = watched(known)
    hops = transfers(watches, busy(SETTING))
    assert hops == pytest.approx([late + own for late, own in zip(LATENCY, busy(SETTING), strict=True)])
    actions = [[watch.actions for watch in watches]]
    figures = {"durations": durations(watches), "transfers": hops, "actions": actions, "limit": LIMIT}
    assert replayed(SETTING, schedule, figures) == pytest.approx([known.makespan])
