"""Which units' optimizer states leave the device, and which stay. No torch in here."""

from collections.abc import Sequence
from dataclasses import replace

from llmtrain.plan.per_rank.roles import Role
from llmtrain.plan.plan import Sharding


def with_share(sharding: Sharding, every_role: Sequence[Role], share: float) -> Sharding:
    """Return a sharding with which `share` of the optimizer states of each rank leave. every_role: those of all ranks.

    The first units of a rank stay. Their gradients are complete last, and the next forward pass needs their weights
    first, so that nothing hides their steps elsewhere. All ranks with the same pipeline rank have the same share of a
    unit, and so have both copies of a tied embedding: each element is then stepped by one kernel everywhere.
    """
    shares = dict[str, float]()
    first_roles = {role.pipeline: role for role in reversed(every_role)}
    for _, role in sorted(first_roles.items()):
        sizes = {unit.name: _stepped(sharding, unit.name, unit.numel) for unit in role.units}
        stays = (1 - share) * sum(sizes.values())
        for name, size in sizes.items():
            kept = size * (1 - shares[name]) if name in shares else min(size, max(0.0, stays))
            shares.setdefault(name, 1 - kept / size)
            stays -= kept
    return replace(sharding, offload=replace(sharding.offload, share=share, shares=shares))


def _stepped(sharding: Sharding, name: str, numel: int) -> int:
    """Return the elements of a unit that one rank steps, with padding."""
    placement = sharding.placements[name]
    return placement.padded(numel) // placement.degrees.optimizer
