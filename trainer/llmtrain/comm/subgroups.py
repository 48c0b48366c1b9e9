"""Process groups of some of a run's ranks, each on the network card that its ranks can use."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from llmtrain.cluster.nic import card_of
from llmtrain.comm.device import is_cpu
from llmtrain.comm.groups import ALWAYS, group_over

if TYPE_CHECKING:
    from llmtrain.comm.ranks import Ranks


def make_groups(
    ranks: "Ranks", groups: Sequence[Sequence[int]], backend: str | None = None, ctas: int | None = None
) -> dist.ProcessGroup:
    """Make process groups, and return the one that has this rank. Raises ValueError if none has. Collective over all
    ranks. See `join_group`."""
    group = join_group(ranks, groups, backend, ctas)
    if group is None:
        raise ValueError(f"rank {ranks.rank} is in none of the groups {groups}")
    return group


def join_group(
    ranks: "Ranks", groups: Sequence[Sequence[int]], backend: str | None = None, ctas: int | None = None
) -> dist.ProcessGroup | None:
    """Make process groups, and return the one that has this rank, if any. Collective over all ranks.

    groups: disjoint groups of ranks that communicate at the same time. Every rank passes all of them in the same order:
    torch names a group that only its members make by how many groups they have made, which can differ between ranks.
    backend: None for the run's. ctas: see `group_options`. Without a cluster the backend chooses the network card.
    Raises BadInputError if this machine lacks the card.
    """
    card = card_of(ranks.links.cluster, groups, ranks.rank)
    timeout = ranks.links.timeout if backend is not None or is_cpu(ranks.device) else ALWAYS
    return group_over(ranks.links.cluster, card, groups, backend, timeout, ctas)
