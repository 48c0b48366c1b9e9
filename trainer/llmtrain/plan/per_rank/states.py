"""The bytes of model states on a rank, exactly as `llmtrain.sharding` allocates them. No torch in here."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from llmtrain_kernels.quantize.packed_size import packed_bytes

from llmtrain.cluster.description import Cluster
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.levels import Degrees
from llmtrain.cluster.memory import stated_memory
from llmtrain.model.tensors import UnitSpec
from llmtrain.plan.per_rank.roles import Role, roles
from llmtrain.plan.placement import Placement
from llmtrain.plan.plan import Plan, Quantization, Sharding
from llmtrain.plan.summed import summed

# Share of the accelerator's memory for model states; activations and gathered weights need the remainder.
STATES_SHARE = 0.7


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of a rank's model states, with padding.

    weights: in the compute dtype. gradients: their sums. masters: fp32 weights of their own; 0 where the weights are
    the masters. moments: AdamW's two, fp32. secondary: the secondary copy of the weights, packed or not. replicated:
    TP-replicated parameters, kept unpacked in addition to quantized weights.
    """

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    moments: int = 0
    secondary: int = 0
    replicated: int = 0

    def __add__(self, other: "StateBytes") -> "StateBytes":
        """Return the sum of each state."""
        return summed(self, other)

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer states."""
        return self.masters + self.moments

    @property
    def total(self) -> int:
        """Bytes of all states together."""
        return sum(getattr(self, one.name) for one in fields(self))


def role_states(plan: Plan, role: Role) -> StateBytes:
    """Return the model states of each rank of a role."""
    return state_bytes(role.units, plan.sharding, plan.compute_bytes, plan.grid.degree(Axis.TENSOR))


def most_states(plan: Plan) -> StateBytes:
    """Return the model states of the rank that holds most."""
    return max((role_states(plan, role) for role in roles(plan)), key=lambda states: states.total)


def state_bytes(units: Iterable[UnitSpec], sharding: Sharding, compute_bytes: int, tensor: int) -> StateBytes:
    """Return the model states of a rank. units: its units, sliced for it. compute_bytes: of an element of the compute
    dtype. tensor: number of tensor-parallel ranks."""
    total = StateBytes()
    for unit in units:
        placement, quantization = sharding.placements[unit.name], sharding.quantization
        stays = sharding.offload.resident(unit.name, placement.padded(unit.numel) // placement.degrees.optimizer)
        total += unit_states(unit.numel, placement, quantization, compute_bytes, stays)
        packed = quantization.weights > 0 or quantization.secondary > 0
        if updates_apart(unit, placement.degrees, packed, tensor > 1):
            total += StateBytes(replicated=unit.replicated_numel * compute_bytes)
    return total


def unit_states(
    numel: int, placement: Placement, quantization: Quantization, compute_bytes: int, stays: int | None = None
) -> StateBytes:
    """Return the model states of one rank for a unit of `numel` elements, without those that are offloaded. stays:
    number of elements whose optimizer states are not; None for all."""
    padded, degrees = placement.padded(numel), placement.degrees
    summed = 0 if placement.moves_gradients else padded // degrees.gradients
    stepped = padded // degrees.optimizer if stays is None else stays
    secondary = 0
    if degrees.secondary:
        copied = padded // degrees.secondary
        packed = quantization.secondary
        secondary = packed_bytes(copied, packed, quantization.block) if packed else copied * compute_bytes
    return StateBytes(
        weights=0 if placement.moves_weights else padded // degrees.weights * compute_bytes,
        gradients=summed * placement.gradient_bytes(compute_bytes),
        masters=stepped * 4 if placement.masters == "separate" else 0,
        moments=stepped * 8,
        secondary=secondary,
    )


def fits(
    cluster: Cluster | None, every_role: Sequence[Role], compute_bytes: int, tensor: int
) -> Callable[[Sharding], bool] | None:
    """Return a function that decides whether model states, sharded in a given way, fit the accelerator's memory; None
    if the description has no memory. every_role: those of all ranks."""
    memory = stated_memory(cluster)
    if memory is None:
        return None
    limit = STATES_SHARE * memory.size
    return lambda sharding: all(
        state_bytes(role.units, sharding, compute_bytes, tensor).total <= limit for role in every_role
    )


def updates_apart(unit: UnitSpec, degrees: Degrees, packed: bool, tensor_parallel: bool) -> bool:
    """Return whether a unit's TP-replicated parameters are sent unpacked, apart from the rest. packed: whether weights
    or their secondary copy are packed. tensor_parallel: whether tensor-parallel ranks share the unit."""
    return tensor_parallel and packed and degrees.optimizer > 1 and unit.replicated_numel > 0
