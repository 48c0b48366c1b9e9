"""From a plan to the executor of this rank's pipeline stages."""

from collections.abc import Mapping

import torch

from llmtrain.cluster.layout import Axis, Layout
from llmtrain.cluster.tiers import tier_between
from llmtrain.comm.backend import messages_of
from llmtrain.comm.decisions import FirstRankDecides, OwnDecision
from llmtrain.comm.groups import ALWAYS
from llmtrain.comm.messages import Channel, Messages
from llmtrain.comm.messages_mpi import MpiMessages
from llmtrain.comm.posted_receives import PostedReceives
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.subgroups import join_group, make_groups
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.gpt import GPT
from llmtrain.offload.activations import OffloadedActivations, open_activations
from llmtrain.parallel.pipeline.action_order import ActionOrder, FixedOrder, MessageDrivenOrder, OrderWithOffload
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.parallel.pipeline.stage import Stage
from llmtrain.parallel.pipeline.stage_links import ShapeOf, StageLinks, channels
from llmtrain.parallel.pipeline.transport import Transport
from llmtrain.parallel.weight_gradients import WeightGradientQueue
from llmtrain.plan.collective_buffers import MESSAGE_CTAS
from llmtrain.plan.per_rank.message_buffers import messages_ahead
from llmtrain.plan.per_rank.rank_activations import boundary_bytes, rank_moves
from llmtrain.plan.plan import Plan
from llmtrain.plan.traffic import CountTraffic, Traffic
from llmtrain.sharding.engine import Engine


def offloaded_activations(model: GPT, plan: Plan, ranks: Ranks) -> OffloadedActivations | None:
    """Let activations of `model` leave the device as the plan says; return what moves them, None if none leaves."""
    shape = _shape_of(plan, ranks.layout)(plan.batch.microbatch, plan.batch.sequence_length)
    moves = rank_moves(plan, ranks.rank)
    activations = open_activations(plan.activation_offload, moves, shape, DTYPES[plan.compute], ranks.device)
    if activations is not None:
        model.saving = activations.hooks
    return activations


def build_executor(
    model: GPT,
    plan: Plan,
    ranks: Ranks,
    engine: Engine,
    weight_gradients: WeightGradientQueue,
    activations: OffloadedActivations | None,
    count: CountTraffic,
) -> Executor:
    """Return the executor of the stages that this rank holds in `model`. Collective."""
    blank = None if activations is None else torch.empty(1, dtype=DTYPES[plan.compute], device=ranks.device)
    stages = [Stage(model, layout, blank) for layout in plan.stages_of(ranks.rank)]
    links = _links(plan, ranks, count)
    order = _action_order(plan, ranks, links)
    if activations is not None:
        order = OrderWithOffload(order, activations)
    return Executor(stages, plan.pipeline.schedule, order, links, engine, weight_gradients)


def _links(plan: Plan, ranks: Ranks, count: CountTraffic) -> StageLinks:
    """Connect this rank to the stages before and after its own. Collective."""
    schedule, line = plan.pipeline.schedule, ranks.layout.group_of(ranks.rank, Axis.PIPELINE)

    def count_sent(channel: Channel, nbytes: int) -> None:
        target = line[schedule.rank_and_chunk(channel.target)[0]]
        tier = tier_between(ranks.tiers, ranks.rank, target)
        count([Traffic("pipeline", "send", tier, nbytes, nbytes, packed=False)])

    pipeline_rank = ranks.layout.coordinate(ranks.rank, Axis.PIPELINE)
    shape_of, dtype = _shape_of(plan, ranks.layout), DTYPES[plan.compute]
    transport = Transport(_messages(plan, ranks), dtype, ranks.device)
    return StageLinks(schedule, pipeline_rank, transport, shape_of, count_sent, ranks.activity)


def _shape_of(plan: Plan, layout: Layout) -> ShapeOf:
    """Return the shape of the activations between stages, by a microbatch's numbers of sequences and tokens."""
    parts = layout.degree(Axis.TENSOR) if plan.sequence_parallel else 1
    return lambda sequences, tokens: torch.Size((sequences, tokens // parts, plan.model.hidden))


def _action_order(plan: Plan, ranks: Ranks, links: StageLinks) -> ActionOrder:
    """Return the order of this rank's actions. Collective."""
    schedule, layout = plan.pipeline.schedule, ranks.layout
    if not schedule.message_driven:
        return FixedOrder(schedule, layout.coordinate(ranks.rank, Axis.PIPELINE))
    shared = layout.degree(Axis.TENSOR) > 1
    groups = layout.groups(Axis.TENSOR)
    decide = FirstRankDecides(make_groups(ranks, groups, "gloo"), ranks.activity) if shared else OwnDecision()
    stage_layout = plan.stages_of(ranks.rank)[0]
    return MessageDrivenOrder(stage_layout, schedule.microbatches, plan.pipeline.limit, links, decide)


def _messages(plan: Plan, ranks: Ranks) -> Messages:
    """Connect this rank to the ranks of the stages before and after its own. Collective."""
    schedule, lines = plan.pipeline.schedule, ranks.layout.groups(Axis.PIPELINE)
    own, over_mpi = ranks.layout.group_of(ranks.rank, Axis.PIPELINE), plan.pipeline.transport == "mpi"
    peers, groups = {}, {}
    for channel in channels(schedule):
        ends = [schedule.rank_and_chunk(stage)[0] for stage in (channel.source, channel.target)]
        # Every rank takes part in making every group, in the same order.
        if not over_mpi:
            groups[channel] = join_group(ranks, [[line[end] for end in ends] for line in lines], ctas=MESSAGE_CTAS)
        if ranks.rank in (own[ends[0]], own[ends[1]]):
            peers[channel] = own[ends[1]] if own[ends[0]] == ranks.rank else own[ends[0]]
    ahead = messages_ahead(plan)
    if over_mpi and schedule.ranks > 1:
        return MpiMessages(peers, schedule.stages, ranks.layout.world, ranks.device, ahead)
    joined = {channel: (group, peers[channel]) for channel, group in groups.items() if group is not None}
    return messages_of(joined, ranks.device, ranks.node, ahead, boundary_bytes(plan), _posted(plan, ranks, peers))


def _posted(plan: Plan, ranks: Ranks, peers: Mapping[Channel, int]) -> PostedReceives | None:
    """Return what tells the ranks of other stages of the receives that a GPU posts in its first evaluation and step."""
    if plan.device == "cpu" or ranks.store is None or not peers:
        return None
    batches = 1 + (plan.training.eval_batches if plan.training.eval_every else 0)
    return PostedReceives(ranks.store, ranks.rank, peers, batches * plan.batch.microbatches, ALWAYS)
