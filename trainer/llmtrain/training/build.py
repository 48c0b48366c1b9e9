"""From a plan to this rank's model, the engine of its states, and the executor that runs it."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.tiers import tier_between
from llmtrain.comm.ranks import Ranks
from llmtrain.comm.registered_memory import RegisteredMemory
from llmtrain.comm.subgroups import join_group, make_groups
from llmtrain.model.dtypes import DTYPES
from llmtrain.model.gpt import GPT
from llmtrain.model.layers import Attention
from llmtrain.offload.activations import OffloadedActivations
from llmtrain.offload.place import OffloadStores, offloaded_gradients, open_offload, place_units
from llmtrain.parallel.pipeline.executor import Executor
from llmtrain.parallel.pipeline.stage import keep
from llmtrain.parallel.tensor.collectives import TensorMesh, count_as_tensor
from llmtrain.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from llmtrain.parallel.tensor.parallelize import parallelize
from llmtrain.parallel.weight_gradients import SplitBackwardLinear, WeightGradientQueue
from llmtrain.plan.collective_buffers import CollectiveBuffers
from llmtrain.plan.per_rank.near_volumes import for_rank
from llmtrain.plan.per_rank.rank_units import rank_units
from llmtrain.plan.per_rank.replica_groups import all_replica_groups
from llmtrain.plan.per_rank.tied_embedding import holds_second_copy
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.pools import GroupName, Pools
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.program.stored import stored_offsets
from llmtrain.plan.traffic import CountTraffic
from llmtrain.sharding.collectives import Packing
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.gradients import GradientPolicy
from llmtrain.sharding.hops import Hops, make_hops
from llmtrain.sharding.replica_groups import ReplicaGroups
from llmtrain.sharding.unit import ShardedUnit
from llmtrain.sharding.weights import WeightPolicy
from llmtrain.training.build_pipeline import build_executor, offloaded_activations


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """This rank's part of a model, the engine of its states, its executor, its tensor-parallel mesh, what it offloads,
    what moves activations, and the memory of the engine's buffers, if NCCL has registered it."""

    model: GPT
    engine: Engine
    executor: Executor
    mesh: TensorMesh
    offloaded: OffloadStores
    activations: OffloadedActivations | None
    registered: RegisteredMemory | None

    @property
    def pools(self) -> dict[str, int]:
        """Bytes of this rank's buffers, by what uses them."""
        groups = 0 if self.mesh.collectives is None else self.mesh.collectives.nbytes
        pools = self.engine.pools
        return {
            **pools,
            "groups": pools["groups"] + groups,
            "messages": self.executor.message_bytes,
            "receives": self.executor.posted_bytes,
        }

    def close(self) -> None:
        """Wait for pending work and leave the process groups."""
        self.executor.close()
        if self.registered is not None:
            self.registered.deregister()
        self.engine.close()
        self.mesh.close()
        self.offloaded.close()
        if self.activations is not None:
            self.activations.close()


def build(plan: Plan, ranks: Ranks, count: CountTraffic) -> Assembly:
    """Return this rank's part of a plan's model. count: called with every collective. Collective."""
    plan = for_rank(plan, ranks.rank)
    schedule, stage_layouts = plan.pipeline.schedule, plan.stages_of(ranks.rank)
    # The first stage sends no gradient back.
    hands_back = schedule.hands_back and not all(stage_layout.opens for stage_layout in stage_layouts)
    weight_gradients = WeightGradientQueue()
    # The order matters: create the model on the meta device, remove the layers of other stages, shard layers along the
    # tensor axis, allocate the units' memory, and compile last, because torch.compile traces the final modules.
    model = GPT(plan.model, ranks.device, [group for layout in stage_layouts for group in layout.groups])
    keep(model, stage_layouts)
    programs = Programs(ProgramSpec.of(plan, ranks.rank))
    pools = Pools.of(plan, ranks.rank, programs)
    mesh = _mesh(plan, ranks, pools, count)
    parallelize(model, mesh, weight_gradients if schedule.splits_backward or hands_back else None)
    offloaded = open_offload(plan, ranks, programs)
    registered = ranks.registered_memory() if plan.sharding.registered else None
    allocating = registered.allocating if registered else nullcontext
    with allocating():
        # Every rank makes the groups of every placement, even if none of its units has that placement.
        hops = {placement: make_hops(ranks, placement, lanes) for placement, lanes in pools.lanes.items()}
    hops = {placement: replace(one, allocating=allocating) for placement, one in hops.items()}
    units = place_units(_units(model, plan, ranks, hops), offloaded)
    groups = _replica_groups(plan, ranks, pools.groups)
    gradients = offloaded_gradients(plan, ranks, offloaded, units, groups.shares)
    sharding = ShardingSpec(
        _weight_policy(plan, programs, offloaded),
        GradientPolicy(
            _packing(plan.sharding.quantization.gradients, plan.sharding.quantization.block), gradients, plan.sums_runs
        ),
        groups,
        pools.in_flight,
        None if offloaded.states is None else offloaded.states.stepper,
    )
    with allocating():
        engine = Engine(model, units, sharding, programs, count)
    if registered:
        registered.register(group for one in hops.values() for group in one.groups)
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = plan.training.attention
    if plan.training.compile:
        _compile(model)
    activations = offloaded_activations(model, plan, ranks)
    executor = build_executor(model, plan, ranks, engine, weight_gradients, activations, count)
    return Assembly(
        model=model,
        engine=engine,
        executor=executor,
        mesh=mesh,
        offloaded=offloaded,
        activations=activations,
        registered=registered,
    )


