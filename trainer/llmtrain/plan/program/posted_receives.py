"""The memory of receives that a transport posts before their messages are needed. No torch in here."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import node_ranks
from llmtrain.plan.collective_buffers import backend_of
from llmtrain.plan.per_rank.message_buffers import messages_ahead
from llmtrain.plan.per_rank.rank_activations import boundary_bytes
from llmtrain.plan.pipeline.actions import Action, Kind, computations
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import evaluation_actions
from llmtrain.plan.program.spec import ProgramSpec


@dataclass(frozen=True)
class Posting:
    """How many receives of a channel have memory before they are needed. at_start: when the channel's messages are
    announced. ahead: how many messages after it have some when a message is taken. watched: whether a thread looks for
    the next message before the rank asks for it."""

    at_start: int
    ahead: int
    watched: bool = True


def posting_of(backend: Literal["nccl", "shared", "gloo", "mpi"], ahead: int) -> Posting:
    """Return how a backend posts receives. ahead: messages that a channel has in flight."""
    if backend == "shared":
        # A message waits in slots.
        return Posting(at_start=0, ahead=0)
    if backend == "nccl":
        # A receive occupies multiprocessors until its message arrives. So the first one gets memory when it is needed,
        # and each later one as the one before it is taken. The host posts them when it needs them (see NcclMessages).
        return Posting(at_start=0, ahead=1, watched=False)
    return Posting(at_start=ahead, ahead=ahead)


def posted_bytes(plan: Plan, rank: int) -> int:
    """Return the most bytes of a rank's receives that are posted and not taken at the same time. Message-driven: the
    most that may be, as a rank also posts those whose arrival it asks for."""
    spec, posting = ProgramSpec.of(plan, rank), _posting(plan, rank)
    if posting is None:
        return 0
    pipeline_rank = plan.grid.coordinate(rank, Axis.PIPELINE)
    sources = {
        (chunk, kind): _source(plan, spec, chunk, kind, pipeline_rank)
        for chunk in range(len(spec.stages))
        for kind in Kind
    }
    orders = (spec.actions, *_evaluated(plan, spec))
    taken = (filter(None, map(sources.__getitem__, computations(order))) for order in orders)
    most = max(_most_posted(list(order), posting) for order in taken)
    return most * boundary_bytes(plan)


def _most_posted(sources: Sequence[tuple[int, int]], posting: Posting) -> int:
    """Return the most receives that are posted at the same time. sources: the channel of each message, in the order in
    which they are taken."""
    left = Counter(sources)
    posted = {channel: min(posting.at_start, count) for channel, count in left.items()}
    now = most = sum(posted.values())
    limit = sum(min(max(posting.at_start, posting.ahead), count) for count in left.values())
    for channel in sources:
        if most == limit:
            break
        left[channel] -= 1
        before, posted[channel] = posted[channel], min(max(posted[channel] - 1, posting.ahead), left[channel])
        now += posted[channel] - before
        most = max(most, now)
    return most


def _posting(plan: Plan, rank: int) -> Posting | None:
    """Return how a rank posts receives; None if it gets no messages."""
    ahead, driven = messages_ahead(plan), plan.pipeline.schedule.message_driven
    others = _others(plan, rank)
    if not others:
        return None
    if plan.pipeline.transport == "mpi":
        found = posting_of("mpi", ahead)
    else:
        backends = {backend_of(plan.device, (rank, other), node_ranks(plan.tiers)) for other in others}
        # If one channel goes through sockets (gloo), all channels post receives as that one does.
        found = posting_of("gloo" if "gloo" in backends else backends.pop(), ahead)
    return Posting(max(found.at_start, 1), max(found.ahead, 1)) if driven else found


def _others(plan: Plan, rank: int) -> set[int]:
    """Return the ranks that hold the stages before and after those of a rank."""
    schedule, line = plan.pipeline.schedule, plan.grid.group_of(rank, Axis.PIPELINE)
    stages = (layout.stage + step for layout in plan.stages_of(rank) for step in (-1, 1))
    return {line[schedule.rank_and_chunk(stage)[0]] for stage in stages if 0 <= stage < schedule.stages} - {rank}


def _evaluated(plan: Plan, spec: ProgramSpec) -> Iterator[Sequence[Action]]:
    """Yield the actions of the largest group of an evaluation."""
    if plan.training.eval_every and plan.training.eval_batches:
        shared = -(-plan.training.eval_batches * plan.batch.sequences // plan.grid.degree(Axis.DATA))
        rows = -(-shared // plan.batch.microbatch)
        yield evaluation_actions(len(spec.stages), [min(rows, plan.pipeline.schedule.evaluated_together)])


def _source(plan: Plan, spec: ProgramSpec, chunk: int, kind: Kind, pipeline_rank: int) -> tuple[int, int] | None:
    """Return the stages that the message of an action comes from and goes to; None without a message of another
    rank. pipeline_rank: the rank's coordinate along the pipeline axis."""
    schedule, stage = plan.pipeline.schedule, spec.stages[chunk].stage
    source = stage - 1 if kind is Kind.F else stage + 1
    if kind is Kind.W or not 0 <= source < schedule.stages:
        return None
    return None if schedule.rank_and_chunk(source)[0] == pipeline_rank else (source, stage)
