"""Process groups of some of a run's ranks, each on the network card that its ranks can use."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from llmtrain.cluster.nic import card_of
from llmtrain.comm.groups import group_over

if TYPE_CHECKING:
    from llmtrain.comm.ranks import Ranks


def make_groups(ranks: "Ranks", groups: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Make process groups of the run's ranks, and return the one that this rank is in. Collective over all ranks.

    See `join_group`; here one has this rank.
    """
    group = join_group(ranks, groups, backend)
    if group is None:
        raise ValueError(f"rank {ranks.rank} is in none of the groups {groups}")
    return group


def join_group(ranks: "Ranks", groups: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Make process groups of the run's ranks, and return the one that this rank is in, if any. Collective over all
    ranks.

    Without a cluster every group takes the backend's own choice of a card. groups: those that are used at the same
    time; none overlap. Every rank names all of them in the same order: groups that only their members know are named
    after what each has made before, which ranks need not agree on. backend: None for the run's. Raises BadInputError
    when this machine has no such card.
    """
    card = card_of(ranks.cluster, groups, ranks.rank)
    return group_over(ranks.cluster, card, groups, backend, ranks.timeout)
