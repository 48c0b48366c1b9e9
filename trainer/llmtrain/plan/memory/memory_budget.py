"""The memory that a run will take on each rank's device, against what the cluster file states. No torch in here.

`_MODEL_STATES` lists the model states that a rank holds, in the order of the report.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmtrain.cluster.layout import Axis
from llmtrain.cluster.memory import stated_host_memory, stated_memory
from llmtrain.plan.memory.activations import deferred_bytes, live_activations, recomputed_peak, unit_activations
from llmtrain.plan.memory.checkpoint_copies import buffer_bytes, copy_bytes
from llmtrain.plan.memory.device_overhead import communicator_bytes, overhead_of
from llmtrain.plan.memory.offload_memory import offload_memory
from llmtrain.plan.memory.temporaries import backward_bytes, gradient_bytes, loss_bytes
from llmtrain.plan.per_rank.rank_activations import activation_memory
from llmtrain.plan.per_rank.roles import Role, roles
from llmtrain.plan.per_rank.states import role_states
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.by_rank import ProgramsOf, programs_of
from llmtrain.plan.program.pools import pool_bytes


@dataclass(frozen=True)
class RoleMemory:
    """The memory of each rank of a role. device: bytes on its device, by purpose. host: bytes of the host's memory, by
    purpose; none on a CPU, whose memory is the host's. files: bytes on NVMe volumes. activations_moved: bytes of
    activations that leave the device in a step, and come back."""

    role: Role
    device: Mapping[str, int]
    host: Mapping[str, int]
    files: int
    activations_moved: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def offloaded(self) -> int:
        """Bytes of the host's memory that offload takes."""
        return sum(size for name, size in self.host.items() if name not in _NOT_OFFLOADED)

    @property
    def model_states(self) -> int:
        """Bytes of model states on the device."""
        return sum(self.device[name] for name in _MODEL_STATES)


@dataclass(frozen=True)
class Budget:
    """The memory of a run.

    rows: one for each role, in the order of the pipeline. host: bytes of the host's memory that a rank takes, on a CPU
    all of its bytes: the mean of the node whose ranks take most. limit: bytes of a rank's device. host_limit: a rank's
    share of its host's memory. Both are None if the cluster file states none.
    """

    rows: tuple[RoleMemory, ...]
    host: int
    limit: int | None
    host_limit: int | None

    @property
    def fullest(self) -> RoleMemory:
        """The first role of those that take most."""
        return max(self.rows, key=lambda row: row.total)

    @property
    def host_excess(self) -> int:
        """Bytes that this mean exceeds a rank's share by; 0 if it does not, or if no limit is stated."""
        return 0 if self.host_limit is None else max(0, self.host - self.host_limit)

    @property
    def exceeds(self) -> bool:
        """Whether a rank lacks memory of its device, or a node's ranks lack memory of their host."""
        return bool(self.excess or self.host_excess)

    @property
    def excess(self) -> int:
        """Bytes that the fullest rank lacks; 0 if the run fits, or if no limit is stated."""
        return 0 if self.limit is None else max(0, self.fullest.total - self.limit)


def surely_exceeds(plan: Plan) -> bool:
    """Return whether a plan exceeds the stated memory even without its programs' memory, which takes long to plan for
    many microbatches, and with as much of what is offloaded on the device as that has room for."""
    limit, host = stated_memory(plan.cluster), stated_host_memory(plan.cluster, plan.grid.world)
    if limit is None:
        return False
    least = limit.size
    for role in roles(plan):
        # The first rank that exceeds it decides: there may be hundreds of roles.
        if (sure := sure_bytes(plan, role)) > limit.size:
            return True
        least = min(least, sure)
    if host is None or plan.device == "cpu":
        return False
    on_host = _mean_on_host(plan, {role: sum(host_memory(plan, role).values()) for role in roles(plan)})
    return on_host - host.size > limit.size - least


def sure_bytes(plan: Plan, role: Role) -> int:
    """Return the bytes that a rank of a role takes on its device even without its programs' memory."""
    return sum(_device_memory(plan, role, {}).values())


def memory_budget(plan: Plan, programs: ProgramsOf | None = None) -> Budget:
    """Return the memory of a plan's ranks. programs: of the ranks, if they are known."""
    made = programs or programs_of(plan)
    rows = tuple(role_memory(plan, role, made(role.rank)) for role in roles(plan))
    stated, host = stated_memory(plan.cluster), stated_host_memory(plan.cluster, plan.grid.world)
    # A CPU's memory is its host's.
    on_host = {row.role: row.total if plan.device == "cpu" else sum(row.host.values()) for row in rows}
    return Budget(rows, _mean_on_host(plan, on_host), stated.size if stated else None, host.size if host else None)