def _compile(model: GPT) -> None:
    """Let torch compile each block, except for layers that communicate or defer weight gradients."""
    for block in model.blocks.values():
        for layer in block.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear | SplitBackwardLinear):
                layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]
        # Not `block.compile()`, which would trace the engine's hooks too. All blocks share one graph, of fixed
        # shapes: an evaluation's last microbatch may be smaller, but must not make the code of training slower.
        block.forward = torch.compile(block.forward, dynamic=False)


def _mesh(plan: Plan, ranks: Ranks, pools: Pools, count: CountTraffic) -> TensorMesh:
    """Connect this rank with the other ranks of its tensor-parallel group. Collective."""
    layout = ranks.layout
    degree = layout.degree(Axis.TENSOR)
    if degree == 1:
        return TensorMesh()
    collectives = ranks.collectives(make_groups(ranks, layout.groups(Axis.TENSOR)), pools.groups["tensor"])
    group = layout.group_of(ranks.rank, Axis.TENSOR)
    tier = tier_between(ranks.tiers, min(group), max(group))
    tensor_rank = layout.coordinate(ranks.rank, Axis.TENSOR)
    counted = count_as_tensor(count, tier)
    return TensorMesh(tensor_rank, degree, collectives, plan.sequence_parallel, counted, ranks.activity)


def _units(model: GPT, plan: Plan, ranks: Ranks, hops: Mapping[Placement, Hops]) -> Iterator[ShardedUnit]:
    """Yield each unit with this rank's states. hops: between the ranks that share model states."""
    placements = plan.sharding.placements
    for spec in rank_units(plan, ranks.rank):
        yield ShardedUnit(
            spec, model.unit(spec.name), hops[placements[spec.name]], DTYPES[plan.compute], plan.seed, ranks.device
        )


def _weight_policy(plan: Plan, programs: Programs, offloaded: OffloadStores) -> WeightPolicy:
    """Return how weights are gathered."""
    quantization = plan.sharding.quantization
    return WeightPolicy(
        packing=_packing(quantization.weights, quantization.block),
        secondary=_packing(quantization.secondary, quantization.block),
        tensor_parallel=plan.grid.degree(Axis.TENSOR) > 1,
        offloaded=offloaded.weights,
        stored=programs.spec.stored,
        updated=stored_offsets(programs.spec, programs.step.weights),
    )


def _packing(bits: int, block: int) -> Packing | None:
    return Packing(bits, block) if bits else None


def _replica_groups(plan: Plan, ranks: Ranks, buffers: Mapping[GroupName, CollectiveBuffers]) -> ReplicaGroups:
    """Connect the ranks beyond the data-parallel ones that hold the same parameters. Collective."""
    # All ranks make all groups. Tensor-parallel ranks have one more, as sums of parts run in parallel with those of the
    # layers.
    joined = {
        name: ranks.collectives(group, buffers[name])
        for name, groups in all_replica_groups(plan).items()
        if (group := join_group(ranks, groups)) is not None
    }
    tied, second = {}, frozenset[str]()
    if "tied" in joined:
        tied = {"embedding": joined["tied"]}
        if holds_second_copy(plan, ranks.rank):
            # The copy has position embeddings, which it does not use, so that both copies are sharded in the same way.
            second = frozenset({"embedding"})
    copies, partial, stage = plan.grid.degree(Axis.TENSOR), joined.get("partial"), joined.get("stage")
    return ReplicaGroups(copies, partial, stage, tied, second, ranks.activity)
