"""Why a run stands still in which no rank has begun anything for long, from the ranks' heartbeats."""

from collections.abc import Mapping

from llmtrain.comm.flight_recorder import late_rank, queued_by_all
from llmtrain.comm.heartbeat import Heartbeat

# What ranks do before their first collective.
CONNECTING = "connecting to the other ranks"


def why_stalled(
    heartbeats: Mapping[int, Heartbeat], offsets: Mapping[int, float], spent: str, recorded: bool
) -> tuple[str, list[int]]:
    """Return the sentence that says it, and the ranks at fault: all others wait for the rank that stopped first.

    offsets: seconds by which this rank's clock is ahead of others'. spent: the time for which nothing has moved.
    recorded: whether collectives over NCCL are recorded.
    """
    states = {rank: heartbeat.state for rank, heartbeat in heartbeats.items()}
    if all(state.doing == CONNECTING for state in states.values()):
        return f"the ranks have not connected for {spent}; {_connecting_hint(recorded)}", []
    # A rank that writes a checkpoint comes first: the training continues meanwhile and then waits for it. Then one that
    # does not wait for others.
    begun = {rank: state.moved + offsets.get(rank, 0.0) for rank, state in states.items()}
    first = min(states, key=lambda rank: (not states[rank].writing, states[rank].waiting, begun[rank]))
    whom, groups = "the others wait", {rank: state.groups for rank, state in states.items()}
    if not states[first].writing:
        if (late := late_rank(groups)) is not None:
            first, whom = late[0], f"the others wait in {late[1]}"
        elif (what := queued_by_all(groups)) is not None:
            # No host is behind: which GPU is, nobody records.
            return (
                f"nothing has moved for {spent}: ranks wait in {what}, and all of them have queued it, so a GPU or the "
                "network stands still; NCCL_DEBUG=INFO and the kernel's log of each machine (dmesg) may show which; "
                "where a step may take as long, raise train.timeout"
            ), []
    last = heartbeats[first].last
    where = f": {whom} for rank {first} on {heartbeats[first].host}, which stopped {last}; where a step"
    if len(heartbeats) == 1:
        where = f" in {last.doing}, after step {last.step}; where that"
    return f"nothing has moved for {spent}{where} may take as long, raise train.timeout", [first]


def _connecting_hint(recorded: bool) -> str:
    """Return what to look at where ranks start and do not connect."""
    if not recorded:
        return "see whether their machines reach each other, or raise train.timeout"
    return (
        "NCCL_DEBUG=INFO shows where NCCL waits: often for a network that joins not all machines "
        "(the interface in the cluster's description sets it, or else NCCL_SOCKET_IFNAME), or for GPUs that cannot "
        "reach each other (NCCL_P2P_DISABLE=1)"
    )
