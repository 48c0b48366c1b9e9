"""What the benchmark of uneven stages makes of a pipeline of which all is known."""

import random
from itertools import product

import pytest
from llmtrain.parallel.pipeline.timeline import Timeline

from tools.bench.pipeline_watch import Done, Message, Watch, durations, transfers
from tools.bench.uneven import STAGES, OwnDurations, Setting, busy, play, replayed

SETTING, LIMIT = Setting(), 4
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
        free, watch = 0.0, Watch(steps=[(0.0, spans[-1].end)])
        for span in spans:
            action = span.action
            watch.actions.append(
                Done(rank, action.microbatch, action.kind.value, span.start, span.end, waited=span.start > free)
            )
            free = span.end
        watches.append(watch)
    return watches


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["1f1b", "message-driven"])
def test_a_timeline_of_what_happened_is_what_happened(schedule: str, seed: int) -> None:
    """Neither the links' latency is known to it nor that messages waited for each other, only when actions ran."""
    known = happened(schedule, seed)
    watches = watched(known)
    hops = transfers(watches, busy(SETTING))
    assert hops == pytest.approx([late + own for late, own in zip(LATENCY, busy(SETTING), strict=True)])
    actions = [[done for watch in watches for done in watch.actions]]
    figures = {"durations": durations(watches), "transfers": hops, "actions": actions, "limit": LIMIT}
    assert replayed(SETTING, schedule, figures) == pytest.approx([known.makespan])