def _mean_on_host(plan: Plan, bytes_of: Mapping[Role, int]) -> int:
    """Return the mean of the bytes of the host's memory that a node's ranks take, of the node where it is largest.
    Ranks with the same pipeline rank count as the fullest of them. bytes_of: a rank's, by role."""
    by_pipeline_rank = dict[int, int]()
    for role, taken in bytes_of.items():
        by_pipeline_rank[role.pipeline] = max(by_pipeline_rank.get(role.pipeline, 0), taken)
    if plan.cluster is None or len(set(by_pipeline_rank.values())) == 1:
        return max(by_pipeline_rank.values())
    ranks, sums = min(plan.cluster.node.ranks, plan.grid.world), Counter[int]()
    for pipeline_rank, first in enumerate(plan.grid.group_of(0, Axis.PIPELINE)):
        for other in plan.grid.group_of(0, Axis.DATA, Axis.TENSOR):
            sums[(first + other) // ranks] += by_pipeline_rank[pipeline_rank]
    return -(-max(sums.values()) // ranks)


def role_memory(plan: Plan, role: Role, programs: Programs) -> RoleMemory:
    """Return the memory of each rank of a role. programs: of the role's first rank."""
    offloaded, activations = offload_memory(plan, role.rank), activation_memory(plan, role.rank)
    host = host_memory(plan, role)
    buffers = _buffers(plan, role, programs) | {"offload_slots": offloaded.slots, "weights_ahead": offloaded.ahead}
    whole = _device_memory(plan, role, buffers)
    device_and_host = ({**whole, **host}, {}) if plan.device == "cpu" else (whole, host)
    return RoleMemory(role, *device_and_host, offloaded.files + activations.files, activations.moved)


def host_memory(plan: Plan, role: Role) -> dict[str, int]:
    """Return the bytes, by purpose, that each rank of a role takes in its host's memory besides those on its device."""
    offloaded, activations = offload_memory(plan, role.rank), activation_memory(plan, role.rank)
    return {
        "process": overhead_of(plan.device).process,
        "host_states": offloaded.host,
        "host_weights": offloaded.weights,
        "host_gradients": offloaded.gradients,
        "spare_states": offloaded.spare,
        "offload_buffers": offloaded.buffers,
        "host_activations": activations.host,
        "activation_buffers": activations.buffers,
        "checkpoint_copies": copy_bytes(plan, role),
        "checkpoint_buffers": buffer_bytes(plan, role),
    }


def _device_memory(plan: Plan, role: Role, buffers: Mapping[str, int]) -> dict[str, int]:
    needs, passing, states = overhead_of(plan.device), passing_memory(plan, role), role_states(plan, role)
    lost = passing.pop("fragmentation")
    return {
        **{name: getattr(states, name) for name in _MODEL_STATES},
        **buffers,
        **passing,
        "context": needs.context + (needs.recomputation if plan.recomputes else 0),
        "communicators": communicator_bytes(plan, role.pipeline, needs),
        "fragmentation": lost,
    }


def passing_memory(plan: Plan, role: Role) -> dict[str, int]:
    """Return the bytes, by purpose, of tensors that come and go in every step, and of what the allocator cannot use
    between them."""
    passing = max(_moments(plan, role), key=lambda moment: sum(moment.values()))
    lost = int(overhead_of(plan.device).fragmentation * sum(passing.values()))
    return {"activation_slots": activation_memory(plan, role.rank).device, **passing, "fragmentation": lost}


def _buffers(plan: Plan, role: Role, programs: Programs) -> dict[str, int]:
    """Return the bytes of the memory for gathered weights, of that for unsharded gradients, and of the buffers of
    collectives and messages."""
    weights = gradients = 0
    # A program of many microbatches takes long to make.
    spec = programs.spec
    if any(spec.is_gathered(unit) or spec.is_buffered(unit) for unit in spec.degrees):
        weights, gradients = programs.step.weights, programs.step.gradients
    return {
        "gathered_weights": weights * plan.compute_bytes,
        "gradient_buffers": gradients * plan.buffered_gradient_bytes,
        "in_flight": sum(pool_bytes(plan, role.rank, programs).values()),
    }


def _moments(plan: Plan, role: Role) -> Iterator[dict[str, int]]:
    """Yield what tensors take while a chunk of the loss is computed, and in the backward pass of a block after its
    group is computed again, with all microbatches that can be alive then."""
    live, gradient = live_activations(plan, role.rank), gradient_bytes(plan, role)
    yield {"activations": live, "temporaries": max(gradient, loss_bytes(plan, role))}
    layouts, tensor_rank = plan.stages_of(role.rank), plan.grid.coordinate(role.rank, Axis.TENSOR)
    for layout in layouts:
        ends = layout.closes and len(layouts) == 1 and not deferred_bytes(plan, layout, tensor_rank)
        # A backward pass of the head is over before that of the blocks, and leaves nothing for later.
        gone = unit_activations(plan, layout, "head", tensor_rank) if ends else 0
        yield {
            "activations": live + recomputed_peak(plan, layout) - gone,
            "temporaries": gradient + backward_bytes(plan),
        }


_NOT_OFFLOADED = ("process", "checkpoint_copies", "checkpoint_buffers")
"""What a rank takes in its host's memory whether it offloads or not."""

_MODEL_STATES = ("weights", "gradients", "optimizer", "secondary", "replicated")
"""Model states, which last as long as the run."""
