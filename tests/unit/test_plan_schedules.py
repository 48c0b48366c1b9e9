"""Every schedule to 8 ranks, 4 chunks and 32 microbatches: complete, free of deadlock, within its memory and time."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmtrain.plan.pipeline.actions import Action, Kind, Schedule, peak_live
from llmtrain.plan.pipeline.schedules import live_bound, make_schedule, schedule_problems, schedule_warning
from llmtrain.plan.pipeline.timeline import Durations, simulate
from llmtrain.plan.pipeline.validate import validate
from llmtrain.recipe.pipeline import ScheduleName

FIXED: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("breadth-first", 2),
    ("breadth-first", 4),
    ("zero-bubble", 1),
    ("zero-bubble-v", 2),
]


def makespan(name: ScheduleName, p: int, v: int, m: int) -> int:
    """Return the closed form, in forward passes of one of the p v chunks; each takes as long as its two backward
    passes."""
    fewer = max(p - m, 0)
    if name in ("interleaved", "breadth-first"):
        return 3 * (v * m + p - 1 + (v - 1) * fewer)
    if name == "zero-bubble":
        return 3 * m + p - 1 + fewer
    if name == "zero-bubble-v":
        return 6 * m + p - 1 + max(2 * fewer, 3 * p - 4 * m, 0)
    return 3 * (m + p - 1)


def check(name: ScheduleName, p: int, chunks: int, m: int) -> None:
    schedule = make_schedule(name, p, chunks, m)
    validate(schedule)
    live, bound = peak_live(schedule), live_bound(name, p, chunks, m)
    assert all(found <= most for found, most in zip(live, bound, strict=True))
    timeline = simulate(schedule, Durations.even(p * chunks))
    assert timeline.makespan == makespan(name, p, chunks, m)
    assert timeline.busy == [3 * chunks * m] * p
    assert timeline.actions == schedule.actions


@pytest.mark.parametrize(("name", "chunks"), FIXED)
def test_small_and_round_sizes(name: ScheduleName, chunks: int) -> None:
    for p, m in product(range(1, 9), (*range(1, 10), 16, 17, 32)):
        check(name, p, chunks, m)


@pytest.mark.parametrize(("name", "chunks"), FIXED)
def test_gradients_of_inputs_that_go_first(name: ScheduleName, chunks: int) -> None:
    """At the end, each rank but the last waits a third less: for a forward pass and half a backward pass."""
    for p, m in product(range(1, 9), (*range(1, 10), 16, 17, 32)):
        schedule = replace(make_schedule(name, p, chunks, m), hands_back=True)
        timeline = simulate(schedule, Durations.even(p * chunks))
        assert timeline.busy == [3 * chunks * m] * p
        assert timeline.actions == schedule.actions
        if schedule.splits_backward:
            assert timeline.makespan == makespan(name, p, chunks, m)
        elif name == "gpipe" or m < p:
            assert timeline.makespan <= makespan(name, p, chunks, m)
        else:
            assert timeline.makespan == 3 * chunks * m + 2 * (p - 1)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FIXED), st.integers(1, 8), st.integers(1, 32))
def test_any_size(kind: tuple[ScheduleName, int], p: int, m: int) -> None:
    check(kind[0], p, kind[1], m)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "chunks"), FIXED)
def test_every_size(name: ScheduleName, chunks: int) -> None:
    for p, m in product(range(1, 9), range(1, 33)):
        check(name, p, chunks, m)


@pytest.mark.parametrize(("name", "chunks"), FIXED)
def test_bubble(name: ScheduleName, chunks: int) -> None:
    for p, m in [(2, 2), (4, 8), (4, 9), (8, 11), (8, 32)]:
        found = simulate(make_schedule(name, p, chunks, m), Durations.even(p * chunks))
        if name.startswith("zero-bubble"):
            assert found.bubble == pytest.approx((p - 1) / (3 * chunks * m + p - 1))
            assert found.bubble < (p - 1) / (m + p - 1)
        else:
            assert found.bubble == pytest.approx((p - 1) / (chunks * m + p - 1))
            assert found.bubble_over_ideal == pytest.approx((p - 1) / (chunks * m))


def test_zero_bubble_needs_no_more_memory_than_1f1b() -> None:
    """This compares the fullest ranks; ZB-V counts halves of a rank's layers."""
    for p, m in [(1, 3), (2, 4), (4, 4), (8, 32)]:
        most = max(peak_live(make_schedule("1f1b", p, 1, m)))
        assert max(peak_live(make_schedule("zero-bubble", p, 1, m))) <= most
        assert max(peak_live(make_schedule("zero-bubble-v", p, 2, m))) <= 2 * most


