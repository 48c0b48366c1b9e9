"""Pipeline schedules as pure functions: from numbers of ranks, chunks and microbatches to every rank's actions.

In every schedule, a stage runs its forward passes in the order of the microbatches, and its backward passes too.
Messages therefore arrive in the order in which the next stage needs them, and all stages sum gradients in the same
order.

Docstrings state idle times for p ranks, v chunks and m microbatches. They assume equal stages, in which a forward pass
takes 1 and a backward pass takes 2 (1 for the inputs, 1 for the weights), and gradients that are sent after both.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.plan.pipeline.timeline import Durations, simulate, simulate_message_driven
from llmtrain.plan.pipeline.zero_bubble import zb_h1, zb_v
from llmtrain.recipe.pipeline import ScheduleName

MOST_PASSES = 2**16
"""The most forward passes of all stages in one step of a pipeline. Larger schedules take too long to make."""

MOST_MICROBATCHES = 2**18
"""The most microbatches of one step without a pipeline."""

ONE_CHUNK: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zero-bubble", "message-driven")
"""Schedules with one stage on each rank."""

SEVERAL_CHUNKS: tuple[ScheduleName, ...] = ("interleaved", "breadth-first")
"""Schedules with any number of stages on each rank, but at least two."""


def make_schedule(name: ScheduleName, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Return the actions of any schedule but message-driven.

    Any number of microbatches works; with fewer than ranks, ranks wait longer (see `schedule_warning`). Raises
    ValueError for a number of chunks that the schedule does not have, and for message-driven: arriving messages decide
    its order (`simulate_message_driven` returns one).
    """
    problem = schedule_problems(name, ranks, chunks, microbatches)
    if problem is not None:
        raise ValueError(problem)
    makers: dict[str, Callable[[], Schedule]] = {
        "gpipe": lambda: gpipe(ranks, microbatches),
        "1f1b": lambda: one_forward_one_backward(ranks, microbatches),
        "interleaved": lambda: interleaved(ranks, chunks, microbatches),
        "breadth-first": lambda: breadth_first(ranks, chunks, microbatches),
        "zero-bubble": lambda: zb_h1(ranks, microbatches),
        "zero-bubble-v": lambda: zb_v(ranks, microbatches),
    }
    if name not in makers:
        raise ValueError(f"{name} has no order that is fixed beforehand")
    return makers[name]()


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2019, section 2.3). Ranks idle (p-1)/(m+p-1) of the
    time.

    Backward passes start with the first microbatch; starting with the last one takes as long. The last rank runs each
    backward pass right after its forward pass. This takes no longer, because no rank waits for its forward passes, and
    it keeps only one gradient of the logits, which is as large as the vocabulary.
    """
    forwards, backwards = _pass(Kind.F, microbatches), _pass(Kind.B, microbatches)
    ahead = [microbatches] * (ranks - 1) + [0]
    return Schedule(
        ranks=ranks,
        chunks=1,
        microbatches=microbatches,
        actions=tuple(_in_turn(forwards, backwards, count) for count in ahead),
    )


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """PipeDream-Flush (Narayanan et al. 2021, section 2.2.1): rank r starts with p-1-r forward passes, and then runs
    one forward and one backward pass in turn. Ranks idle (p-1)/(m+p-1) of the time.
    """
    forwards, backwards = _pass(Kind.F, microbatches), _pass(Kind.B, microbatches)
    return Schedule(
        ranks=ranks,
        chunks=1,
        microbatches=microbatches,
        actions=tuple(_in_turn(forwards, backwards, ranks - 1 - rank) for rank in range(ranks)),
    )


def interleaved(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """1F1B with several stages on each rank, which runs groups of microbatches through one stage after another
    (Narayanan et al. 2021, section 2.2.2). Ranks idle (p-1)/(v m+p-1) of the time; relative to the computing time, this
    is v times less than with 1F1B.

    In the paper a group has p microbatches, so m must be a multiple of p. Here groups have p or more, as equal as
    possible. This takes no longer and works for every m >= p. With m < p there is one group, and ranks wait for
    (v-1)(p-m) more pairs of a forward and a backward pass.
    """
    return _in_groups(ranks, chunks, microbatches, _groups(ranks, microbatches))


def breadth_first(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """`interleaved` with one group of all microbatches (Lamy-Poirier 2023): they all pass a stage before a
    rank runs its next one. It takes the same time.

    Weights that are gathered or offloaded come once for all forward passes, and once for all backward passes. The
    inputs of all stages stay for all microbatches.
    """
    return _in_groups(ranks, chunks, microbatches, [range(microbatches)])


def _in_groups(ranks: int, chunks: int, microbatches: int, groups: Sequence[range]) -> Schedule:
    """Return the schedule in which each group of microbatches passes all chunks of a rank."""
    chunk_order = [(chunk, group) for group in groups for chunk in range(chunks)]
    forwards = [Action(index, chunk, Kind.F) for chunk, group in chunk_order for index in group]
    backwards = [Action(index, chunks - 1 - chunk, Kind.B) for chunk, group in chunk_order for index in group]
    ahead = [_ahead_in_groups(ranks, chunks, groups, rank) for rank in range(ranks)]
    return Schedule(
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
        actions=tuple(_in_turn(forwards, backwards, ahead[rank]) for rank in range(ranks)),
    )


def schedule_problems(name: ScheduleName, ranks: int, chunks: int, microbatches: int) -> str | None:
    """Return one sentence on why a recipe cannot have this schedule; None if it can.

    ranks: `parallel.pipeline`. microbatches: those of one step in one pipeline.
    """
    if min(ranks, microbatches) < 1:
        return f"the pipeline has {ranks} ranks and {microbatches} microbatches; expected at least 1 of each"
    if name in ONE_CHUNK and chunks != 1:
        return (
            f"pipeline.chunks is {chunks}, but with pipeline.schedule {name} each rank holds one stage; "
            "set pipeline.chunks=1, or pipeline.schedule=interleaved"
        )
    if name in SEVERAL_CHUNKS and chunks < 2:
        return (
            f"pipeline.chunks is {chunks}; expected 2 or more with pipeline.schedule {name}, or set "
            "pipeline.schedule=1f1b"
        )
    if name == "zero-bubble-v" and chunks != 2:
        return f"pipeline.chunks is {chunks}; expected 2 with pipeline.schedule zero-bubble-v, so set pipeline.chunks=2"
    stages = ranks * chunks
    if stages == 1 and microbatches > MOST_MICROBATCHES:
        return (
            f"a step has {microbatches:,} microbatches; expected at most {MOST_MICROBATCHES:,}, so lower "
            "train.global_batch, or raise train.microbatch"
        )
    if stages > 1 and stages * microbatches > MOST_PASSES:
        return (
            f"a step of the pipeline has {microbatches:,} microbatches through {stages} stages; "
            f"expected a product of at most {MOST_PASSES:,}, so lower train.global_batch, or raise train.microbatch"
        )
    return None


def schedule_warning(
    name: ScheduleName, ranks: int, chunks: int, microbatches: int, hands_back: bool = False, limit: int | None = None
) -> str | None:
    """Return one sentence on what it costs to have fewer microbatches than ranks, in a step or in flight; None if there
    are enough.

    Every schedule works with any number, but ranks without a microbatch wait. hands_back: see `Schedule`. limit:
    microbatches in flight with message-driven; None: as many as ranks.
    """
    limit = limit if name == "message-driven" and limit is not None else ranks
    if min(microbatches, limit) >= ranks:
        return None
    durations = Durations.even(ranks * chunks)
    if name == "message-driven":
        idle = simulate_message_driven(ranks, microbatches, limit, durations, hands_back).bubble
    else:
        schedule = replace(make_schedule(name, ranks, chunks, microbatches), hands_back=hands_back)
        idle = simulate(schedule, durations).bubble
    if limit < min(ranks, microbatches):
        return (
            f"pipeline.limit is {limit}, less than the {ranks} stages, so that ranks idle some {idle:.0%} of the "
            "time; leave it out, or set more"
        )
    return (
        f"parallel.pipeline is {ranks}, but train.global_batch and train.microbatch give a pipeline {microbatches} "
        f"microbatch{'es' if microbatches > 1 else ''} per step, so that its ranks idle some {idle:.0%} of the "
        "time; a larger global_batch or a smaller microbatch makes it less"
    )


def live_bound(name: ScheduleName, ranks: int, chunks: int, microbatches: int, limit: int | None = None) -> list[int]:
    """Return an upper bound of the activations that each rank holds at the same time, counted in microbatches of one
    stage.

    gpipe: m, and 1 on the last rank. 1f1b: p-r on rank r. interleaved: 2(p-r-1)+(v-1)g+1, with g microbatches in the
    largest group; breadth-first has one group. zero-bubble: p on every rank. zero-bubble-v: 2p of stages half as large.
    message-driven: `limit` (None: p). The bound is at most m v.
    """
    bounds = {
        "gpipe": lambda rank: microbatches if rank < ranks - 1 else 1,
        "1f1b": lambda rank: ranks - rank,
        "interleaved": lambda rank: _ahead_in_groups(ranks, chunks, _groups(ranks, microbatches), rank) + 1,
        "breadth-first": lambda rank: _ahead_in_groups(ranks, chunks, [range(microbatches)], rank) + 1,
        "zero-bubble": lambda rank: ranks,
        "zero-bubble-v": lambda rank: 2 * ranks,
        "message-driven": lambda rank: ranks if limit is None else limit,
    }
    return [min(bounds[name](rank), microbatches * chunks) for rank in range(ranks)]


def _pass(kind: Kind, microbatches: int) -> list[Action]:
    return [Action(index, 0, kind) for index in range(microbatches)]


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """Return `ahead` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return (*forwards[:ahead], *chain.from_iterable(pairs), *backwards[len(forwards) - ahead :])


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Divide the microbatches into as many groups of at least `ranks` as possible; one group if there are fewer."""
    count = max(1, microbatches // ranks)
    return [range(microbatches * i // count, microbatches * (i + 1) // count) for i in range(count)]


def _ahead_in_groups(ranks: int, chunks: int, groups: Sequence[range], rank: int) -> int:
    """Return how many forward passes a rank runs before its first pair of a forward and a backward pass."""
    return 2 * (ranks - 1 - rank) + (chunks - 1) * max(map(len, groups))
