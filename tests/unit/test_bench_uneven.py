"""The benchmark of uneven stages, on pipelines whose times are all known."""

import random
from itertools import product

import pytest
from llmtrain.plan.pipeline.timeline import Timeline

from tools.bench import pipeline_recorder
from tools.bench.pipeline_recorder import Done, Message, Recorder, transfers
from tools.bench.uneven import SETTINGS, STAGES, OwnDurations, busy, replayed, simulated_timeline, timeline

SETTING, LIMIT = SETTINGS[0], 4
LATENCY = [0.01, 0.06]
# Seconds that a rank needs to start an action.
COMING = 1e-3


def sends(message: Message) -> bool:
    return message.stage < STAGES - 1 if message.kind == "F" else message.stage > 0


def happened(schedule: str, seed: int, alike: bool = False) -> Timeline:
    """Return a timeline of actions with random durations. alike: actions of one stage and kind take equally long."""
    draw = random.Random(seed)
    took: dict[Message, float] = {}
    for stage, microbatch, kind in product(range(STAGES), range(SETTING.microbatches), "FB"):
        before = took.get(Message(stage, microbatch - 1, kind)) if alike else None
        took[Message(stage, microbatch, kind)] = before or draw.uniform(0.005, 0.05)
    late = {message: LATENCY[message.stage - (message.kind == "B")] for message in took if sends(message)}
    means = [0.01] * STAGES
    own = OwnDurations(means, means, means, busy(SETTING), took=took, handed=took, late=late)
    return simulated_timeline(SETTING, schedule, LIMIT, own)


def recorded(known: Timeline) -> list[Recorder]:
    """Return the records that the ranks' recorders make of a timeline."""
    recorders = []
    for rank, spans in enumerate(known.ranks):
        recorder = Recorder(steps=[(0.0, spans[-1].end)])
        for span in spans:
            idle = span.start - recorder.actions[-1].end if recorder.actions else span.start
            microbatch, kind = span.action.microbatch, span.action.kind.value
            # A rank that has waited for a message is ready by the time it arrives.
            start = span.start if idle > COMING or not recorder.actions else span.start + COMING
            recorder.actions.append(
                Done(stage=rank, microbatch=microbatch, kind=kind, start=start, end=span.end, idle=idle)
            )
        recorders.append(recorder)
    return recorders


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["1f1b", "message-driven"])
def test_a_timeline_of_what_happened_is_what_happened(
    schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay knows only when actions ran, and neither the links' latency nor which messages waited for each
    other."""
    # These ranks wait only for messages, and for the time that they need to start an action.
    for name in ("WAITED", "AT_ONCE"):
        monkeypatch.setattr(pipeline_recorder, name, COMING)
    known = happened(schedule, seed)
    recorders = recorded(known)
    hops = transfers(recorders, busy(SETTING))
    assert hops == pytest.approx([late + own for late, own in zip(LATENCY, busy(SETTING), strict=True)])
    actions = [[recorder.actions for recorder in recorders]]
    figures = {"transfers": hops, "actions": actions, "limit": LIMIT}
    assert replayed(SETTING, schedule, figures) == pytest.approx([known.makespan])


@pytest.mark.parametrize("schedule", ["1f1b", "message-driven"])
def test_a_timeline_of_means_is_what_happens_where_all_are_alike(schedule: str) -> None:
    known = happened(schedule, 0, alike=True)
    actions = [[recorder.actions for recorder in recorded(known)]]
    hops = [late + own for late, own in zip(LATENCY, busy(SETTING), strict=True)]
    assert timeline(SETTING, schedule, {"transfers": hops, "actions": actions, "limit": LIMIT}) == pytest.approx(
        [known.makespan], rel=COMING
    )
