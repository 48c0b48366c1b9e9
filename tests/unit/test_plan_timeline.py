"""Timelines with any durations: what a message needs, who waits, and what has arrived."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule, peak_live
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.pipeline.timeline import Durations, Timeline, needs, simulate, simulate_message_driven
from llmtrain.plan.pipeline.validate import validate
from llmtrain.recipe.pipeline import ScheduleName

# Powers of two add up exactly.
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])


@st.composite
def durations(draw: st.DrawFn, stages: int) -> Durations:
    def each(count: int) -> list[float]:
        return draw(st.lists(SECONDS, min_size=count, max_size=count))

    return Durations(each(stages), each(stages), each(stages), [0.0] * (stages - 1), each(stages - 1))


def arrivals(schedule: Schedule, chosen: Durations, timeline: Timeline) -> dict[tuple[int, Action], float]:
    """Return when everything that each rank's actions need has arrived."""
    ends = {
        (span.action.kind, schedule.stage(rank, span.action.chunk), span.action.microbatch): span.end
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
    }
    found = {}
    for rank, order in enumerate(timeline.actions):
        for action in order:
            stage = schedule.stage(rank, action.chunk)
            came = [
                ends[kind, source, action.microbatch]
                + (0.0 if schedule.rank_and_chunk(source)[0] == rank else chosen.latency[min(source, stage)])
                for kind, source in needs(schedule.stages, stage, action.kind)
            ]
            found[rank, action] = max(came, default=0.0)
    return found


def check(schedule: Schedule, chosen: Durations, timeline: Timeline) -> None:
    """Every action starts exactly when its rank is free and everything it needs has arrived."""
    arrived = arrivals(schedule, chosen, timeline)
    for rank, spans in enumerate(timeline.ranks):
        free = 0.0
        for span in spans:
            assert span.start == max(free, arrived[rank, span.action])
            free = span.end


@settings(max_examples=150)
@given(
    st.data(),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]),
    st.integers(1, 8),
    st.integers(2, 4),
    st.integers(1, 32),
)
def test_any_durations(data: st.DataObject, name: ScheduleName, ranks: int, chunks: int, microbatches: int) -> None:
    chunks = {"interleaved": chunks, "zero-bubble-v": 2}.get(name, 1)
    schedule = make_schedule(name, ranks, chunks, microbatches)
    chosen = data.draw(durations(schedule.stages))
    timeline = simulate(schedule, chosen)
    check(schedule, chosen, timeline)
    work = microbatches * sum(sum(times) for times in (chosen.forward, chosen.backward, chosen.weights))
    assert sum(timeline.busy) == work
    assert timeline.bubble == pytest.approx(1 - work / (ranks * timeline.makespan))


@settings(max_examples=100)
@given(st.data(), st.integers(1, 8), st.integers(1, 32), st.integers(1, 12))
def test_message_driven(data: st.DataObject, ranks: int, microbatches: int, limit: int) -> None:
    chosen = data.draw(durations(ranks))
    timeline = simulate_message_driven(ranks, microbatches, limit, chosen)
    schedule = Schedule(ranks=ranks, chunks=1, microbatches=microbatches, actions=timeline.actions)
    validate(schedule)
    check(schedule, chosen, timeline)
    assert simulate(schedule, chosen) == timeline
    assert max(peak_live(schedule)) <= min(limit, microbatches)
    arrived = arrivals(schedule, chosen, timeline)
    for rank, spans in enumerate(timeline.ranks):
        waiting = {span.action for span in spans if span.action.kind is Kind.B}
        for span in spans:
            waiting.discard(span.action)
            if span.action.kind is Kind.F:
                assert all(arrived[rank, action] > span.start for action in waiting)


def test_even_message_driven_is_1f1b() -> None:
    for ranks, microbatches in [(1, 3), (4, 2), (4, 8), (8, 32)]:
        even = Durations.even(ranks)
        driven = simulate_message_driven(ranks, microbatches, ranks, even)
        assert driven.makespan == simulate(make_schedule("1f1b", ranks, 1, microbatches), even).makespan


def test_even_message_driven_hands_back_as_1f1b_does() -> None:
    for ranks, microbatches in [(1, 3), (4, 8), (8, 32)]:
        even, schedule = Durations.even(ranks), make_schedule("1f1b", ranks, 1, microbatches)
        driven = simulate_message_driven(ranks, microbatches, ranks, even, hands_back=True).makespan
        assert driven == simulate(replace(schedule, hands_back=True), even).makespan
        assert driven == simulate(schedule, even).makespan - (ranks - 1)


def test_one_under_way_is_one_after_the_other() -> None:
    assert simulate_message_driven(4, 5, 1, Durations.even(4, transfer=2.0)).makespan == 5 * (4 * 3 + 6 * 2)


def test_backward_goes_first() -> None:
    """The first rank has a gradient and room for a forward pass at the same moment."""
    timeline = simulate_message_driven(2, 4, 3, Durations.even(2, weights=0.0))
    assert " ".join(map(str, timeline.actions[0])) == "F0 F1 F2 B0 F3 B1 B2 B3"


def test_message_driven_is_faster_over_a_slow_uneven_link() -> None:
    """1F1B's order makes ranks wait for late messages while others have arrived."""
    uneven = Durations([1.0, 1.0, 2.0, 1.0], [1.0, 1.0, 2.0, 1.0], [1.0, 1.0, 2.0, 1.0], [0.0] * 3, [0.0, 4.0, 1.0])
    fixed = simulate(make_schedule("1f1b", 4, 1, 16), uneven).makespan
    assert simulate_message_driven(4, 16, 8, uneven).makespan < 0.9 * fixed


def test_a_link_carries_one_message_at_a_time() -> None:
    forwards_first = make_schedule("gpipe", 2, 1, 3).actions[0]
    schedule = Schedule(ranks=2, chunks=1, microbatches=3, actions=(forwards_first, forwards_first))
    busy = simulate(schedule, Durations([1.0, 1.0], [1.0, 1.0], [0.0, 0.0], transfer=[3.0]))
    assert [span.start for span in busy.ranks[1][:3]] == [4, 7, 10]
    late = simulate(schedule, Durations([1.0, 1.0], [1.0, 1.0], [0.0, 0.0], transfer=[0.0], latency=[3.0]))
    assert [span.start for span in late.ranks[1][:3]] == [4, 5, 6]


def test_a_hop_inside_a_rank_takes_nothing() -> None:
    schedule = make_schedule("zero-bubble-v", 2, 2, 1)
    timeline = simulate(schedule, Durations.even(4, transfer=10.0))
    second, third = timeline.ranks[1][:2]
    assert (second.end, third.start) == (12, 12)


def test_deadlock_is_told() -> None:
    first, second = make_schedule("1f1b", 2, 1, 1).actions
    with pytest.raises(ValueError, match="rank 0 at B0, rank 1 at F0 wait for each other"):
        simulate(Schedule(ranks=2, chunks=1, microbatches=1, actions=(first[::-1], second)), Durations.even(2))
