"""Which part of a rank's files lies on which NVMe volume: on those of its own socket first. No torch in here.

Every volume gets bytes of all ranks of a node in proportion to its bandwidth, as one that gets more would be waited
for. Among the ways to do so, the one is taken that moves the fewest bytes between sockets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from llmtrain.plan.activation_offload import ActivationOffload
from llmtrain.plan.offload import Offload
from llmtrain.plan.plan import Plan

Files = Offload | ActivationOffload
F = TypeVar("F", Offload, ActivationOffload)


@dataclass(frozen=True)
class VolumeShare:
    """The part of the files of a node's ranks that is on one volume.

    path: its folder. socket: the socket that it is attached to; None if it is not stated. share: its fraction of all
    bytes. far: the fraction of all bytes that it holds for ranks of other sockets.
    """

    path: str
    socket: int | None
    share: float
    far: float


def for_rank(plan: Plan, rank: int) -> Plan:
    """Return the plan with the bandwidths of volumes as a rank of the run uses them."""
    states = _near(plan, plan.sharding.offload, rank)
    sharding = replace(plan.sharding, offload=states)
    return replace(plan, sharding=sharding, activation_offload=_near(plan, plan.activation_offload, rank))


def _near(plan: Plan, files: F, rank: int) -> F:
    by_socket = _bandwidths_by_socket(plan, files)
    return files if by_socket is None else replace(files, bandwidths=by_socket[socket_of(plan, rank)])


def volume_shares(plan: Plan) -> list[VolumeShare]:
    """Return the shares of the volumes of a node, in the order of the plan's paths."""
    offload: Files = plan.sharding.offload if plan.sharding.offload.paths else plan.activation_offload
    by_socket = _bandwidths_by_socket(plan, offload)
    sockets, total = _volume_sockets(plan, offload), sum(offload.bandwidths)
    ranks, found = _ranks_of_sockets(plan), []
    for volume, path in enumerate(offload.paths):
        far = 0.0
        if by_socket is not None:
            others = (socket for socket in range(len(ranks)) if socket != sockets[volume])
            far = sum(by_socket[one][volume] * ranks[one] / sum(ranks) for one in others if ranks[one])
        found.append(VolumeShare(path, sockets[volume], offload.bandwidths[volume] / total, far))
    return found


def socket_of(plan: Plan, rank: int) -> int:
    """Return the socket of a rank of the run on a described node: neighbouring ranks share one."""
    if plan.cluster is None:
        return 0
    node = plan.cluster.node
    return rank % node.ranks * node.sockets // node.ranks


def _bandwidths_by_socket(plan: Plan, files: Files) -> list[tuple[float, ...]] | None:
    """Return the shares of a rank's bytes that the volumes get, for the ranks of each socket; None where the sockets of
    volumes are not stated, or where there is but one."""
    sockets, ranks = [one for one in _volume_sockets(plan, files) if one is not None], _ranks_of_sockets(plan)
    if len(ranks) < 2 or len(sockets) < max(2, len(files.paths)):
        return None
    bandwidths, total = files.bandwidths, sum(files.bandwidths)
    # Both in parts of all bytes of a node: what the ranks of a socket have, and what its volumes take.
    has = [count / sum(ranks) for count in ranks]
    capacity = [
        sum(w for w, own in zip(bandwidths, sockets, strict=True) if own == one) / total for one in range(len(ranks))
    ]
    near = [min(one, other) for one, other in zip(has, capacity, strict=True)]
    # What is left of both goes to the other sockets, in proportion.
    left = sum(has) - sum(near)

    def share(socket: int, volume: int) -> float:
        at = sockets[volume]
        own = near[socket] if at == socket else 0.0
        far = (has[socket] - near[socket]) * (capacity[at] - near[at]) / left if left > 1e-12 else 0.0
        return (own + far) / has[socket] * bandwidths[volume] / total / capacity[at]

    return [
        tuple(share(socket, volume) if has[socket] else 0.0 for volume in range(len(sockets)))
        for socket in range(len(ranks))
    ]


def _volume_sockets(plan: Plan, files: Files) -> Sequence[int | None]:
    """Return the socket of each volume; None if the description does not state it."""
    described = {} if plan.cluster is None else {one.path: one.socket for one in plan.cluster.node.nvme}
    return [described.get(path) for path in files.paths]


def _ranks_of_sockets(plan: Plan) -> Sequence[int]:
    """Return the number of a node's ranks on each socket."""
    if plan.cluster is None:
        return [1]
    ranks = [0] * plan.cluster.node.sockets
    for rank in range(plan.cluster.node.ranks):
        ranks[socket_of(plan, rank)] += 1
    return ranks
