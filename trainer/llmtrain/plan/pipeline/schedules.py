"""Pipeline schedules as pure functions: from numbers of ranks, chunks and microbatches to every rank's actions.

In all of them a stage runs its forwards in the order of the microbatches, and its backwards too. So whatever one stage
sends to the next arrives in the order in which it is needed, and gradients are summed in the same order everywhere.

Idle time is given for stages that all take the same: a forward 1, a backward 2 (1 for the inputs, 1 for the weights),
both of one of the `ranks * chunks` pieces, and for gradients that are handed back after both. p ranks, v chunks, m
microbatches.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from llmtrain.plan.pipeline.actions import Action, Kind, Schedule
from llmtrain.plan.pipeline.timeline import Durations, simulate, simulate_message_driven
from llmtrain.plan.pipeline.zero_bubble import zb_h1, zb_v
from llmtrain.recipe.pipeline import ScheduleName

MOST_PASSES = 2**16
"""Forward passes of all ranks in a step of a pipeline: a schedule is a list of them, and finding it takes longer."""

MOST_MICROBATCHES = 2**18
"""Microbatches of a step without a pipeline."""

ONE_CHUNK: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zero-bubble", "message-driven")
"""Schedules whose ranks hold one piece of the model each."""


def make_schedule(name: ScheduleName, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Return the actions of a schedule that is fixed beforehand: any but message-driven.

    Any number of microbatches will do; with fewer than ranks, more of them wait (see `schedule_warning`). Raises
    ValueError for a number of chunks that the schedule does not have, and for message-driven, whose order comes about
    as messages arrive (`simulate_message_driven` gives one).
    """
    problem = schedule_problems(name, ranks, chunks, microbatches)
    if problem is not None:
        raise ValueError(problem)
    makers: dict[str, Callable[[], Schedule]] = {
        "gpipe": lambda: gpipe(ranks, microbatches),
        "1f1b": lambda: one_forward_one_backward(ranks, microbatches),
        "interleaved": lambda: interleaved(ranks, chunks, microbatches),
        "zero-bubble": lambda: zb_h1(ranks, microbatches),
        "zero-bubble-v": lambda: zb_v(ranks, microbatches),
    }
    if name not in makers:
        raise ValueError(f"{name} has no order that is fixed beforehand")
    return makers[name]()


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, section 2.3). Ranks idle (p-1)/(m+p-1) of the time.

    The backwards start with the first microbatch; starting with the last, as some do, takes as long. So does the last
    rank's going back from each at once, as nobody waits for its forwards: the loss makes a gradient as large as the
    vocabulary in each of them.
    """
    forwards, backwards = _pass(Kind.F, microbatches), _pass(Kind.B, microbatches)
    ahead = [microbatches] * (ranks - 1) + [0]
    return Schedule(ranks, 1, microbatches, tuple(_in_turn(forwards, backwards, count) for count in ahead))


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """Forwards and backwards in turn, once a rank has as many under way as there are ranks from it to the last
    (PipeDream-Flush; Narayanan et al. 2021, section 2.2.1). Ranks idle (p-1)/(m+p-1) of the time.
    """
    forwards, backwards = _pass(Kind.F, microbatches), _pass(Kind.B, microbatches)
    return Schedule(
        ranks, 1, microbatches, tuple(_in_turn(forwards, backwards, ranks - 1 - rank) for rank in range(ranks))
    )


def interleaved(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """1F1B in which a rank holds several pieces and goes through them group by group of microbatches (Narayanan et al.
    2021, section 2.2.2). Ranks idle (p-1)/(v m+p-1) of the time: v times less against the work than with 1F1B.

    The paper's groups are of p microbatches, so that m is a multiple of p. Here groups are of p or more, as even as
    can be, which takes no longer and fits every m >= p. Fewer are one group, and (v-1)(p-m) more pairs of a forward and
    a backward are waited for.
    """
    groups = _groups(ranks, microbatches)
    chunk_order = [(chunk, group) for group in groups for chunk in range(chunks)]
    forwards = [Action(index, chunk, Kind.F) for chunk, group in chunk_order for index in group]
    backwards = [Action(index, chunks - 1 - chunk, Kind.B) for chunk, group in chunk_order for index in group]
    ahead = [_interleaved_ahead(ranks, chunks, microbatches, rank) for rank in range(ranks)]
    return Schedule(
        ranks, chunks, microbatches, tuple(_in_turn(forwards, backwards, ahead[rank]) for rank in range(ranks))
    )


def schedule_problems(name: ScheduleName, ranks: int, chunks: int, microbatches: int) -> str | None:
    """Say in one sentence why a recipe cannot have this schedule; None if it can.

    ranks: `parallel.pipeline`. microbatches: those of one step in one pipeline.
    """
    if min(ranks, microbatches) < 1:
        return f"the pipeline has {ranks} ranks and {microbatches} microbatches; expected at least 1 of each"
    if name in ONE_CHUNK and chunks != 1:
        return (
            f"pipeline.chunks is {chunks}, but with pipeline.schedule {name} each rank holds one piece of the model; "
            "set pipeline.chunks=1, or pipeline.schedule=interleaved"
        )
    if name == "interleaved" and chunks < 2:
        return (
            f"pipeline.chunks is {chunks}; expected 2 or more with pipeline.schedule interleaved, or set "
            "pipeline.schedule=1f1b"
        )
    if name == "zero-bubble-v" and chunks != 2:
        return f"pipeline.chunks is {chunks}; expected 2 with pipeline.schedule zero-bubble-v, so set pipeline.chunks=2"
    pieces = ranks * chunks
    if pieces == 1 and microbatches > MOST_MICROBATCHES:
        return (
            f"a step has {microbatches:,} microbatches; expected at most {MOST_MICROBATCHES:,}, so lower "
            "train.global_batch, or raise train.microbatch"
        )
    if pieces > 1 and pieces * microbatches > MOST_PASSES:
        return (
            f"a step of the pipeline has {microbatches:,} microbatches through {pieces} pieces of the model; "
            f"expected a product of at most {MOST_PASSES:,}, so lower train.global_batch, or raise train.microbatch"
        )
    return None


def schedule_warning(
    name: ScheduleName, ranks: int, chunks: int, microbatches: int, hands_back: bool = False, limit: int | None = None
) -> str | None:
    """Say in one sentence that a schedule has fewer microbatches than ranks, in all or under way, and what that costs;
    None if it has not.

    All schedules work with any number, but those ranks wait that could have had another microbatch. hands_back: see
    `Schedule`. limit: of message-driven; None: as many as ranks.
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
    """Return the most activations that each rank holds at once, counted in microbatches of one piece of the model.

    gpipe: m, on the last rank 1. 1f1b: p-r on rank r. interleaved: 2(p-r-1)+(v-1)g+1, with g the microbatches of a
    group. zero-bubble: p on every rank, as on 1F1B's first. zero-bubble-v: 2p, of pieces half as large. message-driven:
    `limit` (None: p). Never more than there are pieces and microbatches.
    """
    bounds = {
        "gpipe": lambda rank: microbatches if rank < ranks - 1 else 1,
        "1f1b": lambda rank: ranks - rank,
        "interleaved": lambda rank: _interleaved_ahead(ranks, chunks, microbatches, rank) + 1,
        "zero-bubble": lambda rank: ranks,
        "zero-bubble-v": lambda rank: 2 * ranks,
        "message-driven": lambda rank: ranks if limit is None else limit,
    }
    return [min(bounds[name](rank), microbatches * chunks) for rank in range(ranks)]


def _pass(kind: Kind, microbatches: int) -> list[Action]:
    return [Action(index, 0, kind) for index in range(microbatches)]


def _in_turn(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """Return `ahead` forwards, then forwards and backwards in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return (*forwards[:ahead], *chain.from_iterable(pairs), *backwards[len(forwards) - ahead :])


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Cut the microbatches into as many groups as can have at least `ranks` each; one group if there are fewer."""
    count = max(1, microbatches // ranks)
    return [range(microbatches * i // count, microbatches * (i + 1) // count) for i in range(count)]


def _interleaved_ahead(ranks: int, chunks: int, microbatches: int, rank: int) -> int:
    """Forwards that a rank runs before its first pair: as far as the first gradient is away, there and back."""
    return 2 * (ranks - 1 - rank) + (chunks - 1) * max(map(len, _groups(ranks, microbatches)))