def test_interleaved_as_published() -> None:
    """Two ranks with two chunks each and four microbatches: figure 4 of Narayanan et al. 2021, in small."""
    schedule = make_schedule("interleaved", 2, 2, 4)
    assert " ".join(map(str, schedule.actions[0])) == (
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    )
    assert " ".join(map(str, schedule.actions[1])) == (
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    )


def test_v_has_the_loss_on_the_first_rank() -> None:
    schedule = make_schedule("zero-bubble-v", 3, 2, 5)
    assert [schedule.rank_and_chunk(stage) for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "key"),
    [
        ("1f1b", 4, 2, "pipeline.chunks is 2"),
        ("message-driven", 4, 2, "pipeline.chunks is 2"),
        ("interleaved", 4, 1, "pipeline.chunks is 1"),
        ("zero-bubble-v", 4, 3, "pipeline.chunks is 3"),
        ("1f1b", 0, 1, "0 ranks"),
    ],
)
def test_impossible(name: ScheduleName, ranks: int, chunks: int, key: str) -> None:
    problem = schedule_problems(name, ranks, chunks, 8)
    assert problem is not None
    assert key in problem
    with pytest.raises(ValueError, match=key):
        make_schedule(name, ranks, chunks, 8)


def test_message_driven_has_no_order_of_its_own() -> None:
    assert schedule_problems("message-driven", 4, 1, 8) is None
    with pytest.raises(ValueError, match="fixed beforehand"):
        make_schedule("message-driven", 4, 1, 8)


@pytest.mark.parametrize(("name", "chunks"), [*FIXED, ("message-driven", 1)])
def test_fewer_microbatches_than_ranks(name: ScheduleName, chunks: int) -> None:
    assert schedule_warning(name, 4, chunks, 4) is None
    warning = schedule_warning(name, 4, chunks, 2)
    assert warning is not None
    assert "2 microbatches" in warning
    # With even stages, message-driven order is 1F1B's.
    assert f"{1 - 3 * chunks * 2 / makespan(name, 4, chunks, 2):.0%}" in warning


def test_fewer_under_way_than_stages() -> None:
    assert schedule_warning("message-driven", 4, 1, 8, limit=4) is None
    warning = schedule_warning("message-driven", 4, 1, 8, limit=1)
    assert warning is not None
    assert warning.startswith("pipeline.limit is 1, less than the 4 stages, so that ranks idle some 75% ")
    # With few microbatches, the warning names those instead of the limit.
    few = schedule_warning("message-driven", 4, 1, 2, limit=2)
    assert few is not None
    assert "2 microbatches" in few


def with_actions(schedule: Schedule, rank: int, text: str) -> Schedule:
    """Replace a rank's actions by those written as `str(action)` writes them."""
    parts = [word.partition(".") for word in text.split()]
    order = tuple(Action(int(head[1:]), int(chunk or 0), Kind(head[0])) for head, _, chunk in parts)
    return replace(schedule, actions=(*schedule.actions[:rank], order, *schedule.actions[rank + 1 :]))


@pytest.mark.parametrize(
    ("name", "rank", "actions", "complaint"),
    [
        ("1f1b", 0, "F0 F1 B0", "rank 0 does B1 0 times; expected 1"),
        ("1f1b", 0, "F0 F1 F1 B0 B1", "rank 0 does F1 2 times; expected 1"),
        ("1f1b", 1, "F0 B0 F1 B1 W1", "rank 1 does W1 1 times; expected 0"),
        ("1f1b", 1, "F0 B0 F1.1 B1", "rank 1 does F1 0 times; expected 1"),
        ("1f1b", 0, "F0 B0 F1 B1", None),
        ("1f1b", 0, "B0 F0 F1 B1", "rank 0 at B0, rank 1 at F0 wait for each other"),
        ("1f1b", 1, "F0 F1 B1 B0", "gradients arrive"),
        ("1f1b", 1, "F1 B1 F0 B0", "activations arrive"),
        ("zero-bubble", 1, "F0 W0 B0 F1 B1 W1", "wait for each other"),
        ("zero-bubble", 1, "F0 B0 F1 B1 W1", "rank 1 does W0 0 times"),
    ],
)
def test_validator_finds(name: ScheduleName, rank: int, actions: str, complaint: str | None) -> None:
    schedule = with_actions(make_schedule(name, 2, 1, 2), rank, actions)
    if complaint is None:
        validate(schedule)
    else:
        with pytest.raises(ValueError, match=complaint):
            validate(schedule)


def test_validator_counts_ranks() -> None:
    schedule = make_schedule("1f1b", 2, 1, 2)
    with pytest.raises(ValueError, match="actions of 1 ranks; expected 2"):
        validate(replace(schedule, actions=schedule.actions[:1]))
